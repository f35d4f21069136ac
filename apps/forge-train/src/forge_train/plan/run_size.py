"""How large a run is: parameters, tokens and FLOPs of a recipe, from its model on the meta device."""

from dataclasses import dataclass

from forge_data.order.phases import intervals_of
from forge_parallel.model.realize import Blueprint
from forge_train.recipe.schema import Job


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
