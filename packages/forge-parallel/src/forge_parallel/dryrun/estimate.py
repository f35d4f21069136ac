"""Runs one rank's step in a fake world: the real model, transforms, step and optimizer, on fake tensors.

So bytes of parameters, gradients, optimizer state and collectives are exactly those of a real run. Memory of activations and
temporaries is read from the same step: exact for tensors that CPU operators allocate, hence an estimate for other devices, whose
kernels may save more or less; for GPUs, attention is replaced (`dryrun.fake_world`). Blocks are not compiled, since a compiler
saves at most as much. Experts have equal loads.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from forge_core.batch import Batch
from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import Context, ExpertDispatcher, LossTerms, Objective, Optimizer, Transform
from forge_parallel.dryrun.fake_world import Accelerator, FusedAttention, Weightless, evenly, fake_world
from forge_parallel.dryrun.lower_bounds import Bound, bounds
from forge_parallel.dryrun.memory import GRADIENTS, Ledger, held
from forge_parallel.dryrun.traffic import Flow, Traffic
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Order, Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.groups import NO_SETTINGS, Settings
from forge_parallel.optim.stages import apply
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.shares import FLOAT8_MULTIPLE, stacks
from forge_parallel.placement.topology import Topology
from forge_parallel.step.reduce import clip_grad_norm
from forge_parallel.step.step import Step
from forge_parallel.torch_private import detect_fake_mode

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    """The work of every rank in a step.

    Attributes:
        build: builds the model, see `Blueprint.of`.
        objective: the loss to minimize.
        optimizer: builds the optimizer of a model.
        rows: sequences per micro-batch.
        length: tokens per sequence.
        micro_batches: per step and rank.
        compute: dtype of forward and backward: `bf16`, `fp32` or `fp64`.
        state: dtype of parameters, gradients and optimizer state.
        documents: whether rows contain several documents. On a CPU, attention then saves a mask of length x length.
        settings: settings of parameters, frozen ones included.
    """

    build: Callable[[], nn.Module]
    objective: Objective
    optimizer: Callable[[ParallelModel], Optimizer]
    rows: int
    length: int
    micro_batches: int = 1
    compute: str = "bf16"
    state: str = "fp32"
    documents: bool = False
    settings: Settings = NO_SETTINGS

    def shortened(self, layout: Layout) -> "Workload":
        """Returns the workload with the shortest rows that ranks can split; float8 products need multiples of 16 tokens."""
        least = FLOAT8_MULTIPLE * layout.cp * layout.tp
        return replace(self, length=least) if self.length % least == 0 else self

    def batch(self, device: torch.device = CPU) -> Batch:
        """Returns a micro-batch of zeros; token values do not change any size."""
        shape = (self.rows, self.length)
        words = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2)]
        places = [torch.zeros(shape, dtype=torch.int32, device=device) if self.documents else None for _ in range(2)]
        return Batch(words[0], words[1], places[0], places[1])


@dataclass(frozen=True)
class Estimate:
    """Memory and traffic of one rank, in bytes.

    Attributes:
        rank: the rank.
        at: its coordinate on every axis.
        elements: number of parameter elements that it holds.
        parameters, gradients, optimizer, buffers: memory between steps, including the padding of uneven shards.
        activations: saved by the forward of one micro-batch for its backward, without the loss head.
        head: saved by the loss head for its backward.
        head_work: maximum memory of the loss head while it runs.
        gathered: the largest all-gather, of a sharded unit that is temporarily whole.
        reduced: the largest reduce-scatter.
        peak: memory by class at the moment of a step when the total is largest.
        flows: traffic of a step.
        bounds: lower bounds of the traffic, for axes with a known closed form.
    """

    rank: int
    at: Mapping[str, int]
    elements: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    head: int
    head_work: int
    gathered: int
    reduced: int
    peak: Mapping[str, int]
    flows: tuple[Flow, ...]
    bounds: tuple[Bound, ...]


def dry_run(
    workload: Workload, plan: Plan, rank: int = 0, *, accelerator: Accelerator | None = None, device: torch.device = CPU
) -> Estimate:
    """Returns what `rank` holds and exchanges in a step, without other ranks and without memory for tensors.

    Runs a step of at most two micro-batches (in a pipeline two steps, with the fewest micro-batches that the schedule supports
    and with twice as many); each further micro-batch adds the traffic of one of these.

    Args:
        workload: the work of every rank.
        plan: the parallel plan.
        rank: the rank to estimate.
        accelerator: whose attention kernels to assume; None: those of `device`.
        device: device of the fake tensors. "cuda" needs a torch with such devices; `accelerator` does not.

    Raises:
        ForgeError: an error of a real run; or this process belongs to a process group.
    """
    return dry_runs(workload, plan, (rank,), accelerator=accelerator, device=device)[0]


def dry_runs(
    workload: Workload,
    plan: Plan,
    ranks: Sequence[int],
    *,
    accelerator: Accelerator | None = None,
    device: torch.device = CPU,
) -> list[Estimate]:
    """Runs `dry_run` for several ranks, one after the other."""
    if workload.micro_batches < 1:
        raise PlanError(f"a step needs at least one micro-batch, got {workload.micro_batches}")
    run = partial(_run, accelerator=accelerator, device=device)
    done: dict[int, Estimate] = {}
    metrics: tuple[str, ...] = ()
    if plan.pipeline is not None:
        # Ranks of other stages need the names of the objective's metrics from the last stage, so that stage runs first.
        layout = plan.layout
        last, stride = plan.pipeline.placement(layout.pp)[-1], layout.world // layout.pp
        scoring = next((rank for rank in ranks if rank // stride == last), last * stride)
        once = workload if scoring in ranks else replace(workload, micro_batches=_fewest(plan))
        done[scoring], metrics = run(once, plan, scoring, ())
    for rank in ranks:
        if rank not in done:
            done[rank] = run(workload, plan, rank, metrics)[0]
    return [done[rank] for rank in ranks]


def _fewest(plan: Plan) -> int:
    """Returns the smallest number of micro-batches that a step supports, if it also supports twice as many."""
    if plan.pipeline is None:
        return 1
    schedule, stages = plan.pipeline.schedule, plan.layout.pp
    legal = (n for n in count(1) if not any(schedule.refusal(stages, size) for size in (n, 2 * n)))
    return next(legal)


def _run(
    workload: Workload, plan: Plan, rank: int, metrics: Sequence[str], *, accelerator: Accelerator | None, device: torch.device
) -> tuple[Estimate, tuple[str, ...]]:
    """Returns the estimate of one rank and the names of the metrics that it computed."""
    kept = [transform for transform in plan.transforms if transform.order != Order.COMPILE]
    told = [] if accelerator is None else [FusedAttention()]
    with fake_world(plan.layout.world, rank), ExitStack() as stack:
        topology = Topology.of(plan.layout, device)
        watch = _Watch(stack, separate=plan.layout.pp == 1, metrics=list(metrics))
        watched = Plan.of([*told, *kept, watch], plan.layout, plan.pipeline)
        model = realize(
            apply(Blueprint.of(workload.build), workload.settings), watched, topology, _nothing, workload.compute, workload.state
        )
        return _estimate(workload, model, watch), tuple(watch.metrics)


def _experts(stacked: nn.Module) -> int:
    """Returns the number of experts over all ranks."""
    return next(len(parameter) for parameter in stacked.parameters())


def _nothing(_: ParallelModel) -> None:
    """Replaces the initialization of weights; does nothing."""


@dataclass
class _Notes:
    """Records of one step: its traffic, also before each micro-batch, its ledger, and the spans of the ledger in which forwards
    of a part and loss heads ran."""

    traffic: Traffic
    ledger: Ledger = field(default_factory=Ledger)
    starts: list[list[Flow]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    forwards: list[tuple[int, int]] = field(default_factory=list)
    heads: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Watch(Transform):
    """The last transform of the plan, after which tensors are fake. Marks in the ledger where forwards and heads begin and end.

    `separate` says that micro-batches run one after the other, so memory that lives between two of them belongs to the step.
    """

    stack: ExitStack
    separate: bool
    metrics: list[str]
    steps: list[_Notes] = field(default_factory=list)
    name: str = "watch"
    order: int = max(Order) + 1
    axes: frozenset[str] = frozenset()

    def apply(self, part: nn.Module, context: Context) -> nn.Module:
        if detect_fake_mode() is None:  # otherwise another part of the pipeline has entered it
            # Transforms that build meshes have run: meshes need real integers.
            self.stack.enter_context(Weightless())
        for path in stacks(context.specs):
            layer: Any = part.get_submodule(path.rpartition(".")[0])
            if isinstance(getattr(layer, "dispatch", None), ExpertDispatcher):
                layer.dispatch = evenly(layer.dispatch, _experts(part.get_submodule(path)))
        for module in part.modules():
            core: Any = getattr(module, "core", None)
            if hasattr(core, "for_dry_run"):
                module.core = core.for_dry_run()  # type: ignore[assignment]
        cast = "communication" if isinstance(part, FSDPModule) else "parameters in compute precision"
        part.register_forward_pre_hook(lambda *_: self._begins(cast))
        part.register_forward_hook(lambda *_: self._ends())
        return part

    def before_micro_batch(self, part: nn.Module, last: bool) -> None:
        notes = self.steps[-1]
        notes.starts.append(notes.traffic.flows())
        if self.separate and notes.forwards:
            notes.ledger.name_rest("gradients being accumulated")

    def _begins(self, cast: str) -> None:
        notes = self.steps[-1]
        if self.separate:  # memory that lives when a forward begins was derived from parameters
            notes.ledger.name_rest(cast)
        notes.begun.append(notes.ledger.here())

    def _ends(self) -> None:
        notes = self.steps[-1]
        notes.forwards.append((notes.begun.pop(), notes.ledger.here()))

    def agreed(self, names: list[str]) -> list[str]:
        """Returns the names of a step's metrics as the last stage would send them; `names` are this rank's own."""
        if names:
            self.metrics[:] = names
        return self.metrics

    def listening(self, objective: Objective) -> Objective:
        """Returns the objective, with records of where it begins and ends."""

        def noted(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> LossTerms:
            notes = self.steps[-1]
            first = notes.ledger.here()
            terms = objective(head, hidden, labels)
            notes.heads.append((first, notes.ledger.here()))
            return terms

        return noted


@dataclass(frozen=True)
class _Counted:
    """One step with some micro-batches: bytes of its gradients, its flows, its largest calls, and its records."""

    micro_batches: int
    gradients: int
    flows: tuple[Flow, ...]
    gathered: int
    reduced: int
    notes: _Notes


def _estimate(workload: Workload, model: ParallelModel, watch: _Watch) -> Estimate:
    stages, wanted = model.topology.layout.pp, workload.micro_batches
    fewest = _fewest(model.plan)
    optimizer = workload.optimizer(model)
    getattr(optimizer, "shorten", lambda: None)()
    step = Step(model, watch.listening(workload.objective), watch.agreed)
    sizes = (wanted,) if wanted <= 2 * fewest else (fewest, 2 * fewest) if stages > 1 else (2,)
    # The first step of a run does more than others: stages connect, and operators' layouts are computed.
    first = workload if stages > 1 else workload.shortened(model.topology.layout)
    for size in sizes if stages > 1 else (1,):
        _step(first, step, optimizer, watch, size)
    counted = [_counted(workload, step, optimizer, watch, size) for size in sizes]
    last, ledger = counted[-1], counted[-1].notes.ledger
    peak, flows = ledger.peak(), last.flows
    if wanted > sizes[-1] and stages == 1:
        flows = _continued(flows, *last.notes.starts, added=1, further=wanted - 2)
    elif wanted > sizes[-1]:
        flows = _continued(flows, counted[0].flows, flows, added=fewest, further=wanted - 2 * fewest)
        peak = _linear(counted[0].notes.ledger.peak(), peak, sizes, wanted)
    # A forward of the last part computes the loss once for the next token, and once for each MTP module.
    scored = last.notes.heads[: 1 + model.specs.mtp_depth]
    heads = [ledger.growth(*span) for span in scored]
    work = [ledger.rise(*span) for span in scored]
    parts, state = model.parts, optimizer.state()
    return Estimate(
        rank=model.topology.rank,
        at=model.topology.coordinates,
        elements=sum(local_box(tensor).local.numel() for _, tensor in model.parameters_held()),
        parameters=held(parameter for part in parts for parameter in part.parameters()),
        gradients=last.gradients,
        optimizer=held(tensor for tensors in state.values() for tensor in tensors.values()),
        buffers=held(buffer for part in parts for buffer in part.buffers()),
        activations=sum(ledger.growth(*span) for span in last.notes.forwards[: len(parts)]) - sum(heads),
        head=sum(heads),
        head_work=max(work, default=0),
        gathered=last.gathered,
        reduced=last.reduced,
        peak=peak,
        flows=flows,
        bounds=tuple(bounds(model, wanted, workload.rows * workload.length, workload.documents)),
    )


def _step(workload: Workload, step: Step, optimizer: Optimizer, watch: _Watch, micro_batches: int) -> None:
    watch.steps.append(_Notes(Traffic(step.model.topology.layout)))
    result = step([workload.batch(step.model.topology.device) for _ in range(micro_batches)])
    clip_grad_norm(step.model, result.norm, 1.0)
    optimizer.step(result.skip)
    optimizer.zero_grad()


def _counted(workload: Workload, step: Step, optimizer: Optimizer, watch: _Watch, micro_batches: int) -> _Counted:
    model = step.model
    batches = [workload.batch(model.topology.device) for _ in range(micro_batches)]
    notes = _Notes(Traffic(model.topology.layout))
    watch.steps.append(notes)
    ledger, traffic = notes.ledger, notes.traffic
    ledger.name("parameters", (parameter for part in model.parts for parameter in part.parameters()))
    ledger.name("buffers", (buffer for part in model.parts for buffer in part.buffers()))
    ledger.name("optimizer state", (tensor for tensors in optimizer.state().values() for tensor in tensors.values()))
    with ledger.open(), traffic:
        result = step(batches)
        gradients = [tensor.grad for _, tensor, _ in model.trainable() if tensor.grad is not None]
        ledger.name(GRADIENTS, gradients, anew=True)
        clip_grad_norm(model, result.norm, 1.0)
        optimizer.step(result.skip)
    size = held(gradients)
    optimizer.zero_grad()
    return _Counted(
        micro_batches, size, tuple(traffic.flows()), traffic.largest("all_gather"), traffic.largest("reduce_scatter"), notes
    )


def _continued(
    flows: Sequence[Flow], before: Sequence[Flow], after: Sequence[Flow], *, added: int, further: int
) -> tuple[Flow, ...]:
    """Adds `further` micro-batches to `flows`, given that `added` micro-batches changed the flows from `before` to `after`."""
    fewer, more = ({(flow.axis, flow.kind): flow for flow in counted} for counted in (before, after))
    continued = []
    for flow in flows:
        key = flow.axis, flow.kind
        growth = (more[key] if key in more else flow * 0) + (fewer[key] * -1 if key in fewer else flow * 0)
        numbers = (growth.count, growth.payload, growth.wire)
        if any(number * further % added for number in numbers):
            raise PlanError(
                f"{flow.kind} over {flow.axis} does not grow by whole calls per micro-batch, so it cannot be estimated"
            )
        count, payload, wire = (number * further // added for number in numbers)
        continued.append(flow + Flow(flow.axis, flow.kind, count, payload, wire))
    return tuple(continued)


def _linear(fewer: Mapping[str, int], more: Mapping[str, int], sizes: Sequence[int], wanted: int) -> dict[str, int]:
    """Extrapolates the peak: a pipeline that saves every micro-batch grows by equal bytes with each, others do not grow."""
    further = (wanted - sizes[1]) / (sizes[1] - sizes[0])
    return {kind: size + int(further * (size - fewer.get(kind, 0))) for kind, size in more.items()}
