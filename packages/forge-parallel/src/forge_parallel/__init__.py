"""Sharding, optimizers and the training step for any PyTorch module with specs."""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_parallel.foreign.module import ParallelizedModule as ParallelizedModule
    from forge_parallel.foreign.parallelize import parallelize as parallelize
    from forge_parallel.foreign.verification import verify_layout as verify_layout
    from forge_parallel.launch.environment import read_launcher as read_launcher
    from forge_parallel.launch.process_group import destroy_process_groups as destroy_process_groups
    from forge_parallel.launch.process_group import init_process_groups as init_process_groups
    from forge_parallel.model.parallel_model import ParallelModel as ParallelModel
    from forge_parallel.model.plan import Order as Order
    from forge_parallel.model.plan import Plan as Plan
    from forge_parallel.model.realize import Blueprint as Blueprint
    from forge_parallel.model.realize import realize as realize
    from forge_parallel.optim.whole_matrices import WholeMatrices as WholeMatrices
    from forge_parallel.pipeline.definition import Pipeline as Pipeline
    from forge_parallel.placement.topology import Topology as Topology
    from forge_parallel.step.reduce import clip_grad_norm as clip_grad_norm
    from forge_parallel.step.step import Step as Step
    from forge_parallel.step.step import StepResult as StepResult

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Blueprint": "model.realize",
        "ParallelModel": "model.parallel_model",
        "ParallelizedModule": "foreign.module",
        "Order": "model.plan",
        "Pipeline": "pipeline.definition",
        "Plan": "model.plan",
        "Step": "step.step",
        "StepResult": "step.step",
        "Topology": "placement.topology",
        "WholeMatrices": "optim.whole_matrices",
        "clip_grad_norm": "step.reduce",
        "read_launcher": "launch.environment",
        "parallelize": "foreign.parallelize",
        "realize": "model.realize",
        "init_process_groups": "launch.process_group",
        "destroy_process_groups": "launch.process_group",
        "verify_layout": "foreign.verification",
    },
)
