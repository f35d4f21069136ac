"""A dry run says what a real one does: bytes of every tensor and collective are compared with gloo processes, exactly."""

from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from forge_core.errors import ForgeError, LayoutError
from forge_core.layout import Layout
from forge_models.components.decoder import Decoder
from forge_models.components.objectives import CrossEntropy
from forge_parallel.clipping import clip
from forge_parallel.components.optimizers import AdamW
from forge_parallel.components.pipeline import GPipe, Interleaved, OneForwardOneBackward, ZeroBubbleV
from forge_parallel.dryrun.estimate import Estimate, Workload, dry_run
from forge_parallel.dryrun.ledger import Ledger
from forge_parallel.dryrun.world import fake_world
from forge_parallel.memory import held_after
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.plan import Plan
from forge_parallel.realization import Blueprint, realize
from forge_parallel.step import Step
from forge_parallel.topology import Topology
from forge_parallel.traffic import KINDS, NAMESPACES, SILENT, Flow, Traffic, axis_of
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.context import ContextParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import Shard
from forge_parallel.transforms.tensor import Tensor
from harness.pool import World
from parallel.tiny import DIM, LAYERS, VOCAB, TiedTiny, Tiny, cross_entropy

CPU = torch.device("cpu")
TINY = Workload(Tiny, cross_entropy, AdamW().build, rows=2, length=16, compute="fp32")
DECODER = Decoder(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=VOCAB, max_length=32)
MODELS: dict[str, Workload] = {
    "tiny": replace(TINY, documents=True),
    "tied": replace(TINY, build=TiedTiny, compute="bf16"),
    "decoder": replace(TINY, build=DECODER.build, objective=CrossEntropy().build(), compute="bf16", documents=True),
    "tied decoder": replace(TINY, build=replace(DECODER, tied_embeddings=True).build, objective=CrossEntropy().build()),
    "deep": replace(TINY, build=replace(DECODER, layers=4).build, objective=CrossEntropy().build()),
    "bf16 state": replace(TINY, build=DECODER.build, objective=CrossEntropy().build(), compute="bf16", state="bf16"),
}


@dataclass(frozen=True)
class Setup:
    """What is run: the transforms, and the pipeline where there is one."""

    transforms: tuple[Any, ...] = (Shard(),)
    pipeline: Pipeline | None = None


def piped(schedule: Any, *transforms: Any) -> Setup:
    return Setup(transforms, Pipeline(schedule.build()))


SHARDED = Setup()
CASES: dict[str, tuple[str, str, Setup]] = {
    "1": ("1", "tiny", SHARDED),
    "dp3": ("dp3", "tiny", SHARDED),
    "dp3 tied": ("dp3", "tied", SHARDED),
    "hsdp2x1 tied": ("hsdp2x1", "tied", SHARDED),
    "hsdp2x2": ("hsdp2x2", "decoder", SHARDED),
    "recompute": ("dp2", "decoder", Setup((Shard(), Recompute(("matmul", "attention"))))),
    "bf16 state": ("dp2", "bf16 state", SHARDED),
    "tp2": ("tp2", "decoder", Setup((Tensor(),))),
    "tp2 tied, whole sequences": ("tp2", "tied decoder", Setup((Tensor(sequence=False), Recompute(None)))),
    "dp2tp2": ("dp2tp2", "decoder", Setup((Tensor(), Shard(), Recompute(("matmul", "attention"))))),
    "cp2 all-gather": ("cp2", "decoder", Setup((ContextParallel("all_gather"), Shard()))),
    "cp2 ring": ("dp2cp2", "decoder", Setup((ContextParallel("ring"), Shard(), Recompute(("matmul", "attention"))))),
    "cp2 ulysses": ("cp2", "decoder", Setup((ContextParallel("ulysses"), Shard()))),
    "tp2cp2": ("cp2tp2", "decoder", Setup((Tensor(), ContextParallel("ring"), Shard()))),
    "pp2": ("pp2", "decoder", piped(OneForwardOneBackward())),
    "pp2dp2 tied": ("pp2dp2", "tied decoder", piped(GPipe(), Shard())),
    "pp2 zero bubble": ("pp2", "deep", piped(ZeroBubbleV())),
    "pp2 interleaved": ("pp2", "deep", piped(Interleaved())),
    "pp2tp2": ("pp2tp2", "deep", piped(OneForwardOneBackward(), Tensor())),
}
"""Layout, model and set-up of what is compared with a real run; a further strategy needs a line here."""


