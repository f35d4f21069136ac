"""A replica that drifted is found, by tensor and rank; replicas that did not are equal bit by bit after training."""

from dataclasses import replace

import pytest
import torch

from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.topology import Topology
from forge_parallel.step.reduce import clip_grad_norm
from forge_parallel.step.step import Step
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.parity import Case, share, synthetic
from forge_parallel.verify.state import Drift, digest, drifted
from harness.pool import World

DECODER = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=61, max_length=32)

SPARSE = replace(DECODER, moe=MoEConfig(experts=4, ffn_dim=8, first_dense=1, router=SigmoidTopKConfig(bias_rate=0.01)))


def _trained(layout: str, rank: int, name: str, decoder: DecoderConfig = DECODER) -> tuple[Drift | None, Drift | None]:
    """What is found after two steps in bf16, and after one element of one rank's `name` lost its last bit."""
    at = Layout.parse(layout)
    topology = Topology.of(at, torch.device("cpu"))
    model = realize(
        Blueprint.of(decoder.build),
        Plan.of([FullyShard(), TensorParallel(), ContextParallel(), ExpertParallel()], at),
        topology,
        0,
        "bf16",
        "fp32",
    )
    optimizer, step = AdamWConfig(lr=1e-2).build(model), Step(model, CrossEntropy().build())
    case = Case(DECODER.build, step.objective, AdamWConfig().build, 61)
    for index in range(2):
        result = step(share(synthetic(case, index), topology.data_rank, topology.data_size, 1))
        clip_grad_norm(model, result.norm, 0.5)
        optimizer.step(result.skip)
        optimizer.zero_grad()
    before = drifted(model)
    if topology.rank == rank:
        local = local_box(dict(model.tensors())[name]).local
        bits = local.view(torch.int32)
        bits.flatten()[-1] ^= 1
    return before, drifted(model)


@pytest.mark.parametrize(
    ("layout", "rank", "name"),
    [
        ("hsdp2x1", 1, "blocks.1.mlp.up_proj.weight"),
        ("tp2", 1, "blocks.0.attention_norm.weight"),
        ("hsdp2x1tp2", 3, "norm.weight"),
        ("hsdp2x1tp2", 2, "norm.weight"),
        ("hsdp2x1tp2", 2, "embed.weight"),
    ],
)
def test_fault_39_a_flipped_bit_is_found_with_its_tensor_and_rank(world: World, layout: str, rank: int, name: str) -> None:
    for before, after in world.run(_trained, Layout.parse(layout).world, layout, rank, name):
        assert before is None, "two steps of training keep replicas equal"
        assert after == Drift(name, rank)


@pytest.mark.parametrize(
    ("layout", "rank", "name", "found"),
    [
        ("hsdp2x2ep2", 3, "blocks.1.mlp.experts.up_proj", True),
        ("hsdp2x2ep2", 2, "blocks.1.mlp.router.bias", True),
        ("dp2ep2", 1, "blocks.1.mlp.router.bias", True),
        ("dp2ep2", 1, "blocks.1.mlp.experts.down_proj", False),
        ("dp2cp2ep2", 2, "blocks.1.mlp.router.bias", True),
        ("tp2", 1, "blocks.1.mlp.router.weight", True),
        ("tp2", 1, "blocks.1.mlp.experts.down_proj", False),
    ],
)
def test_experts_are_replicas_on_their_own_axes(world: World, layout: str, rank: int, name: str, found: bool) -> None:
    expected = (None, Drift(name, rank) if found else None)
    assert world.run(_trained, Layout.parse(layout).world, layout, rank, name, SPARSE) == [expected] * Layout.parse(layout).world


def test_sharded_tensors_are_no_replicas(world: World) -> None:
    assert world.run(_trained, 2, "dp2", 1, "norm.weight") == [(None, None), (None, None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_sees_bits_and_places(dtype: torch.dtype) -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert digest(x) == digest(x.clone())
    assert digest(x) != digest(x.flip(0))
    assert digest(torch.zeros(3, dtype=dtype)) != digest(-torch.zeros(3, dtype=dtype))
    assert digest(torch.zeros(3, dtype=dtype)) != digest(torch.zeros(4, dtype=dtype))


def _stopped() -> str:
    from types import SimpleNamespace

    from forge_parallel.launch.watch import Watch
    from forge_train.hooks.weights import Replicas
    from forge_train.process.stop import TrainingError
    from forge_train.run.training import Clock

    at = Layout.parse("hsdp2x1")
    topology = Topology.of(at, torch.device("cpu"))
    model = realize(Blueprint.of(DECODER.build), Plan.of([FullyShard()], at), topology, 0)
    state = SimpleNamespace(step=200)
    run = SimpleNamespace(model=model, state=state, clock=Clock(), judge=lambda: None, watch=Watch())
    hook = Replicas(every=100).build()
    hook.after_step(run, None)
    if topology.rank == 1:
        local_box(dict(model.tensors())["norm.weight"]).local.add_(1e-3)
    run.state.step = 300
    try:
        hook.after_step(run, None)
    except TrainingError as refusal:
        return str(refusal)
    return "went on"


def test_fault_39_the_hook_stops_every_rank_and_names_the_drifted_one(world: World) -> None:
    for message in world.run(_stopped, 2):
        assert message.startswith("after step 300 rank 1 has other values of norm.weight than its replicas")
