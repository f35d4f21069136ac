"""The least that a step must exchange: counted bytes against it, and it against numbers written down here."""

from dataclasses import replace
from typing import Any

import pytest

from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.dryrun.estimate import Estimate, Workload, dry_run
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.transforms.context.transform import ContextParallel, Kind
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel

LAYERS, ROWS, LENGTH, DIM, HEADS, KV_HEADS, WIDTH, MICRO_BATCHES = 2, 2, 32, 32, 8, 4, 4, 2
DECODER = DecoderConfig(dim=DIM, layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, ffn_dim=64, vocab_size=64, max_length=LENGTH)
WORKLOAD = Workload(
    DECODER.build,
    CrossEntropy().build(),
    AdamWConfig().build,
    rows=ROWS,
    length=LENGTH,
    micro_batches=MICRO_BATCHES,
    documents=True,
)
BF16, FP32, INT32 = 2, 4, 4
BLOCK = 2 * DIM * DIM + 2 * DIM * KV_HEADS * WIDTH + 3 * DIM * 64 + 2 * DIM
REST = 2 * 64 * DIM + DIM


def _wires(estimate: Estimate) -> dict[tuple[str, str], int]:
    return {(flow.axis, flow.kind): flow.wire for flow in estimate.flows if flow.axis in ("dp_shard", "dp_replicate")}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("layout", "micro_batches"), [pytest.param("dp4", 3, marks=pytest.mark.slow), ("hsdp2x8", 1)])
def test_sharding_exchanges_what_it_must_and_no_more(layout: str, micro_batches: int, reshard: bool) -> None:
    """Every dimension of this decoder divides, so nothing is padded and counted bytes are the closed form's."""
    even = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=32, vocab_size=64, max_length=32)
    workload = replace(WORKLOAD, build=even.build, micro_batches=micro_batches)
    estimate = dry_run(workload, Plan.of([FullyShard(reshard=reshard)], Layout.parse(layout)))
    counted = _wires(estimate)
    block = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16
    rest = 2 * 64 * 16 + 16
    n, r = Layout.parse(layout).dp_shard, Layout.parse(layout).dp_replicate
    expected = {
        ("dp_shard", "all_gather"): micro_batches * 2 * ((1 + reshard) * 2 * block + rest) * (n - 1) // n,
        ("dp_shard", "reduce_scatter"): 4 * (2 * block + rest) * (n - 1) // n,
    }
    if r > 1:
        expected["dp_replicate", "all_reduce"] = 2 * 4 * (2 * block + rest) // n * (r - 1) // r
    else:
        del counted["dp_shard", "all_reduce"]  # the step's scalars, over the group of all ranks
    assert counted == expected
    assert {(bound.axis, bound.kind): bound.wire for bound in estimate.bounds} == expected


def _attention(kind: str, cp: int, heads: int, kv_heads: int) -> dict[str, int]:
    """Bytes that a rank sends in attention in a step; `heads` and `kv_heads` are those that it has."""
    places = ROWS * LENGTH // cp
    gathered = (cp - 1) * places * kv_heads * 2 * WIDTH  # keys and values, to every other rank
    times = MICRO_BATCHES * LAYERS
    sent = {"all_gather": MICRO_BATCHES * (cp - 1) * places * INT32}  # documents
    if kind == "all_gather":
        return {"all_gather": sent["all_gather"] + times * gathered * BF16, "all_to_all": times * gathered * BF16}
    if kind == "ring":
        return sent | {"send": times * gathered * (2 * BF16 + FP32)}
    kv_heads = max(kv_heads, cp)  # repeated where ranks are more
    apart = (cp - 1) * places * (2 * heads * WIDTH + 2 * kv_heads * WIDTH) // cp
    return sent | {"all_to_all": times * 2 * apart * BF16}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("cp2", "all_gather"),
        pytest.param("dp2cp8", "all_gather", marks=pytest.mark.slow),
        ("cp8", "ring"),
        pytest.param("cp2tp2", "ring", marks=pytest.mark.slow),
        ("cp8", "ulysses"),
        pytest.param("dp2cp2tp4", "ulysses", marks=pytest.mark.slow),
    ],
)
def test_attention_exchanges_what_it_must_and_no_more(layout: str, kind: Kind) -> None:
    at = Layout.parse(layout)
    estimate = dry_run(WORKLOAD, Plan.of([FullyShard(), ContextParallel(kind=kind), TensorParallel()], at))
    expected = {("cp", name): size for name, size in _attention(kind, at.cp, HEADS // at.tp, KV_HEADS // at.tp).items()}
    if at.tp == 1:
        axis, n = "cp" if at.dp_shard == 1 else "world", at.dp_shard * at.cp
        gathered = MICRO_BATCHES * BF16 * (2 * LAYERS * BLOCK + REST) * (n - 1) // n
        expected[axis, "all_gather"] = expected.get((axis, "all_gather"), 0) + gathered
        expected[axis, "reduce_scatter"] = FP32 * (LAYERS * BLOCK + REST) * (n - 1) // n
    else:  # per layer two gathers and two scatters of the stream in the forward, as many in the backward; table and head
        expected.pop(("cp", "all_gather"))  # of parameters as well, which other tests look at
        places = ROWS * LENGTH // at.cp
        for name, numbers in (("all_gather", 3), ("reduce_scatter", 0)):  # the loss of each token has three
            stream = (4 * LAYERS + 2) * places * DIM * BF16 * (at.tp - 1) // at.tp
            expected["tp", name] = MICRO_BATCHES * (stream + (at.tp - 1) * places * numbers * FP32)
    bounds = {(bound.axis, bound.kind): bound.wire for bound in estimate.bounds}
    counted = {(flow.axis, flow.kind): flow.wire for flow in estimate.flows}
    assert bounds.items() >= expected.items()
    for key, size in bounds.items():
        assert counted[key] == size, key


@pytest.mark.slow
def test_where_no_closed_form_is_known_none_is_given() -> None:
    """A block that is computed again exchanges again; what shares the axis with that has no bound either."""
    full: list[Any] = [FullyShard(), ContextParallel(kind="ring"), Recompute(policy="full")]
    assert dry_run(replace(WORKLOAD, micro_batches=1), Plan.of(full, Layout.parse("cp2"))).bounds == ()
    apart = dry_run(replace(WORKLOAD, micro_batches=1), Plan.of(full, Layout.parse("dp2cp2"))).bounds
    assert {bound.axis for bound in apart} == {"world"}, "that of sharding, over both axes"