def _real(workload: Workload, layout: str, transforms: Any, pipeline: Any, micro_batches: int) -> dict[str, Any]:
    """One rank of a real run: storages behind its tensors, measured one by one, and what it exchanged in its second step."""
    at = Layout.parse(layout)
    topology, plan = Topology.of(at, CPU), Plan.of(transforms, at, pipeline)
    model = realize(Blueprint.of(workload.build), plan, topology, 0, workload.compute, workload.state)
    optimizer = workload.optimizer(model)
    step = Step(model, workload.objective)
    batches = [workload.batch() for _ in range(micro_batches)]
    optimizer.step(step(batches).skip)
    optimizer.zero_grad()
    with Traffic(at) as traffic:
        result = step(batches)
        gradients = [tensor.grad for _, tensor, _ in model.trainable() if tensor.grad is not None]
        clip(model, result.norm, 1.0)
        optimizer.step(result.skip)
    return {
        "parameters": _storages(parameter for part in model.parts for parameter in part.parameters()),
        "buffers": _storages(buffer for part in model.parts for buffer in part.buffers()),
        "gradients": _storages(gradients),
        "optimizer": _storages(tensor for kind in optimizer.state().values() for tensor in kind.values()),
        "flows": tuple(traffic.flows()),
    }


def _storages(tensors: Any) -> int:
    found = {}
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_a_real_run(world: World, case: str) -> None:
    layout, model, setup = CASES[case]
    at, micro_batches = Layout.parse(layout), 4 if setup.pipeline else 1
    workload = replace(MODELS[model], micro_batches=micro_batches)
    found = world.run(_real, at.world, workload, layout, setup.transforms, setup.pipeline, micro_batches)
    for rank in {0, at.world - 1}:
        estimate = dry_run(workload, at, setup.transforms, rank, setup.pipeline)
        assert {key: getattr(estimate, key) for key in found[rank]} == found[rank]


@pytest.mark.parametrize(
    ("layout", "setup", "micro_batches"),
    [
        ("hsdp2x2", SHARDED, 2),
        ("hsdp2x2", SHARDED, 5),
        ("hsdp2x2", Setup((Shard(reduce="each"),)), 3),
        ("pp2dp2", piped(GPipe(), Shard()), 7),
    ],
)
def test_later_micro_batches_are_counted_without_being_run(world: World, layout: str, setup: Setup, micro_batches: int) -> None:
    workload = replace(MODELS["decoder"], micro_batches=micro_batches)
    measured = world.run(_real, 4, workload, layout, setup.transforms, setup.pipeline, micro_batches)[1]
    estimate = dry_run(workload, Layout.parse(layout), setup.transforms, 1, setup.pipeline)
    assert {key: getattr(estimate, key) for key in measured} == measured


def _wires(estimate: Estimate) -> dict[tuple[str, str], int]:
    return {(flow.axis, flow.kind): flow.wire for flow in estimate.flows if flow.axis in ("dp_shard", "dp_replicate")}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("layout", "micro_batches"), [("dp4", 3), ("hsdp2x8", 1)])
def test_sharding_exchanges_what_it_must_and_no_more(layout: str, micro_batches: int, reshard: bool) -> None:
    """Every dimension of this decoder divides, so nothing is padded and counted bytes are the closed form's."""
    even = Decoder(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=32, vocab_size=64, max_length=32)
    workload = replace(MODELS["decoder"], build=even.build, micro_batches=micro_batches)
    estimate = dry_run(workload, Layout.parse(layout), [Shard(reshard=reshard)])
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


def test_padding_is_counted_and_is_above_the_bound() -> None:
    """Over 3 ranks a dimension of 8 is three times 3, one of 5 three times 2, and one of 37 three times 13."""
    rows = {VOCAB: 39, DIM: 9, 5: 6, 3 * DIM: 24}
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in Tiny().named_parameters()}
    padded = {name: rows[shape[0]] * prod(shape[1:]) for name, shape in shapes.items()}
    units = [sum(size for name, size in padded.items() if name.startswith(f"blocks.{layer}.")) for layer in range(LAYERS)]
    rest = padded["embed.weight"] + padded["head.weight"]
    estimate = dry_run(TINY, Layout.parse("dp3"), [Shard()])
    flows = {flow.kind: flow for flow in estimate.flows}
    assert flows["all_gather"].count == 2 * LAYERS + 1
    assert flows["all_gather"].payload == 4 * (2 * sum(units) + rest)
    assert flows["reduce_scatter"].payload == 4 * (sum(units) + rest)
    assert estimate.gathered == 4 * max(*units, rest)
    for bound in estimate.bounds:
        assert bound.wire < flows[bound.kind].wire


def test_elements_of_all_ranks_are_the_models() -> None:
    with torch.device("meta"):
        whole = sum(parameter.numel() for parameter in Tiny().parameters())
    estimates = [dry_run(TINY, Layout.parse("dp3"), [Shard()], rank) for rank in range(3)]
    assert sum(estimate.elements for estimate in estimates) == whole
    assert len({estimate.elements for estimate in estimates}) > 1
    assert [estimate.at["dp_shard"] for estimate in estimates] == [0, 1, 2]


