"""Pipelines in whole runs: recipes, checks before any process starts, checkpoints that cross stages, the parity command."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError
from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import ZeroBubbleV
from forge_parallel.placement.topology import Topology
from forge_train.cli import main
from forge_train.inference.stored import fill_from
from forge_train.recipe.load import load_recipe
from harness.pool import World
from train.runs import TINY, train

FP64 = ["--precision.compute=fp64", "--precision.state=fp64", "--model.layers=4"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True], ids=["untied", "tied"])
def test_fault_19_a_checkpoint_crosses_stages(world: World, recipe: Path, tmp_path: Path, tied: bool) -> None:
    """Three steps on two stages, three on one process, the rest on four stages of a V: the losses and samples of one run."""
    common = [*FP64, f"--model.tied_embeddings={str(tied).lower()}"]
    whole = train(recipe, [f"--job.dir={tmp_path / 'whole'}", *common])
    at = [f"--job.dir={tmp_path / 'split'}", *common]
    losses, samples = [], []
    for steps, given in (
        (3, ["--parallel.pp=2", "--parallel.pipeline.split=1,3"]),
        (6, []),
        (8, ["--parallel.pp=2", "--parallel.pipeline.schedule.name=zbv"]),
    ):
        overrides = [*at, *given]
        ranks = world.run(_until, 2, recipe, overrides, steps) if given else [_until(recipe, overrides, steps)]
        assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks), "every rank has the loss"
        assert all(rank["samples"] == ranks[0]["samples"] for rank in ranks), "stages read the same rows"
        losses += ranks[0]["losses"]
        samples += ranks[0]["samples"]
    assert losses == pytest.approx(whole["losses"], rel=1e-9)
    assert samples == whole["samples"]


def _until(recipe: Path, overrides: list[str], steps: int) -> dict[str, Any]:
    """Trains to step `steps` of a schedule of eight, and saves there."""
    from forge_train.run.loop import fit
    from train.runs import prepared

    run, recorder = prepared(recipe, overrides)
    run.stop.max_steps = steps
    fit(run)
    return {"losses": recorder.losses, "samples": recorder.samples}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (["--parallel.pp=4"], ["parallel.pipeline.split", "2 blocks cannot be split over 4 stages"]),
        (["--parallel.pp=2", "--parallel.pipeline.split=2,1"], ["has 3 blocks, but the model has 2"]),
        (["--parallel.pp=2", "--parallel.pipeline.split=two"], ["the split 'two' is not valid"]),
        (
            ["--parallel.pp=2", "--train.micro_batch=8"],
            ["parallel.pipeline.schedule", "1f1b needs at least as many micro-batches"],
        ),
        (
            [
                "--parallel.pp=2",
                "--model.layers=4",
                "--parallel.pipeline.schedule.name=zbv",
                "--transforms.compile.fullgraph=true",
            ],
            ["name = 'zbv'", "transforms.compile", "no test proves"],
        ),
        (["--parallel.pp=2", "--parallel.pipeline.schedule.name=2f2b"], ["2f2b", "1f1b"]),
        (["--parallel.pipeline.schedule={name='interleaved',stages_per_rank=1}"], ["stages_per_rank"]),
    ],
)
def test_a_recipe_that_cannot_be_cut_is_refused_before_it_starts(recipe: Path, given: list[str], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_recipe(recipe, given, 4 if "--parallel.pp=4" in given else 2)
    for message in messages:
        assert message in str(refusal.value)


@pytest.mark.slow
def test_the_parity_command_measures_pipelines(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["parity", str(recipe), "--layouts", "pp2", "--length", "8", "--steps", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--rows", "4"])
    assert not ended.value.code
    assert "bitwise" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([*command, "--rows", "1"])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "pp2: parallel.pipeline.schedule: 1f1b needs at least as many micro-batches as stages, 2, but a rank has 1 per step"
        in said
    )


def _started(expected: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Starts a tied model of four stages from given weights; whether this rank's tensors are those."""
    layout = Layout.parse("pp2")
    decoder = DecoderConfig(dim=16, layers=4, heads=4, kv_heads=2, ffn_dim=24, vocab_size=61, max_length=32, tied_embeddings=True)
    weights: Any = SimpleNamespace(
        tensors={name: SimpleNamespace(shape=tuple(tensor.shape)) for name, tensor in expected.items()},
        box=lambda name, offset, extent: expected[name],
        facts=SimpleNamespace(origin="here"),
    )
    plan = Plan.of([], layout, Pipeline(ZeroBubbleV().build()))
    topology = Topology.of(layout, torch.device("cpu"))
    model = realize(Blueprint.of(decoder.build), plan, topology, lambda built: fill_from(weights, built))
    return {
        name: torch.equal(tensor, expected["embed.weight" if name == "head.weight" else name])
        for name, tensor in model.everything.items()
    }


def test_given_weights_fill_the_stages(world: World) -> None:
    """Each rank takes its own tensors and finds fault with none of the others; the tied head has the embedding's values."""
    decoder = DecoderConfig(dim=16, layers=4, heads=4, kv_heads=2, ffn_dim=24, vocab_size=61, max_length=32, tied_embeddings=True)
    model = realize(Blueprint.of(decoder.build), Plan.of([], Layout()), Topology.of(Layout(), torch.device("cpu")), 5)
    expected = {name: tensor.detach().clone() for name, tensor in model.tensors()}
    first, second = world.run(_started, 2, expected)
    assert all(first.values())
    assert all(second.values())
    assert "head.weight" in first, "the last stage of a V is on the first rank"
    assert first.keys() | second.keys() == expected.keys() | {"head.weight"}
