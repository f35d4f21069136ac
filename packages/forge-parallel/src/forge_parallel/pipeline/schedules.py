"""Schedules of a pipeline: the order in which its stages work, as components and as what a plan takes.

The orders are torch's; this file has what must be known about each before torch is imported, so that a recipe can be refused
without it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from annotated_types import Ge

from forge_core.component import LAYOUT, Component
from forge_core.features import Feature

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; its halves for inputs and for weights."""


class Action(NamedTuple):
    """One piece of work of a rank."""

    kind: Kind
    stage: int
    micro_batch: int


KINDS: Mapping[str, Kind] = MappingProxyType(
    {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
)
"""By torch's names."""


class PipelineSchedule(Protocol):
    """What a component of `forge.pipeline_schedules` builds.

    Attributes:
        name: as a recipe says it.
        stages_per_rank: how many stages each rank of the pipeline holds.
        shape: `loop`: stage s is on rank s % ranks; `v`: stages go to the last rank and back.
        splits_backward: whether gradients of inputs and of weights are computed apart from each other (zero bubble).
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
        """Why it cannot run that many micro-batches on that many ranks, and what would do; None when it can."""
        ...

    def __call__(self, stages: Sequence[Any], micro_batches: int, loss: Callable[[Any, Any], Any]) -> Any:
        """A schedule in the way of `torch.distributed.pipelining` over this rank's stages, always given as a list."""
        ...

    def actions(self, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
        """What each rank does, in order."""
        ...


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule of `torch.distributed.pipelining`; implements `PipelineSchedule`.

    `rule` says which numbers of micro-batches it takes:
        any: at least 1.
        stages: at least one per stage.
        rounds: a multiple of the number of rounds, which is micro-batches // ranks, at least 1.
    """

    name: str
    target: str
    rule: Literal["any", "stages", "rounds"]
    stages_per_rank: int = 1
    shape: Literal["loop", "v"] = "loop"
    splits_backward: bool = False

    def refusal(self, ranks: int, micro_batches: int) -> str | None:
        """Why it cannot run, and what would do; None when it can."""
        if self.rule == "stages" and micro_batches < (stages := ranks * self.stages_per_rank):
            return (
                f"{self.name} needs at least as many micro-batches as stages, {stages}, but a rank has {micro_batches} per step"
            )
        rounds = max(1, micro_batches // ranks)
        if self.rule == "rounds" and micro_batches % rounds:
            near = [count for count in range(micro_batches, 0, -1) if count % max(1, count // ranks) == 0]
            return (
                f"{self.name} runs {micro_batches} micro-batches of {ranks} ranks in {rounds} rounds, which do not divide them; "
                f"multiples of {ranks} fit, and so does {near[0]}"
            )
        return "a pipeline needs at least one micro-batch" if micro_batches < 1 else None

    def __call__(self, stages: Sequence[Any], micro_batches: int, loss: Callable[[Any, Any], Any]) -> Any:
        """Torch's schedule over this rank's stages. The loss is a sum already, so gradients are not divided."""
        from torch.distributed.pipelining import schedules

        made = getattr(schedules, self.target)
        single = issubclass(made, schedules.PipelineScheduleSingle)
        return made(stages[0] if single else list(stages), micro_batches, loss_fn=loss, scale_grads=False)

    def actions(self, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
        """Torch's own table, made without a process group."""
        if self.target == "Schedule1F1B":
            return tuple(tuple(_one_forward_one_backward(rank, ranks, micro_batches)) for rank in range(ranks))
        order = self(fake_stages(self, ranks), micro_batches, lambda output, _: output).pipeline_order
        return tuple(tuple(_flat(order[rank])) for rank in range(ranks))


def placement(schedule: PipelineSchedule, ranks: int) -> tuple[int, ...]:
    """The pipeline rank of every stage, in the order of stages."""
    down = tuple(range(ranks))
    if schedule.shape == "loop":
        return down * schedule.stages_per_rank
    return tuple(rank for turn in range(schedule.stages_per_rank) for rank in (down if turn % 2 == 0 else down[::-1]))


def fake_stages(schedule: PipelineSchedule, ranks: int) -> list[SimpleNamespace]:
    """What a schedule of torch reads of rank 0's stages, without modules or a process group."""
    where = placement(schedule, ranks)
    return [
        SimpleNamespace(stage_index=index, num_stages=len(where), group_size=ranks, group_rank=0, submod=None, is_last=False)
        for index, rank in enumerate(where)
        if rank == 0
    ]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """What torch's 1F1B runs; the table that it shows (2.13) begins its forwards with the wrong micro-batch."""
    ahead = min(micro_batches, ranks - rank)
    order = [Action("F", rank, index) for index in range(ahead)]
    for index in range(micro_batches):
        order.append(Action("B", rank, index))
        if index + ahead < micro_batches:
            order.append(Action("F", rank, index + ahead))
    return order


def _flat(order: Sequence[Any]) -> list[Action]:
    every = (one for action in order if action is not None for one in action.sub_actions or (action,))
    return [
        Action(KINDS[one.computation_type.name], one.stage_index, one.microbatch_index)
        for one in every
        if one.computation_type.name in KINDS
    ]


@dataclass(frozen=True, kw_only=True)
class GPipe(Component):
    """All forwards, then all backwards (Huang et al., 2019); keeps the activations of every micro-batch."""

    def build(self) -> PipelineSchedule:
        return TorchSchedule("gpipe", "ScheduleGPipe", "any")


@dataclass(frozen=True, kw_only=True)
class OneForwardOneBackward(Component):
    """One forward, one backward in turn (Narayanan et al., 2019); keeps activations of at most one micro-batch per stage."""

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
    """Two stages per rank in the shape of a V, without bubble where forward and both halves of backward cost the same
    (ZB-V; Qi et al., 2024)."""

    def build(self) -> PipelineSchedule:
        return TorchSchedule("zbv", "ScheduleZBVZeroBubble", "any", stages_per_rank=2, shape="v", splits_backward=True)


@dataclass(frozen=True, kw_only=True)
class DualPipeV(Component):
    """Two stages per rank in the shape of a V; forwards and backwards of different micro-batches meet (DeepSeek-AI, 2024)."""

    def build(self) -> PipelineSchedule:
        return TorchSchedule("dualpipev", "ScheduleDualPipeV", "stages", stages_per_rank=2, shape="v", splits_backward=True)
