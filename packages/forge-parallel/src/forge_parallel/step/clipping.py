"""Clipping by the norm that `reduce` made, the same coefficient on every rank."""

import torch

from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.step.reduce import local_grad
from forge_parallel.torch_private import foreach_mul_


@torch.no_grad()
def clip_grad_norm(model: ParallelModel, norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Scales all gradients by min(1, limit / norm) and returns that coefficient, without a host synchronization unless
    gradients lie on the host.

    `norm` is the global 2-norm; where it is not finite the step is skipped anyway.
    """
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    gradients = [gradient for _, parameter, _ in model.trainable() if (gradient := local_grad(parameter)) is not None]
    if gradients:
        foreach_mul_(gradients, coefficient.to(gradients[0].device, gradients[0].dtype))
    return coefficient