# Memory within a step: exact for the operators that this machine runs.


@pytest.mark.parametrize("transforms", [[], [Recompute(None)], [Recompute(("matmul", "attention"))]], ids=["all", "full", "some"])
def test_activations_are_those_that_a_real_forward_keeps(transforms: list[Any]) -> None:
    workload = replace(MODELS["decoder"], compute="fp32")
    model = realize(Blueprint.of(workload.build), Plan.of(transforms, Layout()), Topology.of(Layout(), CPU), 0)
    step, batch = Step(model, workload.objective), workload.batch()
    _, held = held_after(lambda: step._forward(batch))
    estimate = dry_run(workload, Layout(), transforms)
    kept = 2 * 16 * 16 * 4 + VOCAB * 16 * 4  # the loss head's gradients for its input and its weight
    scalars = 64
    assert estimate.head == pytest.approx(kept, abs=scalars)
    assert estimate.activations == pytest.approx(held - kept, abs=scalars)


@pytest.mark.parametrize("transforms", [[], [Recompute(None)]], ids=["all", "recompute"])
def test_the_peak_is_that_of_the_allocator(transforms: list[Any]) -> None:
    """Torch's profiler sees every call of the allocator, so also what kernels take for themselves."""
    shape = Decoder(dim=64, layers=3, heads=4, ffn_dim=160, vocab_size=512, max_length=64)
    workload = Workload(shape.build, CrossEntropy().build(), AdamW().build, rows=4, length=64, compute="fp32")
    model = realize(Blueprint.of(workload.build), Plan.of(transforms, Layout()), Topology.of(Layout(), CPU), 0)
    optimizer, step, batch = workload.optimizer(model), Step(model, workload.objective), workload.batch()
    with profile(profile_memory=True) as profiled:
        result = step([batch])
        clip(model, result.norm, 1.0)
        optimizer.step(result.skip)
    assert profiled.kineto_results is not None
    calls = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    peak = max(accumulate(event.nbytes() for event in sorted(calls, key=lambda event: event.start_ns())))
    estimate = dry_run(workload, Layout(), transforms)
    standing = estimate.parameters + estimate.optimizer
    assert sum(estimate.peak.values()) - standing == pytest.approx(peak, rel=0.01)


def test_the_peak_names_what_it_is_made_of() -> None:
    workload = replace(MODELS["decoder"], micro_batches=3)
    one = dry_run(replace(workload, micro_batches=1), Layout.parse("dp2"), [Shard()]).peak
    many = dry_run(workload, Layout.parse("dp2"), [Shard()])
    each = dry_run(workload, Layout.parse("dp2"), [Shard(reduce="each")]).peak
    assert many.peak["parameters"] == many.parameters
    assert many.peak["optimizer state"] == many.optimizer
    with torch.device("meta"):
        whole = sum(parameter.numel() for parameter in DECODER.build().parameters())
    assert many.peak["gradients being accumulated"] == pytest.approx(4 * whole, rel=0.02)
    assert "gradients being accumulated" not in one
    assert each.get("gradients being accumulated", 0) < 2 * 4 * whole // 2 + 100  # shards only


def test_a_ledger_sees_storages_come_shrink_and_go() -> None:
    ledger = Ledger()
    before = torch.UntypedStorage.resize_
    with ledger.open():
        first = torch.zeros(100)
        second = first[10:].view(-1)
        assert second.numel() == 90
        third = torch.ones(50, dtype=torch.float64)
        ledger.name("mine", [third])
        first.untyped_storage().resize_(0)
        place = ledger.here()
        del third
    assert torch.UntypedStorage.resize_ is before
    assert ledger.at(place) == {"mine": 400}
    assert ledger.peak() == {"mine": 400, "communication": 400}
    assert ledger.at(ledger.here()) == {}


def test_compilation_is_left_out() -> None:
    plain, compiled = (dry_run(TINY, Layout.parse("dp2"), [Shard(), *extra]) for extra in ([], [Compile()]))
    assert plain == compiled


# The fake world, and counting.


def test_a_dry_run_leaves_nothing_behind_and_needs_a_process_of_its_own(world: World) -> None:
    assert dry_run(TINY, Layout.parse("dp2"), [Shard()]) == dry_run(TINY, Layout.parse("dp2"), [Shard()])
    assert not dist.is_initialized()
    with pytest.raises(ForgeError, match="at least one micro-batch"):
        dry_run(replace(TINY, micro_batches=0), Layout(), [])
    assert world.run(_inside, 2) == ["alone", "alone"]


