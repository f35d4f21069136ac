"""The rule that recommends values of `[transforms.shard]`: bytes in closed form, thresholds, ties; estimates against dry runs."""

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import pytest

from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.dryrun.estimate import Workload, dry_run
from forge_parallel.dryrun.fake_world import ACCELERATORS
from forge_parallel.dryrun.sharding import USABLE, Load, Needs, Option, choose, most_open, needs, options
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import Action, OneForwardOneBackward
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel

NEEDS = Needs(lasting=1000, activations=200, passing=30, gradients=4000, weights=1500, micro_batches=8)
BASE = 1000 + 200 + 30


def table(found: tuple[Option, ...]) -> dict[tuple[str, bool | None], tuple[int, int]]:
    return {(one.reduce, one.reshard): (one.memory, one.traffic) for one in found}


def test_what_each_way_costs() -> None:
    """8 micro-batches: weights are gathered once or twice in each, gradients are reduced once or 8 times."""
    assert table(options(NEEDS, ("last", "each"), (None, True, False))) == {
        ("last", None): (BASE + 4000, 16 * 1500 + 4000),
        ("last", True): (BASE + 4000, 16 * 1500 + 4000),
        ("last", False): (BASE + 4000 + 1500, 8 * 1500 + 4000),
        ("each", None): (BASE, 16 * 1500 + 8 * 4000),
        ("each", True): (BASE, 16 * 1500 + 8 * 4000),
        ("each", False): (BASE + 1500, 8 * 1500 + 8 * 4000),
    }


def test_with_one_micro_batch_gradients_are_never_kept() -> None:
    one = replace(NEEDS, micro_batches=1)
    assert table(options(one, ("last", "each"), (None,))) == {
        ("last", None): (BASE, 2 * 1500 + 4000),
        ("each", None): (BASE, 2 * 1500 + 4000),
    }


def test_a_pipeline_reduces_once_and_keeps_unless_it_is_told_to_free() -> None:
    found = table(options(replace(NEEDS, pipelined=True), ("last", "each"), (None, True)))
    assert found["last", None] == found["each", None] == (BASE + 4000 + 1500, 1500 + 4000)
    assert found["last", True] == found["each", True] == (BASE + 4000, 16 * 1500 + 4000)


