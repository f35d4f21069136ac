"""Attention in chunks, unit heads and experts with weighted inputs in layouts: as one process gives them, for packed rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from forge_core.layout import Layout
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, TopKSigmoidConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import Losses
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import OneForwardOneBackward
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.parity import Case, Measurement, compare, measure
from harness.pool import World
from parallel.one_process import alone

CPU = torch.device("cpu")
STILL: dict[str, Any] = {"temperature": 0.7, "temperature_length": 3, "temperature_shift": 1, "temperature_layers": "nope"}
ATTENTION = GQA(chunk=5, global_every=2, nope_every=2, qk_norm="unit", **STILL)
EXPERTS = MoEConfig(
    experts=8,
    top_k=2,
    shared=1,
    ffn_dim=16,
    every=2,
    router=TopKSigmoidConfig(),
    weigh_inputs=True,
    losses=Losses(global_batch=0.1),
)


def case(top_k: int) -> Case:
    sizes: dict[str, Any] = {"dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_length": 32}
    model = DecoderConfig(**sizes, vocab_size=61, attention=ATTENTION, moe=replace(EXPERTS, top_k=top_k))
    return Case(model.build, CrossEntropy().build(), AdamWConfig(lr=1e-2).build, 61, rows=8, micro_batch=2, silent=2)


LAYOUTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "dp": ("dp2", (FullyShard(),)),
    "tp": ("tp2", (TensorParallel(), FullyShard())),
    "pp": ("pp2", (FullyShard(),)),
    "cp": ("cp2", (ContextParallel(), FullyShard())),
    "cp_ring": ("cp2", (ContextParallel(kind="ring"), FullyShard())),
    "cp_ulysses": ("cp2", (ContextParallel(kind="ulysses"), FullyShard())),
    "ep": ("dp2ep2", (ExpertParallel(), FullyShard())),
    "ep_all_gather": ("dp2ep2", (ExpertParallel(dispatcher="all_gather"), FullyShard())),
    "tp_ep": ("dp2tp2ep2", (TensorParallel(), ExpertParallel(), FullyShard())),
    "recompute": ("1", (Recompute(policy="full"),)),
}
SLOW = ("cp_ring", "cp_ulysses", "ep_all_gather", "tp_ep", "recompute")


def _runs() -> Iterator[Any]:
    for top_k in (1, 2):
        for name in LAYOUTS:
            slow = name in SLOW or top_k == 2
            yield pytest.param(name, top_k, marks=pytest.mark.slow if slow else (), id=f"{name}-{top_k}")


def _measured(name: str, top_k: int) -> Measurement:
    layout, transforms = LAYOUTS[name]
    at = Layout.parse(layout)
    pipeline = Pipeline(OneForwardOneBackward().build()) if at.pp > 1 else None
    return measure(case(top_k), Plan.of(transforms, at, pipeline=pipeline), CPU)


@pytest.mark.parametrize(("name", "top_k"), list(_runs()))
def test_a_layout_equals_one_process(world: World, name: str, top_k: int) -> None:
    whole = alone(measure, replace(case(top_k), micro_batch=8), Plan.of([], Layout()), CPU)
    for found in world.run(_measured, Layout.parse(LAYOUTS[name][0]).world, name, top_k):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


@pytest.mark.slow
def test_compiled_blocks_equal_eager_ones() -> None:
    whole = measure(case(2), Plan.of([], Layout()), CPU)
    difference = compare(whole, measure(case(2), Plan.of([Compile()], Layout()), CPU))
    assert difference.accepted("fp64"), difference
