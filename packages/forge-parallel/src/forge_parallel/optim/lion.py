"""Lion: the sign of an interpolated momentum (Chen et al., 2023, "Symbolic discovery of optimization algorithms")."""

from collections.abc import Sequence

import torch
from torch import Tensor

from forge_core.protocols.model import TrainableModel
from forge_parallel.optim.elementwise import ElementwiseOptimizer, UpdateRule


def lion_rule(betas: tuple[float, float]) -> UpdateRule:
    """With gradient g, momentum m, rate lr and decay wd:

    w = (1 - lr * wd) * w - lr * sign(beta1 * m + (1 - beta1) * g)
    m = beta2 * m + (1 - beta2) * g
    """

    def update(weight: Tensor, states: Sequence[Tensor], slope: Tensor, numbers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rate, decay = numbers
        direction = torch.lerp(states[0], slope, 1 - betas[0]).sign()
        return weight * (1 - rate * decay) - rate * direction, torch.lerp(states[0], slope, 1 - betas[1])

    return UpdateRule(("momentum",), update, lambda counts, rate: ())  # noqa: ARG005


def lion(model: TrainableModel, lr: float, betas: tuple[float, float], weight_decay: float) -> ElementwiseOptimizer:
    """The optimizer, for `model.trainable()`."""
    return ElementwiseOptimizer(model, lion_rule(betas), lr, weight_decay)
