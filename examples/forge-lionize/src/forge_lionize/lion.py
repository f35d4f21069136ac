"""Lion (Chen et al., 2023, "Symbolic discovery of optimization algorithms").

With gradient g, momentum m, rate lr and decay wd:
    c = beta1 * m + (1 - beta1) * g
    w = (1 - lr * wd) * w - lr * sign(c)
    m = beta2 * m + (1 - beta2) * g
"""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from forge_core.protocols import TrainableModel

DECAYED = frozenset({"matrix", "head"})


class Lion:
    """Updates `model.trainable()`; implements `forge_core.protocols.model.Optimizer`."""

    def __init__(self, model: TrainableModel, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        self._named = list(model.trainable())
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor, _ in self._named}
        self._lr = self.lr = lr
        self._betas = betas
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, skip: torch.Tensor | None = None) -> None:
        """One update; where `skip` is 1 weights and momentum keep every bit, even if gradients are not finite."""
        beta1, beta2 = self._betas
        for name, tensor, group in self._named:
            if tensor.grad is None:
                continue
            # Every element is updated by itself, so a shard needs nothing from the other ranks.
            weight, gradient, momentum = _local(tensor), _local(tensor.grad), _local(self._momentum[name])
            decay = self._weight_decay if group in DECAYED else 0.0
            direction = (momentum * beta1).add_(gradient, alpha=1 - beta1).sign_()
            moved = (weight * (1 - self.lr * decay)).sub_(direction, alpha=self.lr)
            average = (momentum * beta2).add_(gradient, alpha=1 - beta2)
            weight.copy_(moved if skip is None else torch.where(skip > 0, weight, moved))
            momentum.copy_(average if skip is None else torch.where(skip > 0, momentum, average))

    def set_factor(self, factor: float) -> None:
        """Sets the learning rate to `factor` times its peak."""
        self.lr = self._lr * factor

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for _, tensor, _ in self._named:
            tensor.grad = None

    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """`momentum` by global name, laid out as the parameter."""
        return {"momentum": self._momentum}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