def _inside() -> str:
    try:
        dry_run(TINY, Layout.parse("dp2"), [Shard()])
    except LayoutError as refusal:
        return "alone" if "start it alone" in str(refusal) else str(refusal)
    return "not refused"


def test_no_memory_is_taken_for_the_model() -> None:
    """This model has 192 GiB; the process would not survive it."""
    huge = Decoder(dim=32768, layers=2, heads=64, ffn_dim=131072, vocab_size=262144, max_length=16)
    workload = replace(MODELS["decoder"], build=huge.build, rows=1, documents=False)
    estimate = dry_run(workload, Layout.parse("dp4"), [Shard()])
    assert estimate.parameters > 40 * 2**30


def test_every_collective_operator_of_torch_is_known() -> None:
    """A new version of torch may bring another one, which must not slip by uncounted."""
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    operators = {operator for namespace, operator in names if namespace in NAMESPACES - {"symm_mem"}}
    assert operators <= KINDS.keys() | SILENT | {"batch_p2p_ops"}
    assert {"_allgather_base_", "allreduce_", "send", "all_to_all_single"} <= operators


def test_an_unknown_exchange_is_refused() -> None:
    with Traffic(Layout()), pytest.raises(ForgeError, match="is not counted"):
        torch.ops.symm_mem.stream_write_value32_(torch.zeros(2, dtype=torch.int32), 0, 1)


def _exchange() -> tuple[list[Flow], int]:
    """One call of each kind between three ranks; torch's own counter counts along."""
    rank, layout = dist.get_rank(), Layout.parse("dp3")
    x = torch.full((6,), float(rank))
    with Traffic(layout) as traffic, CommDebugMode() as counts:
        dist.all_reduce(x)
        dist.all_gather([torch.empty(6) for _ in range(3)], x)
        dist.reduce_scatter(torch.empty(2), list(x.split(2)))
        dist.broadcast(x, 0)
        dist.all_to_all_single(torch.empty(6), x)
        mine, theirs = [[1, 2, 3], [2, 2, 2], [3, 2, 1]][rank], [[1, 2, 3], [2, 2, 2], [3, 2, 1]][rank]
        dist.all_to_all_single(torch.empty(6), x, theirs, mine)
        waits = [dist.isend(x, (rank + 1) % 3), dist.irecv(torch.empty(6), (rank - 1) % 3)]
        for wait in waits:
            assert wait is not None
            wait.wait()
        dist.barrier()
    return traffic.flows(), counts.get_total_counts()


def test_bytes_of_each_kind(world: World) -> None:
    size = 6 * 4
    for rank, (flows, total) in enumerate(world.run(_exchange, 3)):
        assert total == 6  # sends and receives are none of its business
        kept = size // 3 + 4 * [1, 2, 1][rank]
        assert {flow.kind: (flow.axis, flow.count, flow.payload, flow.wire) for flow in flows} == {
            "all_reduce": ("dp_shard", 1, size, 2 * size * 2 // 3),
            "all_gather": ("dp_shard", 1, 3 * size, 2 * size),
            "reduce_scatter": ("dp_shard", 1, size, size * 2 // 3),
            "broadcast": ("dp_shard", 1, size, size),
            "all_to_all": ("dp_shard", 2, 2 * size, 2 * size - kept),
            "send": ("dp_shard", 1, size, size),
            "receive": ("dp_shard", 1, size, size),
        }


@pytest.mark.parametrize(
    ("layout", "ranks", "axis"),
    [
        ("dp4", [0, 1, 2, 3], "dp_shard"),
        ("dp4", [2], "self"),
        ("dp2tp2", [0, 1, 2, 3], "world"),
        ("dp2tp2", [2, 3], "tp"),
        ("dp2tp2", [1, 3], "dp_shard"),
        ("hsdp2x2cp2", [0, 1, 2, 3], "dp_shard+cp"),
        ("pp2tp2", [1, 3], "pp"),
        ("dp4ep2", [0, 1], "ep"),
        ("dp4ep2", [0, 2], "efsdp"),
        ("dp4", [0, 3], "2 ranks"),
    ],
)
def test_a_group_is_named_by_the_axes_along_which_its_ranks_differ(layout: str, ranks: list[int], axis: str) -> None:
    if axis != "2 ranks":
        assert axis_of(ranks, Layout.parse(layout)) == axis
    else:
        assert axis_of([0, 1, 3], Layout.parse(layout)) == "3 ranks"


def test_a_fake_world_ends_when_its_body_fails() -> None:
    with pytest.raises(ZeroDivisionError), fake_world(4, 3):
        assert dist.get_rank() == 3
        raise ZeroDivisionError
    assert not dist.is_initialized()
