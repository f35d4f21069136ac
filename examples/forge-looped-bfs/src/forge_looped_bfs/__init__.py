"""The breadth-first pipeline schedule as a plugin of Forge, with the receipts that prove it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge

from forge_core import LAYOUT, Component, Feature
from forge_parallel.pipeline import PipelineSchedule, TorchSchedule

RECEIPTS = Path(__file__).parent / "receipts"
"""Folder of receipts, written by `forge-train parity --record`."""


@dataclass(frozen=True, kw_only=True)
class LoopedBFS(Component):
    """Several stages per rank; all micro-batches pass a stage before the next one starts (Lamy-Poirier, 2023).

    A rank sums the gradients of a stage without interruption, so that sharded gradients are reduced once per stage.
    """

    key_class: ClassVar = LAYOUT

    stages_per_rank: Annotated[int, Ge(2), Feature("looped_bfs_stages", unless=2, axis="pp")] = 2
    """Stages that each rank holds."""

    def build(self) -> PipelineSchedule:
        return TorchSchedule("looped_bfs", "ScheduleLoopedBFS", "any", stages_per_rank=self.stages_per_rank)
