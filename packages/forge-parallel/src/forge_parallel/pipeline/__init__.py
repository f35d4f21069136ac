"""Pipelines: how a model is split into stages, the schedules in which stages run, and the code that runs them.

    from forge_parallel.pipeline import GPipe, Interleaved, placement, simulate

    for component in (GPipe(), Interleaved(stages_per_rank=2)):
        schedule = component.build()
        actions = schedule.actions(ranks=4, micro_batches=16)
        timeline = simulate(actions, stages=len(placement(schedule, 4)))
        print(component, f"ranks wait {timeline.bubble:.1%} of the time")

A recipe chooses a schedule in `[parallel.pipeline]`; `parallelize` takes a `Pipeline`.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_parallel.pipeline.definition import Pipeline
    from forge_parallel.pipeline.schedules import (
        Action,
        DualPipeV,
        GPipe,
        Interleaved,
        InterleavedZeroBubble,
        OneForwardOneBackward,
        PipelineSchedule,
        PipelineTimeline,
        TorchSchedule,
        ZeroBubbleV,
        placement,
        simulate,
    )

__all__ = [
    "Action",
    "DualPipeV",
    "GPipe",
    "Interleaved",
    "InterleavedZeroBubble",
    "OneForwardOneBackward",
    "Pipeline",
    "PipelineSchedule",
    "PipelineTimeline",
    "TorchSchedule",
    "ZeroBubbleV",
    "placement",
    "simulate",
]
__getattr__, __dir__ = lazy_exports(__name__)
