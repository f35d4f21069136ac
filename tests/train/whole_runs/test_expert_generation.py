"""Evaluation and samples while ranks share experts: the losses and texts of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.generation import generate
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_train.directory import SAMPLES
from harness.pool import World
from train.checkpoints.test_expert_checkpoints import LAYOUTS, RANKS, RECIPE
from train.runs import train

SAMPLE = """
[[hooks]]
name = "sample"
prompts = ["def", "a"]
max_tokens = 8
temperature = 0.9
top_k = 20
"""
EVALUATE = """
[[hooks]]
name = "evaluate"
every = 2

[data.evaluation.held_out]
name = "random"
vocab_size = 320
tokens = 500
document = 19
"""


def found(world: World, directory: Path, layout: str) -> tuple[list[Any], list[float]]:
    """Samples and losses of evaluation of a run of three steps."""
    recipe = directory / f"{layout}.toml"
    text = RECIPE.replace("evaluation = {}\n", "") + EVALUATE + SAMPLE
    recipe.write_text(text)
    run = directory / layout
    overrides = [f"--job.dir={run}", "--train.max_steps=3", "--schedule.name=constant", *LAYOUTS[layout]]
    ranks = RANKS.get(layout, 2)
    world.run(train, ranks, recipe, overrides, timeout=200) if ranks > 1 else train(recipe, overrides)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["evaluation/held_out/loss"] for line in lines if "evaluation/held_out/loss" in line]
    return json.loads((run / SAMPLES).read_text()), losses


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[float]]:
    return found(world, tmp_path_factory.mktemp("alone"), "1")


def same(world: World, tmp_path: Path, layout: str, alone: tuple[list[Any], list[float]]) -> None:
    samples, losses = found(world, tmp_path, layout)
    assert losses == pytest.approx(alone[1], rel=1e-9)
    assert len(losses) == 2
    assert samples == alone[0]
    assert [sample["prompt"] for sample in samples] == ["def", "a"]


@pytest.mark.parametrize("layout", ["tp2ep2"])
def test_a_layout_evaluates_and_writes_like_one_process(world: World, tmp_path: Path, layout: str, alone: Any) -> None:
    same(world, tmp_path, layout, alone)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep2", "ep4", "tp2", "hsdp2x2ep2", "dp2tp2ep2etp2", "pp2"])
def test_other_layouts_evaluate_and_write_like_one_process(world: World, tmp_path: Path, layout: str, alone: Any) -> None:
    same(world, tmp_path, layout, alone)


def generated(agree: bool) -> list[list[int]]:
    """Of a model that is another one on each rank, as if rounding had led to another token."""
    topology = Topology.of(Layout.parse("dp2"), torch.device("cpu"))
    shape, apart = DecoderConfig(dim=16, layers=1, heads=2, vocab_size=31, max_length=32), Topology(Layout(), torch.device("cpu"))
    model = realize(Blueprint.of(shape.build), Plan.of([], Layout()), apart, 1 + topology.rank)
    model.part.eval()
    if not agree:
        return generate(model.part, [[3, 1], [4]], max_tokens=6)
    return generate(model.part, [[3, 1], [4]], max_tokens=6, eos=range(16), agree=topology.from_first)


def test_ranks_take_the_tokens_of_the_first(world: World) -> None:
    """Else a rank that comes to the end of a text would leave the others waiting for it."""
    first, second = world.run(generated, 2, agree=False)
    assert first != second
    first, second = world.run(generated, 2, agree=True)
    assert first == second
