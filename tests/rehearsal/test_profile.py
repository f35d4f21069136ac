"""Profiles and the times of parts of a step on CUDA devices: weights are those without them, classes sum to the window."""

from pathlib import Path
from typing import Any

import pytest

from forge_train.hooks.metrics import Log
from forge_train.hooks.profile import Profile
from forge_train.profiling.summary import summarize
from forge_train.profiling.trace import chosen_traces, read_trace
from forge_train.run.loop import fit
from forge_train.trackers import METRICS
from forge_train.trackers import read_metrics as read_metrics
from harness.pool import World
from rehearsal.ranks import own_device
from train.runs import TINY, digest, prepared

pytestmark = pytest.mark.rehearsal


def profiled(recipe: Path, overrides: list[str], keys: dict[str, Any] | None) -> tuple[str, str]:
    with own_device() as device:
        run, _ = prepared(recipe, overrides, device)
        run.hooks[:] = [] if keys is None else [Profile(**keys)]
        fit(run)
        return device.type, digest(run)


@pytest.mark.parametrize("ranks", [2])
def test_weights_are_those_without_it(devices: World, tmp_path: Path, ranks: int) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(TINY)

    def settings(name: str) -> list[str]:
        return [f"--job.dir={tmp_path / name}", "--train.max_steps=5", "--data.documents=ignore", f"--parallel.dp_shard={ranks}"]

    alone = devices.run(profiled, ranks, recipe, settings("alone"), None, group=False)
    found = devices.run(profiled, ranks, recipe, settings("run"), {"at": [3], "steps": 2}, group=False)
    assert found == alone and {kind for kind, _ in found} == {"cuda"}
    traces = chosen_traces(tmp_path / "run", 3)
    assert list(traces) == list(range(ranks))
    for path in traces.values():
        one = summarize(read_trace(path))
        assert sum(one.classes.values()) == one.window and one.about["device"] == "cuda"
        assert {row.name: row.count for row in one.annotations}["forge/forward"] == 2 * 4 // ranks


def logged(recipe: Path, overrides: list[str]) -> None:
    with own_device() as device:
        run, _ = prepared(recipe, overrides, device)
        run.hooks[:] = [Log(every=2)]
        fit(run)


def test_parts_of_a_step_are_timed_by_events_of_the_device(devices: World, tmp_path: Path) -> None:
    """Two events of the rehearsal are always a millisecond apart."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(TINY)
    devices.run(
        logged, 1, recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=4", "--data.documents=ignore"], group=False
    )
    entries = read_metrics(tmp_path / "run" / METRICS)
    assert [entry["step"] for entry in entries] == [1, 2, 4]
    for entry in entries:
        parts = {name.removeprefix("time/"): round(value, 9) for name, value in entry.items() if name.startswith("time/")}
        assert parts == {
            "data": 0.001, "count": 0.001, "forward": 0.004, "backward": 0.004, "reduce": 0.001, "optimizer": 0.001, "other": 0,
        }  # fmt: skip
        assert "mfu" not in entry and entry["model_tflops"] > 0, "the peak of a device that is not there is unknown"
