"""Compiled blocks whose experts are on several ranks: graphs before and behind the dispatcher, made once, for all blocks."""

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch._dynamo.utils import counters

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import Losses
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, share, synthetic
from harness.pool import World

EXPERTS = MoEConfig(
    experts=4, shared=1, ffn_dim=24, router=SigmoidTopKConfig(bias_rate=0.1), losses=Losses(global_batch=0.1, z=0.01)
)


def _graphs(layout: str, layers: Sequence[int], recompute: bool) -> list[int]:
    """Graphs after two steps of models with so many layers; making one more later, for whatever loads, is an error."""
    found = []
    for count in layers:
        torch._dynamo.reset()
        counters.clear()
        decoder = DecoderConfig(dim=32, layers=count, heads=4, kv_heads=2, ffn_dim=48, vocab_size=61, max_length=16, moe=EXPERTS)
        at = Layout.parse(layout)
        topology = Topology.of(at, torch.device("cpu"))
        transforms = [
            Compile().build(),
            FullyShard().build(),
            ExpertParallel().build(),
            *([Recompute(policy="full").build()] if recompute else []),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own imports warn
            model = realize(Blueprint.of(decoder.build), Plan.of(transforms, at), topology, 0, "bf16", "fp32")
            step, optimizer = Step(model, CrossEntropy().build()), AdamWConfig(lr=1e-2).build(model)
            case = Case(decoder.build, step.objective, AdamWConfig().build, 61)
            for number in range(5):
                with torch.compiler.set_stance("fail_on_recompile" if number > 1 else "default"):
                    result = step(share(synthetic(case, number), topology.data_rank, topology.data_size, 2))
                optimizer.step(result.skip)
                optimizer.zero_grad()
        found.append(counters["stats"]["unique_graphs"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_no_graph_is_made_after_warm_up(world: World, recompute: bool) -> None:
    for few, more in world.run(_graphs, 2, "dp2ep2", (2, 3), recompute, timeout=400):
        assert 1 < few == more, "all blocks share their graphs"


def _refused() -> str:
    decoder = DecoderConfig(dim=32, layers=1, heads=4, kv_heads=2, ffn_dim=48, vocab_size=61, max_length=16, moe=EXPERTS)
    at = Layout.parse("dp2ep2")
    transforms = [Compile().build(), FullyShard().build(), ExpertParallel().build(), Recompute().build()]
    try:
        realize(Blueprint.of(decoder.build), Plan.of(transforms, at), Topology.of(at, torch.device("cpu")), 0)
    except PlanError as error:
        return str(error)
    return ""


def test_what_selective_recomputation_keeps_is_not_lost_in_silence(world: World) -> None:
    """The compiler would give up on the whole block, and nothing would be compiled."""
    for found in world.run(_refused, 2):
        assert "transforms.recompute.policy = 'full'" in found
