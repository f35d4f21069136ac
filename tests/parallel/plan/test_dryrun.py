"""A dry run says what a real one does: bytes of every tensor and collective are compared with gloo processes, exactly."""

from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from forge_core.errors import ForgeError, LayoutError, PlanError
from forge_core.layout import Layout
from forge_models.blocks import head
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import Losses
from forge_parallel.dryrun.estimate import Workload, dry_run, dry_runs
from forge_parallel.dryrun.fake_world import expert_probability, fake_world
from forge_parallel.dryrun.memory import Ledger
from forge_parallel.dryrun.traffic import Traffic
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline import schedules
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import GPipe, Interleaved, OneForwardOneBackward, ZeroBubbleV
from forge_parallel.placement.topology import Topology
from forge_parallel.step.reduce import clip_grad_norm
from forge_parallel.step.step import Step
from forge_parallel.torch_private import FakeTensorMode, forget_meshes
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from harness.allocated import held_after
from harness.pool import World
from harness.siblings import fast
from parallel.tiny import DIM, LAYERS, VOCAB, TiedTiny, Tiny, cross_entropy

CPU = torch.device("cpu")
TINY = Workload(Tiny, cross_entropy, AdamWConfig().build, rows=2, length=16, compute="fp32")
DECODER = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=VOCAB, max_length=32)
EXPERTS = replace(
    DECODER,
    # Every token goes to every rank, whatever a router says: with 3 of 4 experts it has some on each of two ranks.
    moe=MoEConfig(experts=4, top_k=3, shared=1, router=SigmoidTopKConfig(bias_rate=0.1), losses=Losses(global_batch=0.1, z=0.1)),
)
MODELS: dict[str, Workload] = {
    "tiny": replace(TINY, documents=True),
    "tied": replace(TINY, build=TiedTiny, compute="bf16"),
    "decoder": replace(TINY, build=DECODER.build, objective=CrossEntropy().build(), compute="bf16", documents=True),
    "tied decoder": replace(TINY, build=replace(DECODER, tied_embeddings=True).build, objective=CrossEntropy().build()),
    "mtp": replace(
        TINY,
        build=replace(DECODER, tied_embeddings=True, mtp=MTPConfig(depth=2)).build,
        objective=CrossEntropy().build(),
        documents=True,
    ),
    "deep": replace(TINY, build=replace(DECODER, layers=4).build, objective=CrossEntropy().build()),
    "experts": replace(TINY, build=EXPERTS.build, objective=CrossEntropy().build(), compute="bf16", documents=True),
    "all experts": replace(
        TINY, build=replace(EXPERTS, moe=MoEConfig(experts=4, top_k=4)).build, objective=CrossEntropy().build()
    ),
    "experts in a loop": replace(TINY, build=replace(EXPERTS, ffn_dim=28).build, objective=CrossEntropy().build()),
    "bf16 state": replace(TINY, build=DECODER.build, objective=CrossEntropy().build(), compute="bf16", state="bf16"),
}


@dataclass(frozen=True)
class Setup:
    """What is run: the transforms, and the pipeline where there is one."""

    transforms: tuple[Any, ...] = (FullyShard(),)
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
    "recompute": ("dp2", "decoder", Setup((FullyShard(), Recompute()))),
    "bf16 state": ("dp2", "bf16 state", SHARDED),
    "tp2": ("tp2", "decoder", Setup((TensorParallel(),))),
    "tp2 tied, whole sequences": (
        "tp2",
        "tied decoder",
        Setup((TensorParallel(sequence_parallel=False), Recompute(policy="full"))),
    ),
    "dp2tp2": ("dp2tp2", "decoder", Setup((TensorParallel(), FullyShard(), Recompute()))),
    "cp2 all-gather": ("cp2", "decoder", Setup((ContextParallel(kind="all_gather"), FullyShard()))),
    "cp2 ring": ("dp2cp2", "decoder", Setup((ContextParallel(kind="ring"), FullyShard(), Recompute()))),
    "cp2 ulysses": ("cp2", "decoder", Setup((ContextParallel(kind="ulysses"), FullyShard()))),
    "tp2cp2": ("cp2tp2", "decoder", Setup((TensorParallel(), ContextParallel(kind="ring"), FullyShard()))),
    "pp2": ("pp2", "decoder", piped(OneForwardOneBackward())),
    "pp2dp2 tied": ("pp2dp2", "tied decoder", piped(GPipe(), FullyShard())),
    "pp2 zero bubble": ("pp2", "deep", piped(ZeroBubbleV())),
    "pp2 interleaved": ("pp2", "deep", piped(Interleaved())),
    "dp2tp2 mtp": ("dp2tp2", "mtp", Setup((TensorParallel(), FullyShard()))),
    "pp2 mtp": ("pp2", "mtp", piped(OneForwardOneBackward())),
    "pp2tp2": ("pp2tp2", "deep", piped(OneForwardOneBackward(), TensorParallel())),
    "ep2 in replicas": ("hsdp2x2ep2", "experts", Setup((ExpertParallel(overlap=False), FullyShard(), Recompute()))),
    "ep2 etp2": ("dp2tp2ep2etp2", "experts in a loop", Setup((ExpertParallel(), TensorParallel(), FullyShard()))),
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
        clip_grad_norm(model, result.norm, 1.0)
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


