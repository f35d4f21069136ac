"""AdamW whose parameters and moments are bf16: six bytes an element instead of twelve, and unlike plain bf16 it learns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from forge_core.protocols.model import TrainableModel
from forge_parallel.optim.elementwise import Counts, ElementwiseOptimizer, UpdateRule

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw_rule(betas: tuple[float, float], eps: float) -> UpdateRule:
    """The arithmetic of Loshchilov and Hutter (2019)."""

    def numbers(counts: Counts, rate: Tensor) -> Sequence[Tensor]:  # noqa: ARG001 (every rule is given both)
        return [1 - beta ** counts["step"].double() for beta in betas]

    def update(weight: Tensor, moments: Sequence[Tensor], slope: Tensor, numbers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rate, decay, *corrections = numbers
        first = torch.lerp(moments[0], slope, 1 - betas[0])
        second = torch.lerp(moments[1], slope.square(), 1 - betas[1])
        root = (second / corrections[1]).sqrt() + eps
        return weight * (1 - rate * decay) - rate * (first / corrections[0]) / root, first, second

    return UpdateRule(MOMENTS, update, numbers)


def adamw_bf16(
    model: TrainableModel, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> ElementwiseOptimizer:
    """The optimizer, for `model.trainable()`."""
    return ElementwiseOptimizer(model, adamw_rule(betas, eps), lr, weight_decay)
