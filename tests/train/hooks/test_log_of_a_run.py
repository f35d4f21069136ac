"""What hook `log` writes in a real run: parts of a step, memory that is held, speed."""

from pathlib import Path
from typing import Any

import pytest

from forge_core.protocols.run import Hook
from forge_train.hooks.metrics import Log
from forge_train.run.loop import fit
from forge_train.trackers import METRICS, read_metrics
from harness.pool import World
from train.runs import TINY, prepared

PARTS = ("data", "count", "forward", "backward", "reduce", "optimizer", "other")


class Timed(Hook):
    """Whether parts of each step were timed."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def before_step(self, run: Any) -> None:
        self.seen.append(run.times.timed)


def logged(recipe: Path, directory: Path, overrides: list[str], every: int = 4) -> tuple[list[dict[str, Any]], list[bool], Any]:
    run, _ = prepared(recipe, [f"--job.dir={directory}", "--checkpoint.every=0", *overrides])
    timed = Timed()
    run.hooks[:] = [Log(every=every), timed]
    fit(run)
    return read_metrics(directory / METRICS), timed.seen, run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_a_line_has_the_parts_of_its_step_and_only_such_steps_are_timed(recipe: Path, tmp_path: Path) -> None:
    entries, timed, _ = logged(recipe, tmp_path / "run", [])
    assert [entry["step"] for entry in entries] == [1, 4, 8]
    assert timed == [True, False, False, True, False, False, False, True]
    for entry in entries:
        assert {name for name in entry if name.startswith("time/")} == {f"time/{part}" for part in PARTS}
        assert all(entry[f"time/{part}"] > 0 for part in PARTS)
        assert "trace" not in entry and "stop" not in entry
    assert entries[0]["time/forward"] < entries[0]["step_seconds"]
    assert entries[1]["time/backward"] > entries[1]["time/optimizer"] / 100, "four micro-batches went backward"


def test_memory_that_is_held_is_that_of_weights_gradients_and_adam(recipe: Path, tmp_path: Path) -> None:
    entries, _, run = logged(recipe, tmp_path / "run", ["--parameters.groups=[{match='embed.weight', frozen=true}]"])
    whole = sum(parameter.numel() for parameter in run.model.part.parameters())
    tensors = sum(parameter.requires_grad for parameter in run.model.part.parameters())
    trained = whole - 61 * 16
    for entry in entries:
        assert entry["memory/parameters"] == 4 * whole
        assert entry["memory/gradients"] == 4 * trained
        assert entry["memory/optimizer"] == 2 * 4 * trained + 4 * tensors, "two moments, and a count for each tensor"
        assert "memory/rest" not in entry, "the CPU has no peak that is reset"


@pytest.mark.slow
def test_speed_follows_from_tokens_per_second(recipe: Path, tmp_path: Path) -> None:
    entries, _, _ = logged(recipe, tmp_path / "run", [])
    matrices = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24) + 61 * 16
    whole, causal = 12 * 2 * 16 * 16, 12 * 2 * 16 * (17 / 2)
    for entry in entries:
        rate = entry["tokens_per_second"]
        assert entry["model_tflops"] == pytest.approx(rate * (6 * matrices + whole) / 1e12, rel=1e-9)
        ratio = entry["mfu_attended"] / entry["mfu"]
        assert 6 * matrices / (6 * matrices + whole) < ratio <= (6 * matrices + causal) / (6 * matrices + whole)
    whole_rows, _, _ = logged(recipe, tmp_path / "other", ["--data.documents=ignore"])
    for entry in whole_rows:
        ratio = entry["mfu_attended"] / entry["mfu"]
        assert ratio == pytest.approx((6 * matrices + causal) / (6 * matrices + whole), rel=1e-9), "a row is one document"


def on_two_ranks(recipe: str, directory: str) -> list[bool]:
    return logged(Path(recipe), Path(directory), [])[1]


def test_ranks_that_write_nothing_time_nothing_and_devices_share_the_tokens(world: World, recipe: Path, tmp_path: Path) -> None:
    first, second = world.run(on_two_ranks, 2, str(recipe), str(tmp_path / "run"))
    assert any(first) and not any(second)
    entry = read_metrics(tmp_path / "run" / METRICS)[-1]
    matrices = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24) + 61 * 16
    assert entry["model_tflops"] == pytest.approx(
        entry["tokens_per_second"] / 2 * (6 * matrices + 12 * 2 * 16 * 16) / 1e12, rel=1e-9
    )
    assert entry["memory/parameters"] < 4 * (matrices + 61 * 16), "this rank's part"
