"""What a pipeline is: its schedule and how many blocks each stage has. Pure numbers, no torch.

Modules before the first block (the embedding) are always on the first stage, modules after the last one (the norm, the head)
on the last; neither counts as a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from forge_core.errors import PlanError
from forge_parallel.pipeline.schedules import PipelineSchedule, placement

BALANCED = "balanced"
"""The split that evens out the cost of stages."""


def parse(text: str) -> tuple[int, ...] | None:
    """Blocks per stage of a split such as `5,4,4,3`, or None for `balanced`.

    Raises:
        PlanError: the text is neither, or a stage has no block.
    """
    if text == BALANCED:
        return None
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PlanError(
            f"cannot read the split {text!r}; write {BALANCED!r} or blocks per stage, each at least 1, for example '5,4,4,3'"
        )
    return sizes


def refusal(text: str, blocks: int, stages: int) -> str | None:
    """Why `blocks` blocks cannot be split over `stages` stages by `text`; None when they can."""
    if blocks < stages:
        return f"{blocks} blocks cannot be spread over {stages} stages; each stage needs at least one"
    sizes = parse(text)
    if sizes is None:
        return None
    if len(sizes) != stages:
        return f"the split {text} is for {len(sizes)} stages, but there are {stages}; give one number per stage"
    if sum(sizes) != blocks:
        return f"the split {text} has {sum(sizes)} blocks, but the model has {blocks}"
    return None


def split(text: str, costs: Sequence[float], before: float, after: float, stages: int) -> tuple[int, ...]:
    """Blocks per stage.

    Args:
        text: `balanced`, or blocks per stage.
        costs: of each block, in order.
        before: cost of what runs before the first block.
        after: cost of what runs after the last block.
        stages: number of stages over all ranks.

    Raises:
        PlanError: it does not fit; see `refusal`.
    """
    if why := refusal(text, len(costs), stages):
        raise PlanError(why)
    return parse(text) or balanced(costs, before, after, stages)


def balanced(costs: Sequence[float], before: float, after: float, stages: int) -> tuple[int, ...]:
    """The split whose most expensive stage is as cheap as possible; of those, one with the least sum of squares.

    Two dynamic programmes over (stage, first blocks): the first finds the smallest possible maximum, the second the most
    even split that stays below it. stages * blocks^2 steps.
    """
    sums = [0.0, *accumulate(costs)]
    blocks = len(costs)

    def cost(stage: int, first: int, last: int) -> float:
        """Of a stage with blocks [first, last)."""
        return sums[last] - sums[first] + (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)

    infinite = float("inf")
    # best[last]: smallest maximum over stages 0 .. stage that hold the first `last` blocks.
    best = [0.0] + [infinite] * blocks
    for stage in range(stages):
        best = [
            min((max(best[first], cost(stage, first, last)) for first in range(last)), default=infinite)
            for last in range(blocks + 1)
        ]
    limit = best[blocks] * (1 + 1e-12)
    even: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] + [(infinite, ())] * blocks
    for stage in range(stages):
        even = [
            min(
                (
                    (even[first][0] + cost(stage, first, last) ** 2, (*even[first][1], last - first))
                    for first in range(last)
                    if cost(stage, first, last) <= limit
                ),
                default=(infinite, ()),
            )
            for last in range(blocks + 1)
        ]
    return even[blocks][1]


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
