"""Runs one rank's step in a fake world: the real model, transforms, step and optimizer, on fake tensors.

So bytes of parameters, gradients, optimizer state and collectives are exactly those of a real run. Memory of activations and
temporaries is read from the same step: exact for tensors that CPU operators allocate, hence an estimate for other devices, whose
kernels may save more or less; for GPUs, attention is replaced (`dryrun.fake_world`). Blocks are not compiled, since a compiler
saves at most as much. Experts have equal loads.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from forge_core.batch import Batch
from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import BatchObjective, Context, ExpertDispatcher, LossTerms, Objective, Optimizer, Transform
from forge_parallel.dryrun.attribution import Attribution, follow
from forge_parallel.dryrun.blocks import KEPT, NO_REPEATS, Repeats, by_parameter, shorten
from forge_parallel.dryrun.fake_world import Accelerator, FusedAttention, Weightless, evenly, fake_world
from forge_parallel.dryrun.lower_bounds import Bound, bounds
from forge_parallel.dryrun.memory import Ledger, held_by
from forge_parallel.dryrun.record import GRADIENTS, Irregular, StepRecord, Unit
from forge_parallel.dryrun.traffic import Flow, Traffic
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Order, Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.groups import NO_SETTINGS, Settings
from forge_parallel.optim.stages import apply
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.shares import FLOAT8_MULTIPLE, stacks
from forge_parallel.placement.topology import Topology
from forge_parallel.step.reduce import bound, clip_grad_norm, summands
from forge_parallel.step.step import Step
from forge_parallel.torch_private import detect_fake_mode

CPU = torch.device("cpu")
_log = logging.getLogger(__name__)


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
        batch = Batch(words[0], words[1], places[0], places[1])
        return getattr(self.objective, "with_targets", lambda batch: batch)(batch)


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
    workload: Workload,
    plan: Plan,
    rank: int = 0,
    *,
    accelerator: Accelerator | None = None,
    device: torch.device = CPU,
    every_block: bool = False,
) -> Estimate:
    """Returns what `rank` holds and exchanges in a step, without other ranks and without memory for tensors.

    Runs a step of at most two micro-batches (in a pipeline two steps, with the fewest micro-batches that the schedule supports
    and with twice as many); each further micro-batch adds the traffic of one of these. Of equal blocks only a few run, if model,
    transforms and optimizer declare that they treat equal blocks alike, and if the step shows it; see `dryrun.blocks`.

    Args:
        workload: the work of every rank.
        plan: the parallel plan.
        rank: the rank to estimate.
        accelerator: whose attention kernels to assume; None: those of `device`.
        device: device of the fake tensors. "cuda" needs a torch with such devices; `accelerator` does not.
        every_block: whether every block runs. The estimate is the same, and takes longer.

    Raises:
        ForgeError: an error of a real run; or this process belongs to a process group.
    """
    return dry_runs(workload, plan, (rank,), accelerator=accelerator, device=device, every_block=every_block)[0]


def dry_runs(
    workload: Workload,
    plan: Plan,
    ranks: Sequence[int],
    *,
    accelerator: Accelerator | None = None,
    device: torch.device = CPU,
    every_block: bool = False,
) -> list[Estimate]:
    """Runs `dry_run` for several ranks, one after the other."""
    if workload.micro_batches < 1:
        raise PlanError(f"a step needs at least one micro-batch, got {workload.micro_batches}")
    run = partial(_run, accelerator=accelerator, device=device, every_block=every_block)
    done: dict[int, Estimate] = {}
    metrics: tuple[str, ...] = ()
    if plan.pipeline is not None:
        # Ranks of other stages need the names of the objective's metrics from the last stage, so that stage runs first.
        layout = plan.layout
        if why := plan.pipeline.schedule.refusal(layout.pp, workload.micro_batches):
            raise PlanError(why)
        last, stride = plan.pipeline.placement(layout.pp)[-1], layout.world // layout.pp
        scoring = next((rank for rank in ranks if rank // stride == last), last * stride)
        once = workload if scoring in ranks else replace(workload, micro_batches=_fewest(plan, workload.micro_batches))
        done[scoring], metrics = run(once, plan, scoring, ())
    for rank in ranks:
        if rank not in done:
            done[rank] = run(workload, plan, rank, metrics)[0]
    return [done[rank] for rank in ranks]


def _fewest(plan: Plan, wanted: int) -> int:
    """Returns the smallest number of micro-batches that a step supports, if it also supports twice as many; at most `wanted`."""
    if plan.pipeline is None:
        return 1
    schedule, stages = plan.pipeline.schedule, plan.layout.pp
    legal = (n for n in range(1, wanted) if not any(schedule.refusal(stages, size) for size in (n, 2 * n)))
    return next(legal, wanted)


def _run(
    workload: Workload,
    plan: Plan,
    rank: int,
    metrics: Sequence[str],
    *,
    accelerator: Accelerator | None,
    device: torch.device,
    every_block: bool,
) -> tuple[Estimate, tuple[str, ...]]:
    """Returns the estimate of one rank and the names of the metrics that it computed."""
    told = [] if accelerator is None else [FusedAttention()]
    kept = [transform for transform in plan.transforms if transform.order != Order.COMPILE]
    plan = Plan.of([*told, *kept], plan.layout, plan.pipeline)

    def blueprint() -> Blueprint:
        return apply(Blueprint.of(workload.build), workload.settings)

    for kept_units in () if every_block else KEPT[plan.layout.ep > 1 :]:
        if (short := shorten(blueprint(), plan, workload.settings, kept_units)) is None:
            break
        try:
            return _run_of(workload, *short, rank, metrics, device)
        except Exception as error:  # noqa: BLE001 (an error of the whole model is raised below)
            _log.debug("with %s of equal blocks: %s", kept_units, error)
    return _run_of(workload, blueprint(), plan, NO_REPEATS, rank, metrics, device)


def _run_of(
    workload: Workload,
    blueprint: Blueprint,
    plan: Plan,
    repeats: Repeats,
    rank: int,
    metrics: Sequence[str],
    device: torch.device,
) -> tuple[Estimate, tuple[str, ...]]:
    with fake_world(plan.layout.world, rank), ExitStack() as stack:
        topology = Topology.of(plan.layout, device)
        watch = _Watch(stack, separate=plan.layout.pp == 1, metrics=list(metrics), repeats=repeats)
        watched = Plan.of([*plan.transforms, watch], plan.layout, plan.pipeline)
        model = realize(blueprint, watched, topology, _nothing, workload.compute, workload.state)
        return _estimate(workload, model, watch), tuple(watch.metrics)


def _experts(stacked: nn.Module) -> int:
    """Returns the number of experts over all ranks."""
    return next(len(parameter) for parameter in stacked.parameters())


def _nothing(_: ParallelModel) -> None:
    """Replaces the initialization of weights; does nothing."""


@dataclass
class _Notes:
    """The ledger of one step, and places in it: where micro-batches begin, and the spans in which forwards of a part and loss
    heads ran."""

    ledger: Ledger
    starts: list[int] = field(default_factory=list)
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
    repeats: Repeats = NO_REPEATS
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
        if self.repeats.units:
            for path in context.specs.blocks:
                follow(part.get_submodule(path), path, self.repeats.unit_of(path), self._attribution)
        return part

    def _attribution(self) -> Attribution | None:
        return self.steps[-1].ledger.attribution if self.steps else None

    def after_backward(self, part: nn.Module, context: Context) -> None:
        if (attribution := self._attribution()) is not None:
            attribution.end_any()
            gradients = ((name, p.grad) for name, p in part.named_parameters() if p.grad is not None)
            self.steps[-1].ledger.attribute(_owned(gradients, self.repeats))

    def before_micro_batch(self, part: nn.Module, last: bool) -> None:
        notes = self.steps[-1]
        notes.starts.append(notes.ledger.here())
        if notes.ledger.attribution is not None and self.separate:
            notes.ledger.attribution.end_any()
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

        return _Listened(objective, self)


class _Listened(BatchObjective):
    """An objective with records of where it begins and ends."""

    def __init__(self, objective: Objective, watch: _Watch) -> None:
        self._objective, self._watch = objective, watch

    def __call__(self, head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> LossTerms:
        notes = self._watch.steps[-1]
        first = notes.ledger.here()
        terms = self._objective(head, hidden, labels)
        notes.heads.append((first, notes.ledger.here()))
        return terms

    def counts(self, batch: Batch) -> torch.Tensor:
        return summands(self._objective, batch)

    def bound(self, batch: Batch) -> Objective:
        return _Listened(bound(self._objective, batch), self._watch)


@dataclass(frozen=True)
class _Counted:
    """One step with some micro-batches: bytes of its gradients by unit, and its record, in which `starts`, `forwards` and `heads`
    are places as in `_Notes`."""

    gradients: list[tuple[Unit | None, int]]
    record: StepRecord
    starts: list[int]
    forwards: list[tuple[int, int]]
    heads: list[tuple[int, int]]

    def unrolled(self, missing: Mapping[Unit, int]) -> "_Counted":
        """Returns the step of the whole model."""
        whole = self.record.unrolled(missing)
        forwards, heads = (
            [(whole.moved(first), whole.moved(last)) for first, last in spans] for spans in (self.forwards, self.heads)
        )
        return replace(self, record=whole.record, starts=[*map(whole.moved, self.starts)], forwards=forwards, heads=heads)


def _estimate(workload: Workload, model: ParallelModel, watch: _Watch) -> Estimate:
    stages, wanted, repeats = model.topology.layout.pp, workload.micro_batches, watch.repeats
    fewest = _fewest(model.plan, wanted)
    optimizer = workload.optimizer(model)
    getattr(optimizer, "shorten", lambda: None)()
    step = Step(model, watch.listening(workload.objective), watch.agreed)
    sizes = (wanted,) if wanted <= 2 * fewest else (fewest, 2 * fewest) if stages > 1 else (2,)
    # The first step of a run does more than others: stages connect, and operators' layouts are computed.
    first = workload if stages > 1 else workload.shortened(model.topology.layout)
    for size in sizes if stages > 1 else (1,):
        _step(first, step, optimizer, watch, size)
    counted = [_counted(workload, step, optimizer, watch, size) for size in sizes]
    lasting = _lasting(model, optimizer, repeats)
    tables = [*lasting.values(), *(one.gradients for one in counted)]
    repeats = repeats.standing_for_all([one.record for one in counted], tables)
    counted = [one.unrolled(repeats.missing) for one in counted]
    last, record = counted[-1], counted[-1].record
    peak, flows = record.peak(), tuple(record.flows())
    if wanted > sizes[-1] and stages == 1:
        flows = _continued(flows, *map(record.flows, last.starts), added=1, further=wanted - 2)
    elif wanted > sizes[-1]:
        flows = _continued(flows, counted[0].record.flows(), flows, added=fewest, further=wanted - 2 * fewest)
        peak = _linear(counted[0].record.peak(), peak, sizes, wanted)
    # A forward of the last part computes the loss once for the next token, and once for each MTP module.
    scored = last.heads[: 1 + model.specs.mtp_depth]
    heads = [record.growth(*span) for span in scored]
    work = [record.rise(*span) for span in scored]
    return Estimate(
        rank=model.topology.rank,
        at=model.topology.coordinates,
        **{name: repeats.total(table) for name, table in lasting.items()},
        gradients=repeats.total(last.gradients),
        activations=sum(record.growth(*span) for span in last.forwards[: len(model.parts)]) - sum(heads),
        head=sum(heads),
        head_work=max(work, default=0),
        gathered=record.largest("all_gather"),
        reduced=record.largest("reduce_scatter"),
        peak=peak,
        flows=flows,
        bounds=tuple(bounds(model, wanted, workload.rows * workload.length, workload.documents, repeats.times_of)),
    )


def _lasting(model: ParallelModel, optimizer: Optimizer, repeats: Repeats) -> dict[str, list[tuple[Unit | None, int]]]:
    """Returns what lasts longer than a step, by unit: field of `Estimate` -> summands."""
    return {
        "elements": [(repeats.unit_of(name), local_box(tensor).local.numel()) for name, tensor in model.parameters_held()],
        "parameters": held_by(_owned(((n, p) for part in model.parts for n, p in part.named_parameters()), repeats)),
        "optimizer": held_by(_owned((named for state in optimizer.state().values() for named in state.items()), repeats)),
        "buffers": held_by(_owned(((n, b) for part in model.parts for n, b in part.named_buffers()), repeats)),
    }


def _owned(named: Iterable[tuple[str, torch.Tensor]], repeats: Repeats) -> Iterator[tuple[Unit | None, torch.Tensor]]:
    return ((repeats.unit_of(name), tensor) for name, tensor in named)


def _step(workload: Workload, step: Step, optimizer: Optimizer, watch: _Watch, micro_batches: int) -> None:
    watch.steps.append(_Notes(Ledger()))
    result = step([workload.batch(step.model.topology.device) for _ in range(micro_batches)])
    clip_grad_norm(step.model, result.norm, 1.0)
    optimizer.step(result.skip)
    optimizer.zero_grad()


def _counted(workload: Workload, step: Step, optimizer: Optimizer, watch: _Watch, micro_batches: int) -> _Counted:
    model, repeats = step.model, watch.repeats
    batches = [workload.batch(model.topology.device) for _ in range(micro_batches)]
    attribution = Attribution(repeats.edges) if repeats.units else None
    ledger = Ledger(attribution)
    notes = _Notes(ledger)
    watch.steps.append(notes)
    ledger.own("parameters", _owned(((n, p) for part in model.parts for n, p in part.named_parameters()), repeats))
    ledger.own("buffers", _owned(((n, b) for part in model.parts for n, b in part.named_buffers()), repeats))
    ledger.own("optimizer state", _owned((named for state in optimizer.state().values() for named in state.items()), repeats))
    if attribution is not None:
        for names, numbers in by_parameter(optimizer):
            ledger.know(numbers, [repeats.unit_of(name) for name in names])
    with ledger.open(), Traffic(model.topology.layout, ledger.call):
        result = step(batches)
        gradients = [(name, tensor.grad) for name, tensor, _ in model.trainable() if tensor.grad is not None]
        ledger.name(GRADIENTS, (gradient for _, gradient in gradients), anew=True)
        clip_grad_norm(model, result.norm, 1.0)
        optimizer.step(result.skip)
    table = held_by(_owned(gradients, repeats))
    del gradients
    optimizer.zero_grad()
    if attribution is not None and attribution.irregular is not None:
        raise Irregular(attribution.irregular)
    return _Counted(table, ledger.record(), notes.starts, notes.forwards, notes.heads)


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
