"""The definition of a pipeline: its schedule and the number of blocks per stage. Pure numbers; does not import torch.

Modules before the first block (the embedding) are always on the first stage, modules after the last block (norm and head) on the
last one; neither counts as a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from forge_core.errors import PlanError
from forge_parallel.pipeline.schedules import PipelineSchedule, placement

BALANCED = "balanced"
"""The split with equal costs of stages, as far as possible."""


def parse(text: str) -> tuple[int, ...] | None:
    """Parses a split such as `5,4,4,3` into blocks per stage; returns None for `balanced`.

    Raises:
        PlanError: the text is neither, or a stage has no blocks.
    """
    if text == BALANCED:
        return None
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PlanError(
            f"the split {text!r} is not valid; write {BALANCED!r} or blocks per stage, each at least 1, for example '5,4,4,3'"
        )
    return sizes


def refusal(text: str, blocks: int, stages: int) -> str | None:
    """Returns why `text` cannot split `blocks` blocks over `stages` stages; None if it can."""
    if blocks < stages:
        return f"{blocks} blocks cannot be split over {stages} stages, as each stage needs at least one; use fewer stages"
    sizes = parse(text)
    if sizes is None:
        return None
    if len(sizes) != stages:
        return f"the split {text} is for {len(sizes)} stages, but there are {stages}; give one number per stage"
    if sum(sizes) != blocks:
        return f"the split {text} has {sum(sizes)} blocks, but the model has {blocks}; the numbers must add up to {blocks}"
    return None


def split(text: str, costs: Sequence[float], before: float, after: float, stages: int) -> tuple[int, ...]:
    """Returns the number of blocks per stage.

    Args:
        text: `balanced`, or blocks per stage.
        costs: cost of each block, in order.
        before: cost of the modules before the first block.
        after: cost of the modules after the last block.
        stages: number of stages over all ranks.

    Raises:
        PlanError: the split does not fit; see `refusal`.
    """
    if why := refusal(text, len(costs), stages):
        raise PlanError(why)
    return parse(text) or balanced(costs, before, after, stages)


def balanced(costs: Sequence[float], before: float, after: float, stages: int) -> tuple[int, ...]:
    """Returns the split whose most expensive stage is as cheap as possible; among these, one with the smallest sum of squares.

    Two dynamic programs over (stage, number of first blocks): the first finds the smallest possible maximum, the second the most
    even split within it. Takes stages * blocks^2 steps.
    """
    sums = [0.0, *accumulate(costs)]
    blocks = len(costs)

    def cost(stage: int, first: int, last: int) -> float:
        """Returns the cost of a stage with blocks [first, last)."""
        return sums[last] - sums[first] + (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)

    infinite = float("inf")
    # best[last]: smallest maximum cost over stages 0 .. stage with the first `last` blocks.
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
    """A pipeline, which claims the axis pp.

    Attributes:
        schedule: the schedule, which also defines the number of stages per rank.
        split: `balanced`, or blocks per stage such as `5,4,4,3`, for the stages of all ranks.
    """

    schedule: PipelineSchedule
    split: str = BALANCED

    def placement(self, ranks: int) -> tuple[int, ...]:
        """Returns the pipeline rank of every stage."""
        return placement(self.schedule, ranks)

    def refusals(self, ranks: int, blocks: int | None = None, micro_batches: int | None = None) -> list[str]:
        """Returns why the pipeline cannot run on `ranks` ranks; arguments that are None are not checked."""
        reasons = []
        if blocks is not None:
            try:
                reasons.append(refusal(self.split, blocks, len(self.placement(ranks))))
            except PlanError as error:
                reasons.append(str(error))
        if micro_batches is not None:
            reasons.append(self.schedule.refusal(ranks, micro_batches))
        return [why for why in reasons if why is not None]
