"""A recipe as a dry run: what each rank would hold and exchange, and the size of the run, as plain data."""

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
from forge_parallel.dryrun.estimate import Estimate, Workload, dry_runs
from forge_parallel.dryrun.fake_world import Accelerator
from forge_parallel.dryrun.parameters import ParameterPlacement, parameters_of
from forge_parallel.dryrun.sharding import Recommendation, recommend
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan, default_transforms
from forge_parallel.model.realize import Blueprint
from forge_parallel.optim import optimizers
from forge_parallel.optim.groups import Settings
from forge_train.recipe.parameters import settings_in
from forge_train.recipe.schema import Job

METHOD = (
    "Parameters, gradients, optimizer state and traffic are exact: the real code ran on tensors without memory, in a world "
    "that is not there. "
)
KEPT = "What hooks keep of each parameter, such as its average, is counted with the optimizer's state. "
ON_CPU = "Memory within a step is what operators of a CPU ask for: kernels of a GPU may keep more or less (see --device), and "
ON_GPU = (
    "Memory within a step is that of attention as a GPU keeps it, its output and log-sum-exp, and what a CPU asks for elsewhere: "
    "other kernels of a GPU may keep more or less, and "
)
BLOCKS = "its allocator takes some more. Blocks are taken uncompiled, and rows as single documents."
EVEN = (
    " Experts are taken to be chosen with equal chance: with a router that prefers some, their ranks receive and keep more, so "
    "what travels to experts, and what they keep, is an estimate, too."
)


@dataclass(frozen=True)
class Group:
    """One axis of a layout: its size, how many groups of ranks there are, the first of them, and how many nodes a group spans."""

    axis: str
    size: int
    groups: int
    first: tuple[int, ...]
    nodes: int


@dataclass(frozen=True)
class DryRun:
    """A dry run of a recipe.

    Attributes:
        layout: of the world that was asked for.
        per_node: ranks of a node.
        transforms: names, in the order of application.
        micro_batches: of a rank and step; `rows` sequences of `length` tokens each.
        groups: for each axis larger than 1.
        ranks: estimates, one rank of each pipeline stage unless others were asked for.
        experts: whether the model has some.
        keeps: whether a hook keeps something for each parameter.
        accelerator: the GPU that was asked about; None for a CPU.
        sharding: recommended values of `[transforms.shard]` for that GPU; None where there is nothing to recommend.
    """

    layout: Layout
    per_node: int
    transforms: tuple[str, ...]
    micro_batches: int
    rows: int
    length: int
    groups: tuple[Group, ...]
    ranks: tuple[Estimate, ...]
    experts: bool = False
    accelerator: Accelerator | None = None
    sharding: Recommendation | None = None
    keeps: bool = False

    def as_json(self) -> dict[str, Any]:
        """Everything, bytes as integers."""
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
        """On which ranks have places; those of experts where they borrow ranks."""
        return tuple(dict.fromkeys(DENSE + SPARSE)) if self.layout.ep * self.layout.etp > 1 else DENSE

    @property
    def method(self) -> str:
        """What is exact in the numbers, and what is not."""
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
    """Runs `job` dry on some ranks of `layout`: by default on the first one of each pipeline stage, which hold the most.

    What their attention keeps is that of `accelerator`, or of a CPU.

    Raises:
        ForgeError: what a run would refuse when it is assembled.
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
    """The first rank of each pipeline stage."""
    return range(0, layout.world, layout.world // layout.pp)


def placed_parameters(
    job: Job, layout: Layout, registry: Registry, ranks: Sequence[int] = ()
) -> dict[int, list[ParameterPlacement]]:
    """Every parameter that some ranks of `layout` hold once `job`'s model is laid out; by rank.

    Raises:
        ForgeError: what a run would refuse when it lays the model out.
    """
    plan, workload = plan_of(job, layout, registry), _workload(job, layout)
    return {rank: parameters_of(workload, plan, rank) for rank in ranks or first_ranks(layout)}


def _workload(job: Job, layout: Layout) -> Workload:
    train = job.train
    # Of stages what any of them trains, so that none needs more.
    settings = replace(settings_in(job, Blueprint.of(job.model.build)), stages=())
    return Workload(
        build=job.model.build,
        objective=job.objective.build(),
        optimizer=partial(_with_kept, job, settings),
        rows=train.micro_batch,
        length=job.data.sequence_length,
        micro_batches=train.global_batch // (layout.data * train.micro_batch),
        compute=job.precision.compute,
        state=job.precision.state,
        # Ranks that share rows tell each other where documents begin; others keep it to themselves.
        documents=layout.cp > 1 and job.data.documents == "mask",
        settings=settings,
    )


class _Keeping:
    """An optimizer whose state has what hooks keep, too."""

    def __init__(self, optimizer: Optimizer, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._optimizer, self._kept = optimizer, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {**self._optimizer.state(), **self._kept}


def _keeping(job: Job) -> list[Hook]:
    """The hooks of a recipe that keep tensors."""
    hooks = [component.build() for component in job.hooks]
    return [hook for hook in hooks if type(hook).tensors is not Hook.tensors]


def _with_kept(job: Job, settings: Settings, model: ParallelModel) -> Any:
    """The optimizer of a recipe, and what its hooks keep for each parameter."""
    optimizer, kept = optimizers.build_optimizer(job.optimizer, model, settings), {}
    for hook in _keeping(job):
        kept |= hook.tensors(model)
    return _Keeping(optimizer, kept) if kept else optimizer


def groups_of(layout: Layout, per_node: int) -> tuple[Group, ...]:
    """Groups of every axis larger than 1, and of the experts' axes where experts borrow ranks."""
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
            found.append(Group("+".join(axes), len(members[0]), len(members), members[0], nodes))
    return tuple(found)


def plan_of(job: Job, layout: Layout, registry: Registry) -> Plan:
    """The recipe's transforms, those that its axes pull in, and its pipeline where the layout has one.

    Raises:
        PlanError: they do not fit together; see `Plan.of`.
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
        parameters: weights of the whole model, a tied table once.
        blocks: without the table of the embedding and the output projection; None where a model does not tell.
        active: weights that one token uses, which are fewer with experts; None as above.
        tokens: positions that go through the model in the whole run.
        flops: of forward and backward over the whole run, as `forge_models.flops` counts; 6 x parameters x tokens where a model
            does not declare its products, or where some do not go by tokens: how many images there are, only the data know.
    """

    parameters: int
    blocks: int | None
    active: int | None
    tokens: int
    flops: float


def run_size(job: Job) -> RunSize:
    """The size of a run of this recipe."""
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
    """(steps, sequences in a step, tokens in a sequence) of each stretch of the run."""
    last = job.train.max_steps
    intervals = [interval for interval in intervals_of(job.data, job.train.global_batch) if interval.step < last]
    ends = [interval.step for interval in intervals[1:]] + [last]
    return [(end - interval.step, interval.batch, interval.length) for interval, end in zip(intervals, ends, strict=True)]
