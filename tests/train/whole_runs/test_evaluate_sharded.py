"""Evaluation leaves a sharded model as it was: what is saved or trained after it is the same as without it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core.layout import Layout
from forge_parallel.launch.watch import Watch
from forge_parallel.model.parallel_model import full
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, share, synthetic
from forge_train.hooks.evaluation import Evaluate
from forge_train.process.stop import Stop
from forge_train.run.training import Clock
from harness.pool import World
from parallel.tiny import VOCAB, Tiny, cross_entropy

CASE = Case(Tiny, cross_entropy, AdamWConfig().build, VOCAB)


def trained(layout: str, compute: str, evaluate: bool) -> tuple[bool, dict[str, torch.Tensor]]:
    """(whether the parameters stay the tensors that they were, the weights after two steps)"""
    at = Layout.parse(layout)
    topology = Topology.of(at, torch.device("cpu"))
    model = realize(Blueprint.of(Tiny), Plan.of([FullyShard()], at), topology, 0, compute)
    step, optimizer = Step(model, cross_entropy), AdamWConfig(lr=0.01).build(model)

    def batches(number: int) -> list[Any]:
        return share(synthetic(CASE, number), topology.data_rank, topology.data_size, 1)

    held = SimpleNamespace(batches=lambda rank, ranks, micro_batch: batches(9))
    run = SimpleNamespace(
        state=SimpleNamespace(step=1, tokens=0),
        topology=topology,
        evaluations={"held_out": held},
        job=SimpleNamespace(train=SimpleNamespace(micro_batch=1)),
        step=step,
        console=None,
        log=lambda values: None,
        stop=Stop(2),
        watch=Watch(),
        results={},
        clock=Clock(),
        judge=lambda: None,
    )
    same = True
    for number in range(2):
        optimizer.step(step(batches(number)).skip)
        optimizer.zero_grad()
        before = [tensor for _, tensor, _ in model.trainable()]
        if evaluate:
            Evaluate(every=1).build().after_step(run, None)
        same &= all(old is new for old, (_, new, _) in zip(before, model.trainable(), strict=True))
    return same, {name: full(tensor) for name, tensor in model.tensors()}


def compared(layout: str, compute: str) -> tuple[bool, bool, set[torch.dtype]]:
    _, expected = trained(layout, compute, evaluate=False)
    same, found = trained(layout, compute, evaluate=True)
    return same, all(torch.equal(expected[name], found[name]) for name in expected), {t.dtype for t in found.values()}


@pytest.mark.parametrize(("layout", "size"), [("1", 1), ("dp2", 2), ("hsdp2x2", 4)])
def test_evaluation_leaves_no_trace(world: World, layout: str, size: int) -> None:
    """FSDP keeps the root's parameters gathered, in compute precision, after a forward that no backward follows."""
    for same, equal, dtypes in world.run(compared, size, layout, "bf16") if size > 1 else [compared(layout, "bf16")]:
        assert same, "parameters after an evaluation are not those that the optimizer holds"
        assert dtypes == {torch.float32}
        assert equal


def between(layout: str, evaluate: bool) -> dict[str, torch.Tensor]:
    """Weights after three steps, with an evaluation between each backward and its update, as `before_update` may do.

    A parameter that stayed gathered would then be older than the update, and the next forward would use it.
    """
    at = Layout.parse(layout)
    topology = Topology.of(at, torch.device("cpu"))
    model = realize(Blueprint.of(Tiny), Plan.of([FullyShard()], at), topology, 0, "fp32")
    step, optimizer = Step(model, cross_entropy), AdamWConfig(lr=0.1).build(model)
    for number in range(3):
        result = step(share(synthetic(CASE, number), topology.data_rank, topology.data_size, 1))
        if evaluate:
            step.evaluate(share(synthetic(CASE, 9), topology.data_rank, topology.data_size, 1))
        optimizer.step(result.skip)
        optimizer.zero_grad()
    return {name: full(tensor) for name, tensor in model.tensors()}


def test_an_evaluation_before_the_update_leaves_no_old_weights_behind(world: World) -> None:
    for layout, size in (("dp2", 2), ("hsdp2x2", 4)):
        expected, found = world.run(between, size, layout, False)[0], world.run(between, size, layout, True)[0]
        assert all(torch.equal(expected[name], found[name]) for name in expected)
