"""Dry runs of a recipe: memory and traffic of each rank, and the size of the run, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from forge_core.layout import DENSE, SPARSE, Layout
from forge_core.protocols.model import Optimizer
from forge_core.protocols.run import Hook
from forge_core.registry import Registry
from forge_data.order.phases import intervals_of
from forge_parallel.dryrun.blocks import by_parameter
from forge_parallel.dryrun.estimate import Estimate, Workload, dry_runs
from forge_parallel.dryrun.fake_world import Accelerator
from forge_parallel.dryrun.parameters import ParameterPlacement, parameters_of
from forge_parallel.dryrun.sharding import Recommendation, recommend
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan, default_transforms
from forge_parallel.model.realize import Blueprint
from forge_parallel.optim import optimizers
from forge_parallel.optim.groups import Settings
from forge_train.recipe.schema import Job
from forge_train.run.training import settings_in

METHOD = (
    "Parameters, gradients, optimizer state and traffic are exact: the real code ran on tensors without memory, in a "
    "simulated world. "
)
KEPT = "Tensors that hooks keep per parameter, such as its average, are counted as optimizer state. "
ON_CPU = "Memory within a step is that of CPU operators: GPU kernels may use more or less (see --device), and "
ON_GPU = (
    "Memory within a step is that of GPU attention, which keeps its output and log-sum-exp, and of CPU operators elsewhere: "
    "other GPU kernels may use more or less, and "
)
BLOCKS = "the GPU's allocator adds overhead. Blocks are assumed not compiled, and rows to be single documents."
EVEN = (
    " Routing is assumed to be uniform: with a router that prefers some experts, their ranks receive and keep more tokens, so "
    "traffic and activations of experts are estimates, too."
)


@dataclass(frozen=True)
class AxisGroups:
    """One axis of a layout: its size, the number of groups, the ranks of the first group, and the nodes that a group spans."""

    axis: str
    size: int
    groups: int
    first: tuple[int, ...]
    nodes: int


@dataclass(frozen=True)
class DryRun:
    """A dry run of a recipe.

    Attributes:
        layout: layout for the requested number of processes.
        per_node: ranks per node.
        transforms: names, in the order of application.
        micro_batches: micro-batches per rank and step, each with `rows` sequences of `length` tokens.
        groups: groups of each axis larger than 1.
        ranks: estimates of the requested ranks; by default of one rank per pipeline stage.
        experts: True if the model has experts.
        keeps: True if a hook keeps tensors per parameter.
        accelerator: the GPU to plan for; None for a CPU.
        sharding: recommended values of `[transforms.shard]` for that GPU; None if there is no recommendation.
    """

    layout: Layout
    per_node: int
    transforms: tuple[str, ...]
    micro_batches: int
    rows: int
    length: int
    groups: tuple[AxisGroups, ...]
    ranks: tuple[Estimate, ...]
    experts: bool = False
    accelerator: Accelerator | None = None
    sharding: Recommendation | None = None
    keeps: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns all attributes as JSON, with bytes as integers."""
        ranks = []
        for estimate in self.ranks:
            entry = asdict(estimate)
            entry["peak"] = {"bytes": sum(estimate.peak.values()), "of": dict(estimate.peak)}
            ranks.append(entry | {"at": {axis: estimate.at[axis] for axis in self.axes}})
        step = {"micro_batches": self.micro_batches, "rows": self.rows, "length": self.length}
        return {
            "layout": self.layout.sizes(),
            "world": self.layout.world,
            "per_node": self.per_node,
            "transforms": list(self.transforms),
            "step": step,
            "axes": [asdict(group) | {"first": list(group.first)} for group in self.groups],
            "ranks": ranks,
            "device": {"name": "cpu"} if self.accelerator is None else asdict(self.accelerator),
            "shard": None if self.sharding is None else self.sharding.as_json(),
            "method": self.method,
        }

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the coordinates of ranks, including those of experts if experts use their own axes."""
        return tuple(dict.fromkeys(DENSE + SPARSE)) if self.layout.ep * self.layout.etp > 1 else DENSE

    @property
    def method(self) -> str:
        """Text that says which numbers are exact and which are estimates."""
        return (
            METHOD
            + (KEPT if self.keeps else "")
            + (ON_CPU if self.accelerator is None else ON_GPU)
            + BLOCKS
            + (EVEN if self.experts else "")
        )


def dry_run(
    job: Job,
    layout: Layout,
    registry: Registry,
    per_node: int,
    ranks: Sequence[int] = (),
    accelerator: Accelerator | None = None,
) -> DryRun:
    """Runs `job` dry on some ranks of `layout`: by default on the first rank of each pipeline stage, which holds the most.

    Memory of attention is that of `accelerator`, or of a CPU.

    Raises:
        ForgeError: a run could not be assembled from this recipe.
    """
    plan, workload = plan_of(job, layout, registry), _workload(job, layout)
    estimates = dry_runs(workload, plan, ranks or first_ranks(layout), accelerator=accelerator)
    groups = groups_of(layout, per_node)
    step = workload.micro_batches, workload.rows, workload.length
    experts = getattr(job.model, "moe", None) is not None
    keeps = bool(_keeping(job))
    sharding = recommend(job, layout, lambda: Blueprint.of(job.model.build), accelerator.memory) if accelerator else None
    return DryRun(layout, per_node, plan.names(), *step, groups, tuple(estimates), experts, accelerator, sharding, keeps)


def first_ranks(layout: Layout) -> Sequence[int]:
    """Returns the first rank of each pipeline stage."""
    return range(0, layout.world, layout.world // layout.pp)


def placed_parameters(
    job: Job, layout: Layout, registry: Registry, ranks: Sequence[int] = ()
) -> dict[int, list[ParameterPlacement]]:
    """Returns all parameters on some ranks of `layout` after `job`'s model is parallelized, by rank.

    Raises:
        ForgeError: the model cannot be parallelized in this layout.
    """
    plan, workload = plan_of(job, layout, registry), _workload(job, layout)
    return {rank: parameters_of(workload, plan, rank) for rank in ranks or first_ranks(layout)}


def largest_step(job: Job) -> tuple[int, int]:
    """Returns sequences per step and tokens per sequence of the steps with the longest sequences, and among them the most of
    them: those that need the most memory on a rank."""
    length, batch = max((length, batch) for _, batch, length in _spans(job))
    return batch, length


def _workload(job: Job, layout: Layout) -> Workload:
    train, (batch, length) = job.train, largest_step(job)
    # Union of the parameters that any training stage trains: an upper bound for each stage.
    settings = replace(settings_in(job, Blueprint.of(job.model.build)), stages=())
    return Workload(
        build=job.model.build,
        objective=job.objective.build(),
        optimizer=partial(_with_kept, job, settings),
        rows=train.micro_batch,
        length=length,
        micro_batches=batch // (layout.data * train.micro_batch),
        compute=job.precision.compute,
        state=job.precision.state,
        # Only ranks that share rows exchange the boundaries of documents, and only objectives of pairs read them.
        documents=(layout.cp > 1 or getattr(job.objective, "pairs", False)) and job.data.documents == "mask",
        settings=settings,
    )


class _Keeping:
    """An optimizer whose state includes the tensors of hooks."""

    def __init__(self, optimizer: Optimizer, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._optimizer, self._kept = optimizer, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {**self._optimizer.state(), **self._kept}

    def by_parameter(self) -> Sequence[tuple[Sequence[str], Tensor]]:
        return by_parameter(self._optimizer)


def _keeping(job: Job) -> list[Hook]:
    """Returns the hooks of a recipe that keep tensors."""
    hooks = [component.build() for component in job.hooks]
    return [hook for hook in hooks if type(hook).tensors is not Hook.tensors]


def _with_kept(job: Job, settings: Settings, model: ParallelModel) -> Any:
    """Returns the optimizer of a recipe, with the tensors that hooks keep per parameter."""
    optimizer, kept = optimizers.build_optimizer(job.optimizer, model, settings), {}
    for hook in _keeping(job):
        kept |= hook.tensors(model)
    return _Keeping(optimizer, kept) if kept else optimizer


def groups_of(layout: Layout, per_node: int) -> tuple[AxisGroups, ...]:
    """Returns the groups of every axis larger than 1, including expert axes if they are used."""
    views: list[tuple[str, ...]] = [(axis,) for axis in DENSE]
    if layout.cp > 1 and layout.dp_shard > 1:
        views.append(("dp_shard", "cp"))
    if layout.ep * layout.etp > 1:
        views += [(axis,) for axis in SPARSE if axis not in DENSE]
    found = []
    for axes in views:
        members = list(layout.groups(axes))
        if len(members[0]) > 1:
            nodes = max(len({rank // per_node for rank in ranks}) for ranks in members)
            found.append(AxisGroups("+".join(axes), len(members[0]), len(members), members[0], nodes))
    return tuple(found)


def plan_of(job: Job, layout: Layout, registry: Registry) -> Plan:
    """Returns the plan of a recipe: its transforms, the default transforms of its axes, and its pipeline if the layout has one.

    Raises:
        PlanError: the transforms do not fit together; see `Plan.of`.
    """
    defaults = default_transforms(layout, job.transforms)
    transforms = [
        *(component.build() for component in job.transforms.values()),
        *(registry.load("forge.transforms", name)().build() for name in defaults),
    ]
    return Plan.of(transforms, layout, job.parallel.pipeline.build() if layout.pp > 1 else None)


@dataclass(frozen=True)
class RunSize:
    """Counts of one recipe.

    Attributes:
        parameters: weights of the whole model; a tied embedding counts once.
        blocks: weights without embedding and output projection; None if the model does not declare its counts.
        active: weights that one token uses, fewer than `parameters` with experts; None as above.
        tokens: positions processed by the model in the whole run.
        flops: FLOPs of forward and backward over the whole run, counted by `forge_models.flops`; 6 x parameters x tokens if the
            model does not declare its matrix products, or if their number does not follow from the tokens, as with images.
    """

    parameters: int
    blocks: int | None
    active: int | None
    tokens: int
    flops: float


def run_size(job: Job) -> RunSize:
    """Returns the size of a run of this recipe."""
    from forge_models.flops import counts_of

    spans = _spans(job)
    tokens = sum(steps * batch * length for steps, batch, length in spans)
    counts = counts_of(job.model)
    if counts is None or counts.note:
        built = Blueprint.of(job.model.build)
        parameters = sum(parameter.numel() for parameter in built.module.parameters())
        return RunSize(parameters, None, None, tokens, 6.0 * parameters * tokens)
    flops = sum(steps * batch * length * counts.training(length) for steps, batch, length in spans)
    blocks = counts.parameters - counts.embedding - counts.head
    return RunSize(counts.parameters, blocks, counts.active, tokens, flops)


def _spans(job: Job) -> list[tuple[int, int, int]]:
    """Returns (steps, sequences per step, tokens per sequence) of each interval of the run with constant batches."""
    last = job.train.max_steps
    intervals = [interval for interval in intervals_of(job.data, job.train.global_batch) if interval.step < last]
    ends = [interval.step for interval in intervals[1:]] + [last]
    return [(end - interval.step, interval.batch, interval.length) for interval, end in zip(intervals, ends, strict=True)]