SLOW_CASES: dict[str, tuple[str, str, Setup]] = {
    "ep2": ("dp2ep2", "experts", Setup((ExpertParallel(), FullyShard()))),
    "tp2 with experts": ("tp2", "experts in a loop", Setup((TensorParallel(), FullyShard()))),
    "ep2 of 4": ("dp4ep2", "experts", Setup((ExpertParallel(dispatcher="all_gather"), FullyShard()))),
    "ep4 in nodes": ("dp4ep4", "all experts", Setup((ExpertParallel(dispatcher="hierarchical", ranks_per_node=2), FullyShard()))),
}


FAST_CASES = ("1", "tp2cp2", "pp2")
"""An axis of each kind; the others take minutes together."""


@pytest.mark.parametrize("case", [case if case in FAST_CASES else pytest.param(case, marks=pytest.mark.slow) for case in CASES])
def test_bytes_are_those_of_a_real_run(world: World, case: str) -> None:
    exact(world, *CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES)
def test_bytes_are_those_of_further_real_runs(world: World, case: str) -> None:
    exact(world, *SLOW_CASES[case])


def exact(world: World, layout: str, model: str, setup: Setup) -> None:
    at, micro_batches = Layout.parse(layout), 4 if setup.pipeline else 1
    workload = replace(MODELS[model], micro_batches=micro_batches)
    found = world.run(_real, at.world, workload, layout, setup.transforms, setup.pipeline, micro_batches)
    # Ranks that hold other numbers than the last: of other stages, and of shards that are not all alike.
    ranks = {0, at.world - 1} if setup.pipeline or at.ep > 1 or layout == "dp3" else {at.world - 1}
    for estimate in dry_runs(workload, Plan.of(setup.transforms, at, setup.pipeline), sorted(ranks)):
        real = found[estimate.rank]
        assert {key: getattr(estimate, key) for key in real} == real


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "setup", "micro_batches"),
    [
        ("hsdp2x2", SHARDED, 2),
        ("hsdp2x2", SHARDED, 5),
        ("hsdp2x2", Setup((FullyShard(reduce="each"),)), 3),
        ("pp2dp2", piped(GPipe(), FullyShard()), 7),
    ],
)
def test_later_micro_batches_are_counted_without_being_run(world: World, layout: str, setup: Setup, micro_batches: int) -> None:
    workload = replace(MODELS["decoder"], micro_batches=micro_batches)
    measured = world.run(_real, 4, workload, layout, setup.transforms, setup.pipeline, micro_batches)[1]
    estimate = dry_run(workload, Plan.of(setup.transforms, Layout.parse(layout), setup.pipeline), 1)
    assert {key: getattr(estimate, key) for key in measured} == measured


