"""Orders in which the stages of a pipeline work."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from forge_core.component import LAYOUT, Component
from forge_core.features import Feature
from forge_parallel.pipeline.schedules import PipelineSchedule, TorchSchedule


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
