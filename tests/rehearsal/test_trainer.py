"""`forge-train` on CUDA devices: trains, evaluates, samples, saves and resumes, with the weights of a run on a CPU."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.registry import Registry
from forge_train.cli import main
from forge_train.inference.evaluation import Score, recipe_for, scores
from forge_train.inference.stored import open_weights
from harness.pool import World
from rehearsal.ranks import own_device
from train.commands.test_evaluate_command import HELD_OUT
from train.runs import TINY, train
from train.whole_runs.test_moe_run import SPARSE

pytestmark = pytest.mark.rehearsal
RECIPES = {"dense": TINY + HELD_OUT, "experts": SPARSE + HELD_OUT}
EXACT = ["--precision.compute=fp64", "--precision.state=fp64", "--schedule.name=constant"]


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPES[request.param])
    return path


def trained_where_it_runs(recipe: Path, overrides: list[str]) -> dict[str, Any]:
    """Trains to the end on the device that Forge finds."""
    with own_device() as device, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without")
        return {**train(recipe, overrides, device), "device": device.type}


def evaluated_where_it_runs(run: Path) -> Score:
    """The score of the one held-out set."""
    registry = Registry()
    with own_device() as device:
        weights = open_weights(run, registry)
        resolved = recipe_for(weights, None, [], 1, registry)
        (score,) = scores(weights, resolved, device, registry, lambda _: None)
    return score


def _weights(run: Path) -> dict[str, torch.Tensor]:
    weights = open_weights(run, Registry())
    return weights.read(list(weights.tensors))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_and_ends_with_the_weights_of_a_cpu(
    devices: World, recipe: Path, tmp_path: Path, ranks: int
) -> None:
    """One step on a CPU, four more on either; the devices save and resume once on their way."""

    def until(steps: int, run: Path) -> list[str]:
        return [f"--job.dir={run}", f"--train.max_steps={steps}", *EXACT]

    first, there, here = tmp_path / "first", tmp_path / "there", tmp_path / "here"
    trained_where_it_runs(recipe, until(1, first))
    for run in (there, here):
        shutil.copytree(first, run)
    expected = trained_where_it_runs(recipe, until(5, here))
    layout = [f"--parallel.dp_shard={ranks}"]
    found = [devices.run(trained_where_it_runs, ranks, recipe, until(steps, there) + layout, group=False) for steps in (3, 5)]
    assert {rank["device"] for part in found for rank in part} == {"cuda"} and expected["device"] == "cpu"
    assert found[0][0]["losses"] + found[1][0]["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    (score,), exact = devices.run(evaluated_where_it_runs, 1, there, group=False), evaluated_where_it_runs(here)
    assert score.loss == pytest.approx(exact.loss, rel=1e-9) and score.tokens == exact.tokens > 0
    before, after, ours = _weights(first), _weights(here), _weights(there)
    assert ours.keys() == after.keys()
    for name, weight in after.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
    assert any(not torch.equal(before[name], weight) for name, weight in after.items())


def _command(*arguments: str) -> dict[str, Any]:
    """The exit code of `forge-train`, and the most memory of the device that it held."""
    code = 0
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        try:
            main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    return {"code": code, "peak": torch.cuda.max_memory_allocated()}


@pytest.mark.parametrize("preset", ["debug", "debug-moe"])
def test_the_presets_train_evaluate_and_sample(devices: World, preset: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = ["--train.max_steps=3", "--schedule.name=constant"]
    (found,) = devices.run(_command, 1, "run", preset, f"--job.dir={run}", *short, group=False, timeout=400)
    assert found["code"] == 0 and found["peak"] > 0
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line[key] for key in ("loss", "evaluation/held_out/loss") for line in logged if key in line]
    assert len(losses) >= 2 and all(4 < loss < 6 for loss in losses), "about log 320 nats at the start"
    assert all(line["device_memory"] > 0 for line in logged if "grad_norm" in line), "not the memory of the process"
    assert (run / "samples.json").is_file()
    (again,) = devices.run(_command, 1, "generate", str(run), "--prompt", "def ", "--max-tokens", "4", group=False)
    assert again["code"] == 0 and again["peak"] > 0
