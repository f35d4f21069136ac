"""Sharding, optimizers and the training step for any PyTorch module.

`parallelize` returns a module for a training loop of your own:

    import torch
    from torch import nn
    from forge_parallel import parallelize

    def build():
        return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 16), nn.Linear(16, 100))

    model = parallelize(build, "1")  # "dp2tp2" in four processes of torchrun
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(64).view(8, 8)  # the rows of this rank: model.data_rank of model.data_ranks
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    model.clip_grad_norm_(1.0)  # one norm over all ranks
    optimizer.step()

`realize` builds a model that describes itself (`forge_core.protocols.Model`), and `Step` trains it. `verify_layout` compares a
layout with one process. Further fronts: `forge_parallel.transforms`, `.optim`, `.pipeline`, `.dryrun` and `.verify`.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_core.layout import Layout
    from forge_parallel.foreign.module import ParallelizedModule
    from forge_parallel.foreign.parallelize import parallelize
    from forge_parallel.foreign.verification import verify_layout
    from forge_parallel.launch.environment import read_launcher
    from forge_parallel.launch.process_group import destroy_process_groups, init_process_groups
    from forge_parallel.model.parallel_model import ParallelModel
    from forge_parallel.model.plan import Order, Plan
    from forge_parallel.model.realize import Blueprint, realize
    from forge_parallel.optim.whole_matrices import WholeMatrices
    from forge_parallel.pipeline.definition import Pipeline
    from forge_parallel.placement.topology import Topology
    from forge_parallel.step.reduce import clip_grad_norm
    from forge_parallel.step.step import Evaluation, Step, StepResult

__all__ = [
    "Blueprint",
    "Evaluation",
    "Layout",
    "Order",
    "ParallelModel",
    "ParallelizedModule",
    "Pipeline",
    "Plan",
    "Step",
    "StepResult",
    "Topology",
    "WholeMatrices",
    "clip_grad_norm",
    "destroy_process_groups",
    "init_process_groups",
    "parallelize",
    "read_launcher",
    "realize",
    "verify_layout",
]
__getattr__, __dir__ = lazy_exports(__name__)
