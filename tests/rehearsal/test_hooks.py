"""Hooks that look at a device, a lack of its memory, and a model with images, in runs on CUDA devices."""

import json
from pathlib import Path
from typing import Any

import pytest

from forge_train.run.loop import fit
from forge_train.run.micro_batch import OutOfMemory
from harness.pool import World
from rehearsal.ranks import own_device
from rehearsal.test_trainer import _command, trained_where_it_runs
from train.process.test_out_of_memory import Full
from train.runs import TINY, prepared

pytestmark = pytest.mark.rehearsal
LOOK = "--hooks=[{name='log', every=1}, {name='stragglers', every=2}, {name='machine', every=2}, {name='save'}]"
SHORT = ["--train.max_steps=4", "--schedule.name=constant"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_that_look_at_a_device_change_nothing(devices: World, recipe: Path, tmp_path: Path, ranks: int) -> None:
    found = []
    for name, hooks in (("plain", []), ("looked", [LOOK])):
        settings = [f"--job.dir={tmp_path / name}", f"--parallel.dp_shard={ranks}", *SHORT, *hooks]
        found.append(devices.run(trained_where_it_runs, ranks, recipe, settings, group=False))
    plain, looked = found
    assert {rank["device"] for rank in looked} == {"cuda"}
    assert looked[0]["losses"] == plain[0]["losses"] and len(plain[0]["losses"]) == 4
    lines = [json.loads(line) for line in (tmp_path / "looked" / "metrics.jsonl").read_text().splitlines()]
    assert any(key.startswith("machine/") for line in lines for key in line), "the probes were logged"


def _full_where_it_runs(recipe: Path, settings: list[str]) -> tuple[int, str]:
    """How a run ends for whose step the device has no memory."""
    with own_device() as device:
        run, _ = prepared(recipe, settings, device)
        run.training.step = Full(run, most=0, since=2)  # type: ignore[assignment]
        try:
            fit(run)
        except OutOfMemory as full:
            return full.exit_code, str(full)
    return 0, ""


def test_a_device_without_memory_ends_a_run_with_smaller_micro_batches_next(devices: World, recipe: Path, tmp_path: Path) -> None:
    settings = [f"--job.dir={tmp_path / 'run'}", "--train.micro_batch=8", *SHORT]
    ((code, said),) = devices.run(_full_where_it_runs, 1, recipe, settings, group=False)
    assert code == 8 and "ran out of memory in step 2 with micro-batches of 8" in said
    (found,) = devices.run(trained_where_it_runs, 1, recipe, settings, group=False)
    assert len(found["losses"]) == 4, "from the start, since nothing was saved before"


def test_a_model_with_images_trains_and_answers(devices: World, tmp_path: Path) -> None:
    run: Any = tmp_path / "run"
    short = ["--train.max_steps=3", "--schedule.name=constant"]
    (found,) = devices.run(_command, 1, "run", "debug-joint", f"--job.dir={run}", *short, group=False, timeout=400)
    assert found["code"] == 0 and found["peak"] > 0
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = {key for line in logged for key in line}
    assert {"held_out/exact_match", "modality/held_out/image_gain"} <= keys
    assert len(json.loads((run / "answers.json").read_text())) == 8
