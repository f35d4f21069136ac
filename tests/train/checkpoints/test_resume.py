"""Stop and resume: bitwise on the same layout, the same samples on any layout, never from a damaged checkpoint."""

import math
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from forge_core.errors import CheckpointError
from harness.pool import World
from train.runs import TINY, prepared, train


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def in_directory(path: Path) -> str:
    return f"--job.dir={path}"


def test_fault_17_stop_and_resume_is_bitwise(recipe: Path, tmp_path: Path) -> None:
    whole = train(recipe, [in_directory(tmp_path / "whole")])
    pieces = [
        train(recipe, [in_directory(tmp_path / "cut"), f"--train.max_steps={steps}", "--schedule.name=constant"])
        for steps in (2, 5, 8)
    ]
    constant = train(recipe, [in_directory(tmp_path / "constant"), "--schedule.name=constant"])
    assert [piece["step"] for piece in pieces] == [2, 5, 8]
    assert list(chain.from_iterable(piece["losses"] for piece in pieces)) == constant["losses"]
    assert list(chain.from_iterable(piece["samples"] for piece in pieces)) == constant["samples"]
    assert pieces[-1]["weights"] == constant["weights"]
    assert whole["weights"] != constant["weights"], "the schedule must matter, else nothing was compared"


def test_fault_17_resume_inside_the_schedule_is_bitwise(recipe: Path, tmp_path: Path) -> None:
    """A run that dies between saves repeats the steps since the newest checkpoint, to the bit."""
    whole = train(recipe, [in_directory(tmp_path / "whole")])
    run, recorder = prepared(recipe, [in_directory(tmp_path / "cut")])

    class Crash(Exception):
        pass

    update = run.update

    def dying(result: object) -> None:
        if run.state.step == 5:
            raise Crash
        update(result)  # type: ignore[arg-type]

    run.update = dying  # type: ignore[method-assign]
    from forge_train.run.loop import fit

    with pytest.raises(Crash):
        fit(run)
    again = train(recipe, [in_directory(tmp_path / "cut")])
    assert recorder.losses[:3] + again["losses"] == whole["losses"]
    assert again["weights"] == whole["weights"]


@pytest.mark.parametrize("layout", ["dp2", "hsdp2x1"])
def test_fault_17_stop_and_resume_is_bitwise_when_sharded(world: World, recipe: Path, tmp_path: Path, layout: str) -> None:
    size = ["--parallel.dp_replicate=2", "--parallel.dp_shard=1"] if layout == "hsdp2x1" else []
    whole = world.run(train, 2, recipe, [in_directory(tmp_path / "whole"), "--schedule.name=constant", *size])
    parts = [
        world.run(
            train, 2, recipe, [in_directory(tmp_path / "cut"), "--schedule.name=constant", f"--train.max_steps={steps}", *size]
        )
        for steps in (4, 8)
    ]
    for rank in range(2):
        assert parts[0][rank]["losses"] + parts[1][rank]["losses"] == whole[rank]["losses"]
        assert parts[1][rank]["weights"] == whole[rank]["weights"]


def test_fault_18_and_34_resume_on_4_then_2_then_1_processes_reads_the_same_samples(
    world: World, recipe: Path, tmp_path: Path
) -> None:
    """Multiset equality per step and over the epoch; losses agree to rounding."""
    steps = 4000 // 16 // 8  # one epoch: 249 rows, 31 whole global batches
    fields = ["--precision.compute=fp64", "--precision.state=fp64", "--schedule.name=constant"]
    alone = train(recipe, [in_directory(tmp_path / "alone"), *fields, f"--train.max_steps={steps}"])
    shared: list[Counter[str]] = []
    losses: list[float] = []
    for size, until in ((4, 10), (2, 20), (1, steps)):
        overrides = [in_directory(tmp_path / "elastic"), *fields, f"--train.max_steps={until}"]
        ranks = world.run(train, size, recipe, overrides) if size > 1 else [train(recipe, overrides)]
        count = len(ranks[0]["samples"])
        shared += [Counter(chain.from_iterable(rank["samples"][step] for rank in ranks)) for step in range(count)]
        losses += ranks[0]["losses"]
    assert shared == [Counter(step) for step in alone["samples"]]
    assert losses == pytest.approx(alone["losses"], rel=1e-9)
    seen = Counter(chain.from_iterable(step.elements() for step in shared))
    assert set(seen.values()) == {1}, "within an epoch no sample is read twice"
    assert len(seen) == steps * 8


def test_fault_5_a_flipped_byte_is_found_and_the_older_checkpoint_resumes(recipe: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    train(recipe, [in_directory(directory)])
    newest = max((directory / "checkpoints").glob("step-*"))
    shard = max(newest.glob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    again = train(recipe, [in_directory(directory)])
    assert len(again["losses"]) == 2, "step 8 is damaged, so it goes on after step 6"
    assert again["weights"] == train(recipe, [in_directory(tmp_path / "clean")])["weights"]
    names = {path.name for path in (directory / "checkpoints").glob("*step-*")}
    assert names == {"step-00000003", "step-00000006", "step-00000008", "damaged-step-00000008"}


@pytest.mark.parametrize("change", ["--train.global_batch=4", "--data.sequence_length=8"])
def test_the_anchor_of_a_resume_may_not_change(recipe: Path, tmp_path: Path, change: str) -> None:
    train(recipe, [in_directory(tmp_path / "run"), "--train.max_steps=3"])
    with pytest.raises(CheckpointError, match=change.removeprefix("--").split("=")[0]):
        train(recipe, [in_directory(tmp_path / "run"), change])


@pytest.mark.slow
def test_random_tokens_never_fall_below_their_entropy(recipe: Path, tmp_path: Path) -> None:
    """The floor: with every token seen once nothing can be learned, so a loss below ln V is a leak of labels."""
    overrides = ["--data.sources.0.tokens=400000", "--train.max_steps=150", "--train.global_batch=32", "--train.micro_batch=32"]
    found = train(recipe, [in_directory(tmp_path / "run"), *overrides, "--data.sources.0.document=64"])
    losses = found["losses"]
    assert len(set(chain.from_iterable(found["samples"]))) == 150 * 32, "each seen once"
    assert min(losses) > math.log(61) - 0.05
    assert sum(losses[-20:]) / 20 < sum(losses[:5]) / 5, "it does train: towards ln V from above"
