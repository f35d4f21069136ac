"""Sharding, optimizers and the training step for any PyTorch module that describes itself."""

from typing import TYPE_CHECKING

from forge_core.lazy import lazily

if TYPE_CHECKING:
    from forge_parallel.bootstrap import start as start
    from forge_parallel.bootstrap import stop as stop
    from forge_parallel.clipping import clip as clip
    from forge_parallel.foreign.parallelized import Parallelized as Parallelized
    from forge_parallel.foreign.parallelized import parallelize as parallelize
    from forge_parallel.foreign.verification import verify_layout as verify_layout
    from forge_parallel.launcher import launch as launch
    from forge_parallel.model import ParallelModel as ParallelModel
    from forge_parallel.pipeline.definition import Pipeline as Pipeline
    from forge_parallel.plan import Phase as Phase
    from forge_parallel.plan import Plan as Plan
    from forge_parallel.realization import Blueprint as Blueprint
    from forge_parallel.realization import realize as realize
    from forge_parallel.step import Step as Step
    from forge_parallel.step import StepResult as StepResult
    from forge_parallel.topology import Topology as Topology

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Blueprint": "realization",
        "ParallelModel": "model",
        "Parallelized": "foreign.parallelized",
        "Phase": "plan",
        "Pipeline": "pipeline.definition",
        "Plan": "plan",
        "Step": "step",
        "StepResult": "step",
        "Topology": "topology",
        "clip": "clipping",
        "launch": "launcher",
        "parallelize": "foreign.parallelized",
        "realize": "realization",
        "start": "bootstrap",
        "stop": "bootstrap",
        "verify_layout": "foreign.verification",
    },
)