def test_chances_are_those_of_all_choices() -> None:
    for experts, count, top_k in ((8, 2, 2), (8, 4, 3), (6, 3, 1), (5, 5, 2), (6, 1, 6)):
        choices = list(combinations(range(experts), top_k))
        share = sum(min(choice) < count for choice in choices) / len(choices)
        assert expert_probability(experts, count, top_k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(("kind", "node"), [("all_to_all", None), ("hierarchical", 4)])
def test_tokens_travel_once_to_each_rank_and_node(kind: Any, node: int | None) -> None:
    """Forward and backward, a row and its sum each, in bf16; with the weights, in fp32, travel the numbers of the experts."""
    moe = MoEConfig(experts=16, top_k=4, first_dense=1, ffn_dim=8)
    workload = replace(MODELS["experts"], build=replace(DECODER, moe=moe).build, rows=4, length=32)
    flows = {
        flow.axis: flow
        for flow in dry_run(
            workload, Plan.of([ExpertParallel(dispatcher=kind, ranks_per_node=node), FullyShard()], Layout.parse("dp8ep8"))
        ).flows
    }
    tokens, told, counts = 4 * 32, 2 * 4 * 4, 2 * 8
    row = 4 * 2 * 16 + 2 * told
    near, far = expert_probability(16, 2, 4), expert_probability(16, 8, 4)
    if node is None:
        rows = round(tokens * near)
        assert flows["ep"].payload == 8 * (rows * row + counts)
        assert flows["ep"].wire == 7 * (rows * row + counts)
        return
    arrived = 2 * round(tokens * far)
    assert flows["ep.across"].wire == arrived // 2 * row + counts
    assert flows["ep.inside"].wire == 3 * (round(arrived * near / far) * row + counts)


def test_padding_is_counted_and_is_above_the_bound() -> None:
    """Over 3 ranks a dimension of 8 is three times 3, one of 5 three times 2, and one of 37 three times 13."""
    rows = {VOCAB: 39, DIM: 9, 5: 6, 3 * DIM: 24}
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in Tiny().named_parameters()}
    padded = {name: rows[shape[0]] * prod(shape[1:]) for name, shape in shapes.items()}
    units = [sum(size for name, size in padded.items() if name.startswith(f"blocks.{layer}.")) for layer in range(LAYERS)]
    rest = padded["embed.weight"] + padded["head.weight"]
    estimate = dry_run(TINY, Plan.of([FullyShard()], Layout.parse("dp3")))
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
    estimates = [dry_run(TINY, Plan.of([FullyShard()], Layout.parse("dp3")), rank) for rank in range(3)]
    assert sum(estimate.elements for estimate in estimates) == whole
    assert len({estimate.elements for estimate in estimates}) > 1
    assert [estimate.at["dp_shard"] for estimate in estimates] == [0, 1, 2]


# Memory within a step: exact for the operators that this machine runs.


@pytest.mark.parametrize("transforms", [[], [Recompute(policy="full")], [Recompute()]], ids=["all", "full", "some"])
def test_activations_are_those_that_a_real_forward_keeps(transforms: list[Any]) -> None:
    workload = replace(MODELS["decoder"], compute="fp32")
    model = realize(Blueprint.of(workload.build), Plan.of(transforms, Layout()), Topology.of(Layout(), CPU), 0)
    step, batch = Step(model, workload.objective), workload.batch()
    _, held = held_after(lambda: step._forward(batch))
    estimate = dry_run(workload, Plan.of(transforms, Layout()))
    kept = 2 * 16 * 16 * 4 + VOCAB * 16 * 4  # the loss head's gradients for its input and its weight
    scalars = 64
    assert estimate.head == pytest.approx(kept, abs=scalars)
    assert estimate.activations == pytest.approx(held - kept, abs=scalars)


def _kept(workload: Workload, layout: str, transforms: Any) -> int:
    """Bytes that the second forward of a rank keeps."""
    at = Layout.parse(layout)
    plan, topology = Plan.of(transforms, at), Topology.of(at, CPU)
    model = realize(Blueprint.of(workload.build), plan, topology, 0, workload.compute, workload.state)
    step, batch = Step(model, workload.objective), workload.batch()
    step([batch])
    return held_after(lambda: step._forward(batch))[1]


KEEPING: dict[str, tuple[str, list[Any]]] = {
    "tp2": ("tp2", [TensorParallel()]),
    "tp2 some": ("tp2", [TensorParallel(), Recompute()]),
    "tp2 full": ("tp2", [TensorParallel(), Recompute(policy="full")]),
    "tp2 whole sequences, some": ("tp2", [TensorParallel(sequence_parallel=False), Recompute()]),
    "dp2": ("dp2", [FullyShard()]),
    "dp2 some": ("dp2", [FullyShard(), Recompute()]),
    "dp2tp2 some": ("dp2tp2", [TensorParallel(), FullyShard(), Recompute()]),
    "float8": ("1", [Float8()]),
    "float8 some": ("1", [Float8(), Recompute()]),
    "float8 rows": ("1", [Float8(recipe="rowwise"), Recompute()]),
    "float8 tp2": ("tp2", [Float8(), TensorParallel()]),
}