@pytest.mark.parametrize(
    ("fits", "chosen"),
    [
        (BASE + 5500, ("last", False)),
        (BASE + 5499, ("last", None)),
        (BASE + 4000, ("last", None)),
        (BASE + 3999, ("each", False)),
        (BASE + 1500, ("each", False)),
        (BASE + 1499, ("each", None)),
        (BASE, ("each", None)),
        (BASE - 1, ("each", None)),
    ],
)
def test_what_exchanges_least_of_what_fits(fits: int, chosen: tuple[str, bool | None]) -> None:
    """Up to nine tenths of a device's memory may be planned for; below the least, the least is taken."""
    found = options(NEEDS, ("last", "each"), (None, False))
    memory = -(-10 * fits // 9)
    assert 9 * memory // 10 == fits
    option = choose(found, memory)
    assert (option.reduce, option.reshard) == chosen
    assert choose(tuple(reversed(found)), memory) == option, "the order of options matters in a tie only"


def test_the_first_wins_a_tie_and_less_memory_before_it() -> None:
    tied = options(replace(NEEDS, micro_batches=1, weights=0), ("last", "each"), (None, False))
    assert len({(one.memory, one.traffic) for one in tied}) == 1 and len(tied) == 4
    assert choose(tied, 0) == choose(tied, 10**6) == tied[0]
    slim = replace(tied[3], memory=tied[3].memory - 1)
    assert choose((*tied, slim), 10**6) == slim
    assert choose((tied[0], replace(tied[2], traffic=tied[2].traffic - 1)), 0).reduce == "each"


def test_forwards_that_wait_for_their_backwards() -> None:
    order = [Action(kind, 0, 0) for kind in "FFIFWFBWB"]  # type: ignore[arg-type]
    assert most_open(order) == 3
    assert most_open([]) == 0


SHAPE = DecoderConfig(dim=256, layers=6, heads=8, kv_heads=4, ffn_dim=1024, vocab_size=2048, max_length=512)


def test_bytes_of_a_dense_model_in_closed_form() -> None:
    """bf16 beside fp32 on hsdp2x4 with cp 2 for each of 8 ranks that share: 4 + 4 + 8 bytes of state an element."""
    block = 256 * (256 + 256 + 128 + 128) + 3 * 256 * 1024 + 2 * 256
    rest = 2 * 2048 * 256 + 256
    found = needs(
        Blueprint.of(SHAPE.build), Layout(dp_replicate=2, dp_shard=4, cp=2), Load(tokens=1024, micro_batches=3, recompute="full")
    )
    assert found.gradients == 4 * (6 * block + rest)
    assert found.weights == 2 * 6 * block
    assert found.lasting == pytest.approx(16 * (6 * block + rest) / 8, rel=1e-5)
    assert found.passing == 2 * (rest + rest + block) + (2 + 4) * rest
    leaving, entering = 256 + 128 + 128 + 256 + 1024 + 1024 + 256, 3 * 256 + 256 + 2 * 256 + 1024
    assert found.activations == 512 * 2 * (6 * 256 + leaving + entering)
    assert (found.micro_batches, found.pipelined) == (3, False)


@pytest.mark.parametrize(
    ("load", "kept"),
    [
        ({}, 6 * (512 + 3072 + 2560)),
        ({"recompute": "selective"}, 6 * (512 + 3072) + 3072 + 2560),
        ({"recompute": "full", "every": 4}, 2 * 256 + 4 * (512 + 3072 + 2560) + 3072 + 2560),
    ],
)
def test_activations_by_what_is_computed_again(load: dict[str, Any], kept: int) -> None:
    assert needs(Blueprint.of(SHAPE.build), Layout(), Load(1024, 2, compute="fp32", **load)).activations == 4 * 1024 * kept


def test_selective_recomputation_keeps_what_tp_ranks_exchange() -> None:
    """On 2 ranks: of attention and feed-forward layer the gathered stream, the whole sum, and its scattered half."""
    kept = 6 * (256 + 3072 / 2 + 2 * (256 + 256 / 2 + 256 / 2)) + (3072 + 2560) / 2
    load = Load(1024, 2, compute="fp32", recompute="selective")
    assert needs(Blueprint.of(SHAPE.build), Layout(tp=2), load).activations == 4 * 1024 * kept


def test_formats_and_shards_on_the_host() -> None:
    described = Blueprint.of(SHAPE.build)
    elements = sum(parameter.numel() for parameter in described.module.parameters())
    found = {state: needs(described, Layout(), Load(8, 2, state=state)) for state in ("fp32", "bf16")}
    assert {state: one.lasting for state, one in found.items()} == {"fp32": 16 * elements, "bf16": 8 * elements}
    assert found["bf16"].gradients == found["fp32"].gradients == 4 * elements, "sums are never in bf16"
    wide = needs(described, Layout(), Load(8, 2, compute="fp64", state="fp64"))
    assert (wide.lasting, wide.gradients) == (32 * elements, 8 * elements)
    assert needs(described, Layout(), Load(8, 2, offload=True)).lasting == 0


MOE = replace(SHAPE, moe=MoEConfig(experts=8, top_k=2, ffn_dim=512))


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("shape", "layout", "reduce", "reshard", "transforms"),
    [
        (SHAPE, "dp4", "last", None, ()),
        slow(SHAPE, "pp2dp2", "last", True, ()),
        slow(MOE, "dp4ep2", "last", None, (ExpertParallel(),)),
        slow(SHAPE, "hsdp2x2", "each", False, (Recompute(policy="full"),)),
        slow(replace(SHAPE, tied_embeddings=True), "dp2", "last", False, (Recompute(policy="selective"),)),
        slow(SHAPE, "dp2tp2", "each", None, (TensorParallel(),)),
        slow(SHAPE, "dp2tp4", "last", None, (TensorParallel(), Recompute(policy="selective"))),
        slow(MOE, "dp4", "each", False, ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_estimate_is_near_a_dry_run(
    shape: DecoderConfig, layout: str, reduce: Any, reshard: bool | None, transforms: tuple[Any, ...]
) -> None:
    """Too low by no more than what is held back of a device. What is not counted, such as the work of the loss head, is
    much of a model as small as this one."""
    at, rows = Layout.parse(layout), 4
    workload = Workload(shape.build, CrossEntropy().build(), AdamWConfig().build, rows=rows, length=512, micro_batches=4)
    pipeline = Pipeline(OneForwardOneBackward().build()) if at.pp > 1 else None
    plan = Plan.of([*transforms, FullyShard(reduce=reduce, reshard=reshard)], at, pipeline)
    ranks = range(0, at.world, at.world // at.pp)
    peak = max(sum(dry_run(workload, plan, rank, accelerator=ACCELERATORS["h100"]).peak.values()) for rank in ranks)
    recompute = next((one for one in transforms if isinstance(one, Recompute)), None)
    load = Load(rows * 512, 4, top_k=2, recompute=recompute.policy if recompute else None)
    (option,) = options(needs(Blueprint.of(shape.build), at, load, pipeline), (reduce,), (reshard,))
    assert USABLE * peak <= option.memory <= 1.3 * peak


def test_experts_in_closed_form() -> None:
    """`ep` cuts the number of experts, `etp` their width; `efsdp` shards what is left. Each token has `top_k` of them."""
    described = Blueprint.of(MOE.build)
    specs = described.specs.tensors
    sizes = {name: tuple(parameter.shape) for name, parameter in described.module.named_parameters()}
    stacks = [shape for name, shape in sizes.items() if "expert" in specs[name].dims]
    experts, others = sum(map(prod, stacks)), sum(map(prod, sizes.values())) - sum(map(prod, stacks))
    shared = needs(described, Layout(dp_shard=4, ep=2), Load(1024, 2, top_k=2))
    assert shared.gradients == 4 * (others + experts // 2)
    assert shared.lasting == pytest.approx(16 * (others / 4 + experts / 2 / 2), rel=1e-5)
    cut = sum(prod(sizes[name]) for name in sizes if {"heads", "kv_heads", "ffn", "vocab"} & {*specs[name].dims}) - experts
    split = needs(described, Layout(tp=2, etp=2), Load(1024, 2, top_k=2))
    assert split.gradients == 4 * (others - cut // 2 + experts // 2)
    more = needs(described, Layout(dp_shard=4, ep=2), Load(1024, 2, top_k=4))
    slot = sum(shape[-1] + shape[-2] for shape in stacks)
    assert more.activations - shared.activations == 1024 * 2 * 2 * slot


def test_a_tied_table_counts_once() -> None:
    described = Blueprint.of(replace(SHAPE, tied_embeddings=True).build)
    elements = sum(parameter.numel() for parameter in described.module.parameters())
    assert needs(described, Layout(dp_shard=2), Load(8, 2)).gradients == 4 * elements


def test_the_fullest_rank_of_a_pipeline() -> None:
    """In 1F1B the first of two ranks keeps two micro-batches of its three blocks; of nothing else it has more."""
    at, pipeline = Layout(pp=2), Pipeline(OneForwardOneBackward().build(), "3,3")
    found = needs(Blueprint.of(SHAPE.build), at, Load(1024, 4), pipeline)
    assert found.activations == 1024 * 2 * 2 * 3 * (512 + 3072 + 2560)
    assert found.pipelined and found.weights == 2 * 3 * (256 * (256 + 256 + 128 + 128) + 3 * 256 * 1024 + 2 * 256)
