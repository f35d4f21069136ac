"""Pipeline schedules: the order in which stages run, as components of recipes and as objects for plans.

torch implements the orders. This file has the properties that are needed before torch is imported, so that `check` can refuse a
recipe without it.

`simulate` computes how long ranks wait for each other, given the costs of forward and backward. By default communication costs
nothing, so only the schedule matters. For M micro-batches on p ranks, forward cost 1 and backward cost 2, the idle time relative
to the working time is (p - 1) / M for GPipe and 1F1B, and (p - 1) / (v M) for interleaved 1F1B with v stages per rank (Narayanan
et al., 2021).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from annotated_types import Ge

from forge_core.component import LAYOUT, Component
from forge_core.errors import PlanError
from forge_core.features import Feature

Kind = Literal["F", "B", "I", "W"]
"""Forward; full backward; the halves of a backward for inputs and for weights."""


class Action(NamedTuple):
    """One action of a rank: a kind of computation of one stage for one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int


KINDS: Mapping[str, Kind] = MappingProxyType(
    {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
)
"""torch's names -> kinds of actions."""


class PipelineSchedule(Protocol):
    """The object that a component of `forge.pipeline_schedules` builds.

    Attributes:
        name: name in recipes.
        stages_per_rank: number of stages on each rank of the pipeline.
        shape: `loop`: stage s is on rank s % ranks; `v`: stages go from the first rank to the last and back.
        splits_backward: whether gradients of inputs and of weights are computed separately (zero bubble).
    """

    @property
    def name(self) -> str: ...
    @property
    def stages_per_rank(self) -> int: ...
    @property
    def shape(self) -> Literal["loop", "v"]: ...
    @property
    def splits_backward(self) -> bool: ...

    def refusal(self, ranks: int, micro_batches: int) -> str | None:
        """Returns why the schedule does not support these numbers, and what it supports; None if it supports them."""
        ...

    def __call__(self, stages: Sequence[Any], micro_batches: int, loss: Callable[[Any, Any], Any]) -> Any:
        """Returns a schedule like those of `torch.distributed.pipelining` over this rank's list of stages."""
        ...

    def actions(self, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
        """Returns the actions of each rank, in order."""
        ...


SPLITS_BACKWARD = (2, 13)
"""The first release of torch with which the halves of a backward were compared with one process; 2.11 fails in them."""


@lru_cache(maxsize=1)
def _torch_release() -> tuple[int, ...]:
    """Returns the first two numbers of torch's version, without importing it."""
    return tuple(int(number) for number in version("torch").split(".")[:2])


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule of `torch.distributed.pipelining`; implements `PipelineSchedule`.

    `rule` says which numbers of micro-batches are allowed:
        any: at least 1.
        stages: at least one per stage.
        rounds: a multiple of the number of rounds, which is micro-batches // ranks and at least 1.
    """

    name: str
    target: str
    rule: Literal["any", "stages", "rounds"]
    stages_per_rank: int = 1
    shape: Literal["loop", "v"] = "loop"
    splits_backward: bool = False

    def refusal(self, ranks: int, micro_batches: int) -> str | None:
        """Returns why the schedule does not support these numbers, and what it supports; None if it supports them."""
        if self.splits_backward and _torch_release() < SPLITS_BACKWARD:
            needed, found = (".".join(map(str, release)) for release in (SPLITS_BACKWARD, _torch_release()))
            return (
                f"{self.name} splits the backward, which is proven from torch {needed} on, and this is torch {found}; update "
                "torch, or use the schedule 1f1b or interleaved"
            )
        if self.rule == "stages" and micro_batches < (stages := ranks * self.stages_per_rank):
            return (
                f"{self.name} needs at least as many micro-batches as stages, {stages}, but a rank has {micro_batches} per step"
            )
        rounds = max(1, micro_batches // ranks)
        if self.rule == "rounds" and micro_batches % rounds:
            near = [count for count in range(micro_batches, 0, -1) if count % max(1, count // ranks) == 0]
            return (
                f"{self.name} runs {micro_batches} micro-batches on {ranks} ranks in {rounds} rounds, but {micro_batches} is not "
                f"divisible by {rounds}; use a multiple of {ranks}, or {near[0]}"
            )
        return "a pipeline needs at least one micro-batch per step" if micro_batches < 1 else None

    def __call__(self, stages: Sequence[Any], micro_batches: int, loss: Callable[[Any, Any], Any]) -> Any:
        """Returns torch's schedule over this rank's stages. The loss is already divided, so gradients are not scaled."""
        from torch.distributed.pipelining import schedules

        schedule = getattr(schedules, self.target)
        single = issubclass(schedule, schedules.PipelineScheduleSingle)
        return schedule(stages[0] if single else list(stages), micro_batches, loss_fn=loss, scale_grads=False)

    def actions(self, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
        """Returns torch's own table of actions, computed without a process group."""
        if self.target == "Schedule1F1B":
            return tuple(tuple(_one_forward_one_backward(rank, ranks, micro_batches)) for rank in range(ranks))
        order = self(fake_stages(self, ranks), micro_batches, lambda output, _: output).pipeline_order
        return tuple(tuple(_flat(order[rank])) for rank in range(ranks))


def placement(schedule: PipelineSchedule, ranks: int) -> tuple[int, ...]:
    """Returns the pipeline rank of every stage, in order of stages."""
    down = tuple(range(ranks))
    if schedule.shape == "loop":
        return down * schedule.stages_per_rank
    return tuple(rank for turn in range(schedule.stages_per_rank) for rank in (down if turn % 2 == 0 else down[::-1]))


@lru_cache(maxsize=64)
def actions_of(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Returns `schedule.actions`, computed once for each schedule and pair of numbers."""
    return schedule.actions(ranks, micro_batches)


def fake_stages(schedule: PipelineSchedule, ranks: int) -> list[SimpleNamespace]:
    """Returns objects with the attributes of rank 0's stages that torch's schedules read, without modules or process group."""
    where = placement(schedule, ranks)
    return [
        SimpleNamespace(stage_index=index, num_stages=len(where), group_size=ranks, group_rank=0, submod=None, is_last=False)
        for index, rank in enumerate(where)
        if rank == 0
    ]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Returns the actions of torch's 1F1B; the table of torch 2.13 lists the forwards with wrong micro-batches."""
    ahead = min(micro_batches, ranks - rank)
    order = [Action("F", rank, index) for index in range(ahead)]
    for index in range(micro_batches):
        order.append(Action("B", rank, index))
        if index + ahead < micro_batches:
            order.append(Action("F", rank, index + ahead))
    return order


def _flat(order: Sequence[Any]) -> list[Action]:
    flat = (part for action in order if action is not None for part in action.sub_actions or (action,))
    return [
        Action(KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in flat
        if action.computation_type.name in KINDS
    ]


@dataclass(frozen=True, kw_only=True)
class GPipe(Component):
    """All forwards, then all backwards (Huang et al., 2019); keeps the activations of every micro-batch."""

    def build(self) -> PipelineSchedule:
        return TorchSchedule("gpipe", "ScheduleGPipe", "any")


@dataclass(frozen=True, kw_only=True)
class OneForwardOneBackward(Component):
    """Alternates forwards and backwards (Narayanan et al., 2019); keeps activations of at most one micro-batch per stage."""

    def build(self) -> PipelineSchedule:
        return TorchSchedule("1f1b", "Schedule1F1B", "stages")


@dataclass(frozen=True, kw_only=True)
class Interleaved(Component):
    """1F1B with several stages per rank, which divides the bubble by their number (Narayanan et al., 2021)."""

    key_class: ClassVar = LAYOUT

    stages_per_rank: Annotated[int, Ge(2), Feature("more_stages", unless=2, axis="pp")] = 2
    """Stages that each rank holds."""

    def build(self) -> PipelineSchedule:
        return TorchSchedule("interleaved", "ScheduleInterleaved1F1B", "rounds", stages_per_rank=self.stages_per_rank)


@dataclass(frozen=True, kw_only=True)
class InterleavedZeroBubble(Component):
    """Interleaved 1F1B that fills the bubble with gradients of weights (ZB-H1; Qi et al., 2023)."""

    key_class: ClassVar = LAYOUT

    stages_per_rank: Annotated[int, Ge(2), Feature("more_stages", unless=2, axis="pp")] = 2
    """Stages that each rank holds."""

    def build(self) -> PipelineSchedule:
        return TorchSchedule(
            "interleaved_zero_bubble",
            "ScheduleInterleavedZeroBubble",
            "rounds",
            stages_per_rank=self.stages_per_rank,
            splits_backward=True,
        )


@dataclass(frozen=True, kw_only=True)
class ZeroBubbleV(Component):
    """Two stages per rank in the shape of a V; without bubble if forward and both halves of the backward have equal costs
    (ZB-V; Qi et al., 2024)."""

    def build(self) -> PipelineSchedule:
        return TorchSchedule("zbv", "ScheduleZBVZeroBubble", "any", stages_per_rank=2, shape="v", splits_backward=True)


@dataclass(frozen=True, kw_only=True)
class DualPipeV(Component):
    """Two stages per rank in the shape of a V; overlaps forwards and backwards of different micro-batches (DeepSeek-AI, 2024)."""

    def build(self) -> PipelineSchedule:
        return TorchSchedule("dualpipev", "ScheduleDualPipeV", "stages", stages_per_rank=2, shape="v", splits_backward=True)


UNIT = MappingProxyType({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})
"""Kind of action -> cost on one stage; the backward of a block has twice as many matrix products as its forward."""


@dataclass(frozen=True)
class PipelineTimeline:
    """`length`: end time of the last rank. `busy`: working time of each rank. `ends`: end time of each action."""

    length: float
    busy: tuple[float, ...]
    ends: Mapping[Action, float]

    @property
    def bubble(self) -> float:
        """Idle time of all ranks, relative to their working time."""
        return len(self.busy) * self.length / sum(self.busy) - 1


def simulate(
    table: Sequence[Sequence[Action]],
    stages: int,
    costs: Mapping[str, float] | Callable[[Action], float] = UNIT,
    transfer: float = 0.0,
) -> PipelineTimeline:
    """Runs a table of actions, for each rank in order, as early as their inputs are available.

    Args:
        table: actions of each rank.
        stages: number of stages.
        costs: cost of an action: by its kind, or a function where stages differ.
        transfer: time that an input from another rank takes; no rank works meanwhile, and transfers do not delay each other.

    Raises:
        PlanError: the schedule deadlocks.
    """
    cost = costs if callable(costs) else lambda action: costs[action.kind]
    where = {action.stage: rank for rank, order in enumerate(table) for action in order}
    ends: dict[Action, float] = {}
    at = [0] * len(table)
    clock = [0.0] * len(table)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(table):
            while at[rank] < len(order) and all(any(a in ends for a in either) for either in _needs(order[at[rank]], stages)):
                action = order[at[rank]]
                ready = [
                    min(ends[a] + (transfer if where[a.stage] != rank else 0.0) for a in either if a in ends)
                    for either in _needs(action, stages)
                ]
                clock[rank] = max([clock[rank], *ready]) + cost(action)
                ends[action] = clock[rank]
                at[rank] += 1
                moved = True
    stuck = {rank: order[at[rank]] for rank, order in enumerate(table) if at[rank] < len(order)}
    if stuck:
        raise PlanError(f"the schedule deadlocks; ranks wait at {stuck}")
    return PipelineTimeline(max(clock), tuple(sum(map(cost, order)) for order in table), ends)


def _needs(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """Returns, for each input of an action, the actions that can produce it, one of which must have ended."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [(Action("F", stage - 1, micro_batch),)] if stage > 0 else []
    if kind == "W":
        return [(Action("I", stage, micro_batch),)]
    after = [(Action("B", stage + 1, micro_batch), Action("I", stage + 1, micro_batch))] if stage < stages - 1 else []
    return [(Action("F", stage, micro_batch),), *after]