@pytest.mark.parametrize("case", fast("tp2 some", "dp2 some", "float8 some", of=KEEPING))
def test_activations_of_a_rank_are_those_that_its_forward_keeps(world: World, case: str) -> None:
    """What ranks exchange counts once: an operator that waits for a collective returns the tensor that it waited for."""
    layout, transforms = KEEPING[case]
    wide = replace(DECODER, dim=64, ffn_dim=64).build  # float8 needs parts of 16 numbers at least
    workload = replace(MODELS["decoder"], compute="fp32")
    workload = replace(workload, build=wide, compute="bf16", state="bf16") if "float8" in case else workload
    ranks = Layout.parse(layout).world
    real = world.run(_kept, ranks, workload, layout, transforms)[-1]
    estimate = dry_run(workload, Plan.of(transforms, Layout.parse(layout)), ranks - 1)
    assert estimate.activations + estimate.head == real


@pytest.mark.parametrize("transforms", [[], [Recompute(policy="full")]], ids=["all", "recompute"])
def test_the_peak_is_that_of_the_allocator(transforms: list[Any]) -> None:
    """Torch's profiler sees every call of the allocator, so also what kernels take for themselves."""
    shape = DecoderConfig(dim=64, layers=3, heads=4, ffn_dim=160, vocab_size=512, max_length=64)
    workload = Workload(shape.build, CrossEntropy().build(), AdamWConfig().build, rows=4, length=64, compute="fp32")
    model = realize(Blueprint.of(workload.build), Plan.of(transforms, Layout()), Topology.of(Layout(), CPU), 0)
    optimizer, step, batch = workload.optimizer(model), Step(model, workload.objective), workload.batch()
    with profile(profile_memory=True) as profiled:
        result = step([batch])
        clip_grad_norm(model, result.norm, 1.0)
        optimizer.step(result.skip)
    assert profiled.kineto_results is not None
    calls = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    peak = max(accumulate(event.nbytes() for event in sorted(calls, key=lambda event: event.start_ns())))
    estimate = dry_run(workload, Plan.of(transforms, Layout()))
    standing = estimate.parameters + estimate.optimizer
    assert sum(estimate.peak.values()) - standing == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("compute", fast("bf16", of=["fp32", "bf16"]))
@pytest.mark.parametrize("layout", fast("dp2tp2", of=["1", "dp2", "tp2", "dp2tp2"]))
@pytest.mark.parametrize("smoothing", fast(0.1, of=[0.0, 0.1]))
def test_blocks_of_the_loss_head_that_repeat_are_skipped(
    monkeypatch: pytest.MonkeyPatch, compute: str, layout: str, smoothing: float
) -> None:
    """Chunks of 15 rows in blocks of 2, the last one shorter. All numbers are those of a dry run that skips nothing."""
    blocks = 0
    losses = head._losses

    def counted(*arguments: Any) -> Any:
        nonlocal blocks
        blocks += 1
        return losses(*arguments)

    monkeypatch.setattr(head, "_losses", counted)
    monkeypatch.setattr(head, "chunk_rows", lambda *_: 15)
    monkeypatch.setattr(head, "CPU_BLOCK", 2 * VOCAB)
    objective = CrossEntropy(label_smoothing=smoothing).build()
    workload = replace(MODELS["decoder"], objective=objective, compute=compute, micro_batches=2)
    strategies = [FullyShard()] * ("dp" in layout) + [TensorParallel()] * ("tp" in layout)
    plan = Plan.of(strategies, Layout.parse(layout))
    fast, ran = dry_run(workload, plan), blocks
    monkeypatch.setattr(head.ChunkedCrossEntropy, "for_dry_run", lambda self: self)
    assert dry_run(workload, plan) == fast
    if "tp" not in layout:  # where ranks share the vocabulary, they exchange whole chunks, and a chunk is one call
        assert blocks - ran > ran * 3 / 2


def test_the_peak_names_what_it_is_made_of() -> None:
    workload = replace(MODELS["decoder"], micro_batches=3)
    one = dry_run(replace(workload, micro_batches=1), Plan.of([FullyShard()], Layout.parse("dp2"))).peak
    many = dry_run(workload, Plan.of([FullyShard()], Layout.parse("dp2")))
    each = dry_run(workload, Plan.of([FullyShard(reduce="each")], Layout.parse("dp2"))).peak
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
    assert ledger.record().at(place) == {"mine": 400}
    assert ledger.record().peak() == {"mine": 400, "communication": 400}
    assert ledger.record().at(ledger.here()) == {}


