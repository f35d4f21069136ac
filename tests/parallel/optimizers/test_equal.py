"""20 steps of every optimizer are those of another library, in fp64: in one process, and in layouts that split tensors."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree

from forge_core.layout import Layout
from forge_core.protocols.model import NamedTensor
from forge_core.registry import Registry
from forge_models.objectives import CrossEntropy
from forge_parallel.model.parallel_model import ParallelModel, gathered
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim import optimizers
from forge_parallel.optim.groups import ParameterGroup, Settings
from forge_parallel.optim.schedule_free import ScheduleFree
from forge_parallel.placement.topology import Topology
from forge_parallel.sections import PipelineConfig
from forge_parallel.step.step import Step
from forge_parallel.verify.parity import Case, share, synthetic
from harness.pool import World
from harness.siblings import fast
from parallel.compositions.rows import DECODER, EXPERTS, VOCAB, schedule_class, transforms_of
from parallel.optimizers.independent import OURS, factor, set_rate, theirs

CPU = torch.device("cpu")
STEPS = 20
LAYOUTS = {"dp2": "", "hsdp2x2": "", "tp2": "", "pp2": "", "dp2tp2": "", "dp2ep2": "experts ep_all_to_all"}
GROUPS = (
    ParameterGroup(match="blocks.*.attention.*", lr=0.5, weight_decay=0.05),
    ParameterGroup(match="*norm*.weight", weight_decay=0.1),
)
DECAYED = ("matrix", "head", "router")
OBJECTIVE = CrossEntropy().build()


def case_of(experts: bool) -> Case:
    build = replace(DECODER, moe=EXPERTS if experts else None).build
    return Case(build, OBJECTIVE, AssertionError, VOCAB, rows=8, micro_batch=2)


def model_of(layout: str, row: str, groups: bool = False) -> tuple[ParallelModel, Settings]:
    """The model of these tests in a layout, and the settings of its parameters."""
    at = Layout.parse(layout)
    pipeline = PipelineConfig(schedule=schedule_class("1f1b")()).build() if at.pp > 1 else None
    plan = Plan.of(transforms_of(frozenset(row.split())).values(), at, pipeline)
    blueprint, settings = replace(case_of("experts" in row), groups=GROUPS if groups else ()).blueprint()
    return realize(blueprint, plan, Topology.of(at, CPU), 0, "fp64", "fp64"), settings


def batches(case: Case, model: Any, step: int) -> Any:
    return share(synthetic(case, step % 3), model.topology.data_rank, model.topology.data_size, case.micro_batch)


def ours(name: str, layout: str, row: str, groups: bool) -> dict[str, torch.Tensor]:
    """Weights that are evaluated, and the loss, after 20 steps in a layout."""
    case, (model, settings) = case_of("experts" in row), model_of(layout, row, groups)
    optimizer, step = optimizers.build_optimizer(OURS[name], model, settings), Step(model, OBJECTIVE)
    for index in range(STEPS):
        result = step(batches(case, model, index))
        optimizer.set_factor(factor(index))
        optimizer.step(result.skip)
        optimizer.zero_grad()
    evaluated = torch.tensor(step.evaluate(batches(case, model, 0)).loss, dtype=torch.float64)
    with model.averaged():
        return gathered(model, dict(model.parameters_held())) | {"loss": evaluated}


@cache
def independent(name: str, experts: bool) -> dict[str, torch.Tensor]:
    """The same, with the other library's optimizer in one process, which takes a global batch at once."""
    case, at, component = replace(case_of(experts), micro_batch=8), Layout(), OURS[name]
    model = realize(Blueprint.of(case.build), Plan.of([], at), Topology(at, CPU), 0, "fp64", "fp64")
    named, step = model.trainable(), Step(model, OBJECTIVE)
    optimizer = theirs(component, *([t for _, t, g in named if (g in DECAYED) is want] for want in (True, False)))
    for index in range(STEPS):
        step(batches(case, model, index))
        set_rate(optimizer, component, index)
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    loss = torch.tensor(step.evaluate(batches(case, model, 0)).loss, dtype=torch.float64)
    return {n: t.detach().clone() for n, t, _ in named} | {"loss": loss}


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name].view(tensor.shape) - tensor).abs().max()
        assert difference <= 1e-10 * tensor.abs().max().clamp(min=1e-3), (name, float(difference))


def test_every_registered_optimizer_has_an_independent_one() -> None:
    registry = Registry()
    ours = {entry.name for entry in registry.of("forge.optimizers") if entry.distribution.startswith("forge-parallel")}
    assert ours == {*OURS, "muon", "adamw8bit"}, "test_muon.py and test_eight_bit.py have those of the last two"


@pytest.mark.parametrize("name", OURS)
def test_twenty_steps_equal_another_library(name: str) -> None:
    _equal(ours(name, "1", "", False), independent(name, experts=False))


IN_LAYOUTS = [(name, layout) for name in OURS for layout in LAYOUTS]
CHEAP = [pair for pair in IN_LAYOUTS if pair[1] == "pp2" or pair == ("adamw", "dp2")]


@pytest.mark.parametrize(("name", "layout"), fast(*CHEAP, of=IN_LAYOUTS))
def test_twenty_steps_in_a_layout_equal_another_library(world: World, name: str, layout: str) -> None:
    row = LAYOUTS[layout]
    expected = independent(name, "experts" in row)
    for found in world.run(ours, Layout.parse(layout).world, name, layout, row, False):
        _equal(found, expected)


GROUPED = [(name, layout) for name in OURS for layout in ("pp2", "dp2tp2")]


@pytest.mark.parametrize(("name", "layout"), fast(("adamw", "pp2"), of=GROUPED))
def test_groups_in_a_layout_are_those_of_one_process(world: World, name: str, layout: str) -> None:
    expected = ours(name, "1", "", True)
    for found in world.run(ours, Layout.parse(layout).world, name, layout, "", True):
        _equal(found, expected)


LR, BETAS, EPS, DECAY = 3e-3, (0.85, 0.97), 1e-8, 0.2


def test_steps_of_a_smaller_rate_weigh_as_much_in_the_mean_as_those_of_the_largest() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    model: Any = SimpleNamespace(trainable=lambda: [NamedTensor("w", ours, "matrix")])
    optimizer = ScheduleFree(model, LR, BETAS, EPS, DECAY)
    other = AdamWScheduleFree([theirs], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False)
    other.train()
    for step in range(12):
        factor = 1.0 if step < 4 else 0.3
        gradient = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        ours.grad, theirs.grad = gradient, gradient.clone()
        optimizer.set_factor(factor)
        other.param_groups[0]["lr"] = LR * factor
        optimizer.step()
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    other.eval()
    with optimizer.averaged():
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
