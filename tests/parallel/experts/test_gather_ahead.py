"""Where experts are on other ranks, blocks are gathered before the host waits in the one before: the order is that which torch's
profiler saw, and nothing else changes."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.profiler import profile, record_function

from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.components.experts import MoEConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.dryrun.estimate import Workload, dry_run
from forge_parallel.model.parallel_model import full
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms import fully_sharded
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, share, synthetic
from harness.pool import World
from harness.siblings import fast

VOCAB, LAYERS = 61, 3
MODEL = DecoderConfig(
    dim=16,
    ffn_dim=24,
    heads=4,
    kv_heads=2,
    layers=LAYERS,
    vocab_size=VOCAB,
    max_length=32,
    moe=MoEConfig(experts=4, ffn_dim=8, top_k=2),
)
CASE = Case(MODEL.build, CrossEntropy().build(), AdamWConfig(lr=1e-2).build, VOCAB, rows=4)


@contextmanager
def _as_fsdp_does() -> Iterator[None]:
    with patch.object(fully_sharded, "_gather_ahead", lambda *_: None):
        yield


def _made(layout: str, ahead: bool, again: bool, model: DecoderConfig = MODEL) -> tuple[Any, Step]:
    at = Layout.parse(layout)
    transforms = [FullyShard(), ExpertParallel(), *([Recompute(policy="full")] if again else [])]
    with nullcontext() if ahead else _as_fsdp_does():
        made = realize(Blueprint.of(model.build), Plan.of(transforms, at), Topology.of(at, torch.device("cpu")), 0, "fp32")
    return made, Step(made, CASE.objective)


def _events(layout: str, ahead: bool, again: bool) -> list[str]:
    """What one rank gathers and where it waits in the second step: `gather PATH`, `wait` for numbers of other ranks, in order,
    and `back` between forward and backward."""
    model, step = _made(layout, ahead, again)
    batches = share(synthetic(CASE, 0), model.topology.data_rank, model.topology.data_size, 1)
    step(batches)

    begins = torch.Tensor.backward

    def backward(loss: torch.Tensor, **given: Any) -> None:
        with record_function("turns back"):
            begins(loss, **given)

    with patch.object(torch.Tensor, "backward", backward), profile() as profiled:
        step(batches)
    found = []
    for event in sorted(profiled.events(), key=lambda event: event.time_range.start):
        if event.name.startswith("FSDP::all_gather ("):
            found.append("gather " + event.name.partition("(")[2].removesuffix(")"))
        elif event.name == "_c10d_functional::all_to_all_single":
            found.append("exchange")
        elif event.name == "turns back":
            found.append("back")
    return found


def _before_exchange(events: list[str], path: str, number: int) -> bool:
    """Whether `path` is gathered before exchange `number`, counted from 0."""
    exchanges = [at for at, event in enumerate(events) if event == "exchange"]
    return events.index(f"gather {path}") < exchanges[number]


@pytest.mark.parametrize("again", fast(False, of=[False, True]), ids=["kept", "recomputed"])
def test_the_next_block_is_gathered_before_this_one_exchanges_tokens(world: World, again: bool) -> None:
    ahead, late = (world.run(_events, 4, "dp4ep2", way, again)[1] for way in (True, False))
    assert sorted(ahead) == sorted(late), "nothing is gathered twice, or left out"
    for events, early in ((ahead, True), (late, False)):
        turn = events.index("back")
        forward, backward = events[:turn], events[turn:]
        each, back = (part.count("exchange") // LAYERS for part in (forward, backward))
        assert each >= 4 and back >= 3
        for layer in range(LAYERS - 1):
            for path in (f"blocks.{layer + 1}", f"blocks.{layer + 1}.mlp.experts"):
                assert _before_exchange(forward, path, layer * each) is early, (path, forward)
            experts = f"blocks.{layer}.mlp.experts"
            assert _before_exchange(backward, experts, (LAYERS - 2 - layer) * back) is early, (experts, backward)
    assert [event for event in ahead if event != "exchange"][:2] == ["gather blocks.0", "gather blocks.0.mlp.experts"]


def _weights(layout: str, ahead: bool, again: bool, mtp: bool) -> dict[str, torch.Tensor]:
    """After three steps, with an evaluation between them."""
    model, step = _made(layout, ahead, again, replace(MODEL, mtp=MTPConfig(depth=1)) if mtp else MODEL)
    optimizer = AdamWConfig(lr=1e-2).build(model)
    losses = []
    for number in range(3):
        batches = share(synthetic(CASE, number), model.topology.data_rank, model.topology.data_size, 1)
        result = step([*batches, *batches])
        optimizer.step(result.skip)
        optimizer.zero_grad()
        losses += [torch.tensor(result.numbers()["loss"]), torch.tensor(step.evaluate(batches).loss)]
    return {name: full(tensor) for name, tensor in model.tensors()} | {"losses": torch.stack(losses)}


@pytest.mark.parametrize(
    ("again", "mtp"),
    [
        pytest.param(False, False, id="kept"),
        *(
            pytest.param(*both, id=name, marks=pytest.mark.slow)
            for name, both in {"kept-mtp": (False, True), "recomputed": (True, False), "recomputed-mtp": (True, True)}.items()
        ),
    ],
)
def test_numbers_are_the_same_to_the_last_bit(world: World, again: bool, mtp: bool) -> None:
    ahead, late = (world.run(_weights, 4, "dp4ep2", way, again, mtp) for way in (True, False))
    for mine, other in zip(ahead, late, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def _evaluated() -> list[str]:
    """What an evaluation gathers of a model with a module of multi-token prediction, which has a block with experts."""
    model, step = _made("dp2ep2", True, False, replace(MODEL, mtp=MTPConfig(depth=1)))
    batches = share(synthetic(CASE, 0), model.topology.data_rank, model.topology.data_size, 1)
    with profile() as profiled:
        step.evaluate(batches[:1])
    return [event.name for event in profiled.events() if event.name.startswith("FSDP::all_gather (")]


def test_an_evaluation_gathers_no_block_that_it_does_not_run(world: World) -> None:
    for found in world.run(_evaluated, 2):
        assert len(found) == len(set(found)) and not any("mtp" in name for name in found)
        assert {f"FSDP::all_gather (blocks.{layer})" for layer in range(LAYERS)} <= set(found)


def test_a_plan_counts_the_block_that_is_gathered_ahead() -> None:
    workload = Workload(MODEL.build, CASE.objective, CASE.optimizer, rows=1, length=8, compute="fp32")
    plan = Plan.of([FullyShard(), ExpertParallel()], Layout.parse("dp4ep2"))
    ahead = dry_run(workload, plan)
    with _as_fsdp_does():
        late = dry_run(workload, plan)
    assert ahead.flows == late.flows
    assert ahead.peak != late.peak and ahead.peak["communication"] > late.peak["communication"]


def test_without_expert_parallelism_fsdp_does_as_it_does(world: World) -> None:
    assert world.run(_set, 2, "dp2") == [0, 0]
    assert world.run(_set, 2, "dp2ep2") == [2 * LAYERS] * 2


def _set(layout: str) -> int:
    """How many modules were told what to gather, each way."""
    told = []
    with (
        patch("torch.distributed.fsdp.FSDPModule.set_modules_to_forward_prefetch", lambda *given: told.append(given)),
        patch("torch.distributed.fsdp.FSDPModule.set_modules_to_backward_prefetch", lambda *given: told.append(given)),
    ):
        _made(layout, True, False)
    return len(told)
