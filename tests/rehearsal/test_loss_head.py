"""Where blocks are compiled for a GPU, the loss head is, too; nothing is compiled here, its passes run as they are written."""

from typing import Any

import pytest

from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.parity import Case, share, synthetic
from harness.pool import World
from rehearsal.ranks import own_device

pytestmark = pytest.mark.rehearsal
DECODER = DecoderConfig(dim=32, layers=1, heads=4, kv_heads=2, ffn_dim=32, vocab_size=50, max_length=64, soft_cap=5.0)


def _loss(layout: str, compiled: bool) -> tuple[bool, float, float]:
    """Whether the loss head is compiled, the loss, and the gradient's norm."""
    at = Layout.parse(layout)
    transforms: list[Any] = [FullyShard(), TensorParallel(), *([Compile()] if compiled else [])]
    with own_device() as device:
        model = realize(Blueprint.of(DECODER.build), Plan.of(transforms, at), Topology.of(at, device), 0, "fp64", "fp64")
        objective = CrossEntropy(z_loss=0.1).build()
        case = Case(DECODER.build, objective, lambda _: None, DECODER.vocab_size)
        batches = share(synthetic(case, 0), model.topology.data_rank, model.topology.data_size, case.micro_batch)
        found = Step(model, objective)(batches).numbers()
    return model.part.head.core.fused, found["loss"], found["grad_norm"]


@pytest.mark.parametrize(("layout", "ranks"), [("1", 1), ("tp2", 2), ("dp2", 2)])
def test_a_compiled_loss_head_gives_the_same_loss_and_gradient(devices: World, layout: str, ranks: int) -> None:
    plain, compiled = (devices.run(_loss, ranks, layout, which, group=False) for which in (False, True))
    for (fused, loss, norm), (also, same_loss, same_norm) in zip(plain, compiled, strict=True):
        assert (fused, also) == (False, True)
        assert same_loss == pytest.approx(loss, rel=1e-12)
        assert same_norm == pytest.approx(norm, rel=1e-12)
