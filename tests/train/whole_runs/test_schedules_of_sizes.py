"""Batches and rows that grow during a run: the same tokens in the same order, in every layout, and after a stop in between."""

from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import ConfigError
from forge_core.layout import Layout
from forge_core.protocols.run import Hook
from forge_core.registry import Registry
from forge_data.order.phases import length_at
from forge_train.hooks.metrics import Utilization
from forge_train.plan import largest_step, run_size
from forge_train.prediction import execution_of
from forge_train.recipe.load import load_recipe
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, prepared, train

BATCHES = "[{start=2, global_batch=8}, {start=4, global_batch=12}, {start=6, global_batch=16}]"
"""After 4 sequences a step: a ramp with four sizes."""
ROWS = "[{start=2, sequence_length=16}, {start=5, sequence_length=32, global_batch=4}]"
"""After rows of 8 tokens, 8 a step."""
CASES = {
    "batches": (["--train.global_batch=4", f"--data.phases={BATCHES}"], [4, 4, 8, 8, 12, 12, 16, 16], [16] * 8),
    "rows": (["--data.sequence_length=8", f"--data.phases={ROWS}"], [8] * 5 + [4] * 3, [8] * 2 + [16] * 3 + [32] * 3),
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def options(directory: Path, case: str, *more: str) -> list[str]:
    return [f"--job.dir={directory}", "--train.micro_batch=2", "--data.documents=ignore", *CASES[case][0], *more]


def rows(steps: list[list[str]]) -> list[bytes]:
    return [bytes.fromhex(row) for step in steps for row in step]


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_and_their_order_are_those_of_a_run_without_schedule(recipe: Path, tmp_path: Path, case: str) -> None:
    """Each sample once, at most cut into shorter rows: as many samples, at once, from steps of one size."""
    _, batches, lengths = CASES[case]
    found = train(recipe, options(tmp_path / "ramp", case))
    assert [len(step) for step in found["samples"]] == batches
    assert [{len(row) // 8 for row in rows([step])} for step in found["samples"]] == [{length} for length in lengths]
    longest = max(lengths)
    samples = sum(batch * length for batch, length in zip(batches, lengths, strict=True)) // longest
    plain = [f"--job.dir={tmp_path / 'plain'}", f"--data.sequence_length={longest}", "--data.documents=ignore"]
    sizes = ["--train.global_batch=2", f"--train.max_steps={-(-samples // 2)}"]
    expected = b"".join(rows(train(recipe, [*plain, *sizes])["samples"]))
    assert b"".join(rows(found["samples"])) == expected[: samples * longest * 8]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.dp_shard=2", "parallel.pp=2"])
@pytest.mark.parametrize("case", CASES)
def test_layouts_equal_one_process(world: World, recipe: Path, tmp_path: Path, case: str, layout: str) -> None:
    wide = ["--precision.compute=fp64", "--precision.state=fp64"]
    one = train(recipe, options(tmp_path / "one", case, *wide))
    found = world.run(train, 2, recipe, options(tmp_path / "more", case, f"--{layout}", *wide))
    for each in found:
        assert each["losses"] == pytest.approx(one["losses"], rel=1e-10)
    if "dp" in layout:
        for step, expected in enumerate(one["samples"]):
            assert [row for each in found for row in each["samples"][step]] == expected


@pytest.mark.parametrize("stop", fast(3, of=[3, 5]))
@pytest.mark.parametrize("case", CASES)
def test_a_stop_in_the_middle_changes_no_bit(recipe: Path, tmp_path: Path, case: str, stop: int) -> None:
    whole = train(recipe, options(tmp_path / "whole", case))
    fixed = ["--checkpoint.every=1"]
    first, _ = prepared(recipe, options(tmp_path / "cut", case, *fixed))
    first.hooks.append(StopAfter(stop))
    from forge_train.run.loop import fit

    fit(first)
    rest = train(recipe, options(tmp_path / "cut", case, *fixed))
    assert rest["losses"] == whole["losses"][stop:] and rest["samples"] == whole["samples"][stop:]
    assert rest["weights"] == whole["weights"]


class StopAfter(Hook):
    """Ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: Any, result: Any) -> None:
        if run.state.step == self.step:
            run.stop.end("a test")


def loaded(case: str, *more: str, world: int = 1) -> Any:
    return load_recipe("debug", [*CASES[case][0], "--train.max_steps=8", *more], world, Registry()).job


def test_totals_plan_and_metrics_follow_the_schedule() -> None:
    batches, grown = (
        loaded("batches", "--data.sequence_length=16", "--train.micro_batch=2"),
        loaded("rows", "--train.micro_batch=2"),
    )
    assert run_size(batches).tokens == 16 * 2 * (4 + 8 + 12 + 16)
    assert run_size(grown).tokens == 8 * (2 * 8 + 3 * 16) + 3 * 4 * 32
    assert largest_step(batches) == (16, 16) and largest_step(grown) == (4, 32)
    for job, length, micro_batches in ((batches, 16, 8), (grown, 32, 2)):
        modeled = execution_of(job, Layout())
        assert (modeled.length, modeled.micro_batches) == (length, micro_batches)
    assert [length_at(grown.data, step) for step in range(8)] == CASES["rows"][2]


def test_model_flops_are_those_of_the_rows_of_the_step(recipe: Path, tmp_path: Path) -> None:
    """Attention costs more in longer rows: per token, as `counts_of` says for their length."""
    from forge_models.flops import counts_of
    from forge_train.run.loop import fit

    run, _ = prepared(recipe, options(tmp_path / "run", "rows"))
    speed, counts, seen = Utilization.of(run), counts_of(run.job.model), []
    assert counts is not None

    class Look(Hook):
        def after_step(self, run: Any, result: Any) -> None:
            seen.append(speed.now(1e12, run)["model_tflops"])

    run.hooks.append(Look())
    fit(run)
    assert seen == pytest.approx([counts.training(length) for length in CASES["rows"][2]])


@pytest.mark.parametrize(
    ("phases", "more", "world", "key"),
    [
        ("[{start=2, global_batch=6}]", ["--train.micro_batch=4"], 1, "data.phases.0.global_batch"),
        ("[{start=2, global_batch=10}]", ["--parallel.dp_shard=4"], 4, "data.phases.0.global_batch"),
        ("[{start=4, global_batch=8}, {start=2, global_batch=16}]", [], 1, "data.phases.1.start"),
        ("[{start=2, sequence_length=24}]", ["--data.sequence_length=16"], 1, "data.sequence_length"),
        ("[{start=2, sequence_length=4096}]", [], 1, "data.phases.0.sequence_length"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_key(phases: str, more: list[str], world: int, key: str) -> None:
    micro = [] if any("micro" in each for each in more) else ["--train.micro_batch=1"]
    given = [f"--data.phases={phases}", "--train.global_batch=8", "--train.max_steps=8", *micro, *more]
    with pytest.raises(ConfigError) as refused:
        load_recipe("debug", given, world, Registry())
    assert key in str(refused.value)