def test_a_ledger_skips_the_tensors_by_which_dtensor_finds_shapes() -> None:
    """DTensor runs an operator on tensors of whole shapes, which no rank allocates. torch 2.11 does for every fused update."""
    with fake_world(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        with FakeTensorMode():
            weights = [DTensor.from_local(torch.ones(8, 4), mesh, [Shard(0)], run_check=False) for _ in range(6)]
            step = [torch.zeros(())]
            forget_meshes()  # nothing is known about the update
            ledger = Ledger()
            with ledger.open():
                rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
                one, other, *states = ([weight] for weight in weights)
                torch._fused_adamw_(one, other, *states[:2], [], step, amsgrad=False, maximize=False, **rates)
                doubled = one[0] + one[0]
            assert doubled.shape == (16, 4)
            assert ledger.record().peak() == {"activations and work": 8 * 4 * 4}
    forget_meshes()


class _Odd:
    """The schedule 1f1b, which refuses an even number of micro-batches. So no number is supported together with its double."""

    def __init__(self) -> None:
        self._schedule = OneForwardOneBackward().build()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def __call__(self, *arguments: Any) -> Any:
        return self._schedule(*arguments)

    def refusal(self, ranks: int, micro_batches: int) -> str | None:
        return (
            f"{micro_batches} micro-batches are even" if micro_batches % 2 == 0 else self._schedule.refusal(ranks, micro_batches)
        )


def test_a_schedule_that_supports_few_numbers_runs_all_of_its_micro_batches() -> None:
    plan, plain = (Plan.of([], Layout.parse("pp2"), Pipeline(given)) for given in (_Odd(), OneForwardOneBackward().build()))
    assert dry_runs(replace(MODELS["decoder"], micro_batches=3), plan, (0, 1)) == dry_runs(
        replace(MODELS["decoder"], micro_batches=3), plain, (0, 1)
    )
    with pytest.raises(PlanError, match="6 micro-batches are even"):
        dry_runs(replace(MODELS["decoder"], micro_batches=6), plan, (0,))


@pytest.mark.parametrize("micro_batches", [4, 64])
def test_a_schedule_that_torch_is_too_old_for_is_refused_in_a_dry_run(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    monkeypatch.setattr(schedules, "_torch_release", lambda: (2, 11))
    plan = Plan.of([], Layout.parse("pp2"), Pipeline(ZeroBubbleV().build()))
    with pytest.raises(PlanError, match=r"zbv splits the backward, which is proven from torch 2\.13 on"):
        dry_run(replace(MODELS["decoder"], micro_batches=micro_batches), plan)


def test_compilation_is_left_out() -> None:
    plain, compiled = (dry_run(TINY, Plan.of([FullyShard(), *extra], Layout.parse("dp2"))) for extra in ([], [Compile()]))
    assert plain == compiled


# The fake world, and counting.


def test_a_dry_run_leaves_nothing_behind_and_needs_a_process_of_its_own(world: World) -> None:
    assert dry_run(TINY, Plan.of([FullyShard()], Layout.parse("dp2"))) == dry_run(
        TINY, Plan.of([FullyShard()], Layout.parse("dp2"))
    )
    assert not dist.is_initialized()
    with pytest.raises(ForgeError, match="at least one micro-batch"):
        dry_run(replace(TINY, micro_batches=0), Plan.of([], Layout()))
    assert world.run(_inside, 2) == ["alone", "alone"]


def _inside() -> str:
    try:
        dry_run(TINY, Plan.of([FullyShard()], Layout.parse("dp2")))
    except LayoutError as refusal:
        return "alone" if "start the dry run in a process of its own" in str(refusal) else str(refusal)
    return "not refused"


@pytest.mark.slow
def test_no_memory_is_taken_for_the_model() -> None:
    """This model has 192 GiB; the process would not survive it."""
    huge = DecoderConfig(dim=32768, layers=2, heads=64, ffn_dim=131072, vocab_size=262144, max_length=16)
    workload = replace(MODELS["decoder"], build=huge.build, rows=1, documents=False)
    estimate = dry_run(workload, Plan.of([FullyShard()], Layout.parse("dp4")))
    assert estimate.parameters > 40 * 2**30


def test_a_fake_world_ends_when_its_body_fails() -> None:
    with pytest.raises(ZeroDivisionError), fake_world(4, 3):
        assert dist.get_rank() == 3
        raise ZeroDivisionError
    assert not dist.is_initialized()
