"""What a step tells the strategies of a model, and what it asks of them."""

from forge_core.batch import Batch
from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.pipeline import tied_weights


def refresh(model: ParallelModel) -> None:
    """Collective: gives tied copies on other pipeline stages the value of their originals; before a step or an evaluation."""
    if model.cut is not None:
        tied_weights.refresh(model.cut, model.everything, model.topology)


def local_batch(model: ParallelModel, batch: Batch, mtp_depth: int = 0) -> Batch:
    """This rank's share of what its data rank read, on the device; with labels of `mtp_depth` tokens beyond the next one."""
    batch = batch.to(str(model.topology.device)).with_mtp_targets(mtp_depth)
    for transform in model.plan.transforms:
        batch = transform.local_batch(batch, model.contexts[0])
    return batch


def before_micro_batch(model: ParallelModel, last: bool) -> None:
    """Tells every strategy that a micro-batch begins, and whether it is the step's last one."""
    for transform in model.plan.transforms:
        for part in model.parts:
            transform.before_micro_batch(part, last)


def after_backward(model: ParallelModel) -> None:
    """Collective: tells every strategy that the step's last backward is over: gradients are complete afterwards."""
    for transform in reversed(model.plan.transforms):
        for part, context in zip(model.parts, model.contexts, strict=True):
            transform.after_backward(part, context)
    if model.cut is not None:
        tied_weights.add_gradients(model.cut, model.everything, model.topology)
