"""What a plan knows of a pipeline: the order of work and the split of blocks. Torch-free."""

from dataclasses import dataclass

from forge_core.errors import PlanError
from forge_parallel.pipeline.schedules import PipelineSchedule, placement
from forge_parallel.pipeline.split import BALANCED, refusal


@dataclass(frozen=True)
class Pipeline:
    """Claims the axis pp.

    Attributes:
        schedule: order of work; it says how many stages a rank holds.
        split: `balanced`, or blocks per stage such as `5,4,4,3`. Stages are counted over all ranks.
    """

    schedule: PipelineSchedule
    split: str = BALANCED

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return placement(self.schedule, ranks)

    def refusals(self, ranks: int, blocks: int | None = None, micro_batches: int | None = None) -> list[str]:
        """Why it cannot run on `ranks` ranks; what is not known yet is not judged."""
        found = []
        if blocks is not None:
            try:
                found.append(refusal(self.split, blocks, len(self.placement(ranks))))
            except PlanError as error:
                found.append(str(error))
        if micro_batches is not None:
            found.append(self.schedule.refusal(ranks, micro_batches))
        return [why for why in found if why is not None]
