"""A rank that runs out of memory: all end, and the next start takes smaller micro-batches, with the numbers of one that did."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_parallel.accelerator import is_out_of_memory
from forge_parallel.verify import proofs
from forge_train.directory import MICRO_BATCH
from forge_train.process.stop import TrainingError
from forge_train.run.loop import fit
from forge_train.run.micro_batch import OutOfMemory, smaller
from harness.pool import World
from train.runs import TINY, digest, prepared

EXACT = ["--precision.compute=fp64", "--precision.state=fp64"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


class Full:
    """A step for which a rank has no memory when micro-batches have more than `most` rows, from a step on."""

    def __init__(self, run: Any, most: int, since: int = 5, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.run, self.step, self.most, self.since, self.ranks = run, run.step, most, since, ranks

    def __call__(self, batches: Any, stop: bool = False, trace: bool = False) -> Any:
        rows = max(len(batch.tokens) for batch in batches)
        if rows > self.most and self.run.state.step + 1 >= self.since and self.run.topology.rank in self.ranks:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore lines")
        return self.step(batches, stop, trace)


def _goes_on(recipe: Path, folder: Path, settings: list[str], most: int) -> tuple[list[str], str, list[str]]:
    """What each failed life said, the state at the end, and what the report warns of."""
    said: list[str] = []
    for _ in range(5):
        run, _ = prepared(recipe, [f"--job.dir={folder}", *settings])
        run.training.step = Full(run, most)  # type: ignore[assignment]
        try:
            fit(run)
            return said, digest(run), run.health.summary()
        except OutOfMemory as full:
            assert full.exit_code == 8
            said.append(str(full))
    raise AssertionError(f"micro-batches do not get small enough: {said}")


def test_fault_40_the_rest_of_a_run_has_the_bits_of_smaller_micro_batches(recipe: Path, tmp_path: Path) -> None:
    settings = [*EXACT, "--train.micro_batch=8"]
    said, found, warned = _goes_on(recipe, tmp_path / "full", settings, most=2)
    assert [text.partition("ran out of memory in ")[2].split(" (")[0] for text in said] == [
        "step 5 with micro-batches of 8",
        "step 5 with micro-batches of 4",
    ]
    assert "CUDA out of memory. Tried to allocate 20 GiB.)" in said[0] and "more lines" not in said[0]
    assert any("micro-batches of 2 instead of train.micro_batch = 8: rank 0 on " in line for line in warned)
    # Without the fault: stopped where the newest checkpoint was, and on with micro-batches of 2.
    clean = [f"--job.dir={tmp_path / 'clean'}", *EXACT]
    fit(prepared(recipe, [*clean, "--train.micro_batch=8", "--train.stop_at=3"])[0])
    run, _ = prepared(recipe, [*clean, "--train.micro_batch=2"])
    fit(run)
    assert found == digest(run)


def test_fault_40_the_loss_is_that_of_large_micro_batches(recipe: Path, tmp_path: Path) -> None:
    losses = []
    for name, note in (("whole", None), ("parts", {"recipe": 8, "micro_batch": 2, "why": "a test"})):
        (tmp_path / name).mkdir()
        if note:
            (tmp_path / name / MICRO_BATCH).write_text(json.dumps(note))
        run, recorder = prepared(recipe, [f"--job.dir={tmp_path / name}", *EXACT, "--train.micro_batch=8"])
        assert run.job.train.micro_batch == (note["micro_batch"] if note else 8)
        fit(run)
        losses.append(recorder.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12, abs=0)


def _one_rank(recipe: Path, folder: Path) -> tuple[int, bool]:
    """The micro-batch of a start after rank 1 alone has left a note, and whether there is one."""
    run, _ = prepared(recipe, [f"--job.dir={folder}", "--train.micro_batch=4"])
    if run.topology.rank == 1:
        run.training.step = Full(run, 2)  # type: ignore[assignment]
        run.state.step = 4
        with pytest.raises(OutOfMemory):
            fit_one(run)
    run.topology.all_reduce(torch.ones(1))  # the other one waits for it
    again, _ = prepared(recipe, [f"--job.dir={folder}", "--train.micro_batch=4"])
    return again.job.train.micro_batch, (folder / MICRO_BATCH).exists()


def fit_one(run: Any) -> None:
    """Forward and backward of a step, as the loop has them."""
    from forge_train.run.micro_batch import note_out_of_memory

    batches, _ = next(iter(run.data.from_cursor(run.state.cursor)))
    with note_out_of_memory(run):
        run.step(batches)


def test_fault_40_what_one_rank_notes_all_take(world: World, recipe: Path, tmp_path: Path) -> None:
    assert world.run(_one_rank, 2, recipe, tmp_path / "run", timeout=60) == [(2, True), (2, True)]


def test_fault_40_micro_batches_of_one_row_end_with_what_to_change(recipe: Path, tmp_path: Path) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.micro_batch=1"])
    run.training.step = Full(run, 0)  # type: ignore[assignment]
    with pytest.raises(TrainingError, match="the smallest there are") as ended:
        fit(run)
    assert "Set transforms.recompute, shard over more ranks" in str(ended.value)
    assert ended.value.exit_code == 3 and not (tmp_path / "run" / MICRO_BATCH).exists()


@pytest.mark.parametrize(
    "note",
    ["", "[1]", '{"recipe": 4, "micro_batch": 2, "why": ""}', '{"recipe": 2, "micro_batch": 4, "why": ""}', '{"recipe": 2}'],
)
def test_a_note_of_another_recipe_or_a_damaged_one_does_not_count(recipe: Path, tmp_path: Path, note: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / MICRO_BATCH).write_text(note)
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}"])
    assert run.job.train.micro_batch == 2 and run.health.summary() == []


def test_smaller_micro_batches_divide_what_larger_ones_divide() -> None:
    assert [smaller(size) for size in (2, 3, 4, 6, 8, 12, 15, 7)] == [1, 1, 2, 3, 4, 6, 5, 1]


def test_other_errors_of_a_step_are_not_taken_for_it() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("full"))
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**50)
    assert is_out_of_memory(refused.value), "the allocator of the host itself says so"
    with pytest.raises(RuntimeError, match="in a stage") as wrapped:
        raise RuntimeError("in a stage") from refused.value
    assert is_out_of_memory(wrapped.value)
    assert not is_out_of_memory(RuntimeError("memory of a good day")) and not is_out_of_memory(ValueError("full"))


HOOK = '''
from dataclasses import dataclass

import torch

from forge_core.component import Component
from forge_core.protocols.run import Hook


class Full(Hook):
    def start(self, run):
        if run.topology.rank == 1 and run.job.train.micro_batch > 2:
            def full(module, given):
                if run.state.step == 4:
                    raise torch.OutOfMemoryError("no memory")
            run.model.parts[0].blocks["1"].register_forward_pre_hook(full)


@dataclass(frozen=True, kw_only=True)
class Fills(Component):
    """Has no memory in the middle of a forward, on rank 1."""

    def build(self):
        return Full()
'''


@pytest.mark.slow
def test_fault_40_ranks_inside_of_collectives_end_too_and_are_started_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HOOK)
    (tmp_path / "tiny.toml").write_text(TINY + '\n[[hooks]]\nname = "./mine.py:Fills"\n')
    command = [sys.executable, "-m", "forge_train", "run", "tiny.toml", "--processes=2", "--restarts=1", "--train.micro_batch=4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "exit code 8: rank 1 on " in done.stderr and "restart 1 of 1" in done.stderr
    assert "rank 0: ERROR: rank 1 ended first, with exit code 8: rank 1 on " in done.stderr
    assert "rank 0: WARNING: micro-batches of 2 instead of train.micro_batch = 4" in done.stderr
    report = json.loads((tmp_path / "runs" / "tiny" / "report.json").read_text())
    assert "micro-batches of 2 instead of" in json.dumps(report)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("--model.moe.experts=4", "--model.moe.losses.micro_batch=0.1"), r"losses\.micro_batch does depends on their size"),
        (("--model.moe.experts=4", "--model.moe.capacity=1.0"), r"moe\.capacity does depends on their size"),
    ],
)
def test_smaller_micro_batches_that_change_the_loss_are_not_taken(
    recipe: Path, tmp_path: Path, settings: tuple[str, ...], why: str
) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.micro_batch=8", *settings])
    run.training.step = Full(run, most=2)  # type: ignore[assignment]
    with pytest.raises(TrainingError, match=why):
        fit(run)
    assert not (run.directory / MICRO_BATCH).exists()


def test_smaller_micro_batches_are_not_taken_where_accumulation_is_not_proven(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One micro-batch a step is proven with recomputation; as if no test ran several of them with it."""
    pair = {"accumulate", "recompute_full"}
    left = {kind: tuple(row for row in runs if not pair <= row) for kind, runs in proofs.proven_rows().items()}
    assert all(proofs.is_proven({feature}) for feature in pair)
    monkeypatch.setattr(proofs, "proven_rows", lambda: left)
    assert not proofs.is_proven(pair)
    settings = ["--train.micro_batch=8", '--transforms.recompute={policy = "full"}']
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", *settings])
    run.training.step = Full(run, most=4)  # type: ignore[assignment]
    with pytest.raises(TrainingError, match="smaller ones are not taken") as ended:
        fit(run)
    said = str(ended.value)
    assert "train.global_batch larger than one micro-batch per data rank with transforms.recompute" in said
    assert "no test proves that it equals one process" in said and said.endswith("Set train.micro_batch yourself")
    assert ended.value.exit_code == 3 and not (run.directory / MICRO_BATCH).exists()
