"""Optimizers for models of any layout; one file each. A `...Config` has the keys of `[optimizer]` and builds the optimizer.

    import torch
    from torch import nn
    from forge_parallel import parallelize
    from forge_parallel.optim import MuonConfig

    model = parallelize(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), "1")
    optimizer = MuonConfig(lr=0.02, adamw_lr=1e-3).build(model)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.set_factor(0.5)  # half of the peak learning rates
    optimizer.step()
    optimizer.zero_grad()

`optimizer.torch()` returns a `torch.optim.Optimizer` for torch's learning-rate schedulers. `build_optimizer` also applies
settings of single parameters and training stages.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_parallel.optim.elementwise import AdamW, ElementwiseOptimizer, UpdateRule
    from forge_parallel.optim.groups import GroupedOptimizer, ParameterGroup, Parameters, Setting, Settings, TrainingStage
    from forge_parallel.optim.muon import Muon
    from forge_parallel.optim.optimizers import (
        AdamW8bitConfig,
        AdamWConfig,
        LionConfig,
        MuonConfig,
        ScheduleFreeAdamWConfig,
        build_optimizer,
    )
    from forge_parallel.optim.schedule_free import ScheduleFree
    from forge_parallel.optim.stages import StagedOptimizer, settings_of
    from forge_parallel.optim.torch_view import TorchOptimizer
    from forge_parallel.optim.whole_matrices import WholeMatrices

__all__ = [
    "AdamW",
    "AdamW8bitConfig",
    "AdamWConfig",
    "ElementwiseOptimizer",
    "GroupedOptimizer",
    "LionConfig",
    "Muon",
    "MuonConfig",
    "ParameterGroup",
    "Parameters",
    "ScheduleFree",
    "ScheduleFreeAdamWConfig",
    "Setting",
    "Settings",
    "StagedOptimizer",
    "TorchOptimizer",
    "TrainingStage",
    "UpdateRule",
    "WholeMatrices",
    "build_optimizer",
    "settings_of",
]
__getattr__, __dir__ = lazy_exports(__name__)
