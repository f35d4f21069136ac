"""An optimizer in one file: `forge-train run debug --optimizer.name=./mine.py:Lion --optimizer.lr=3e-4`.

Its fields are typed and checked like those of any optimizer of Forge. The file imports torch at its head, which only
means that `forge-train check` on a recipe that names it is slower; the wheel beside it shows how to avoid that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Lt
from torch.distributed.tensor import DTensor

from forge_core import FREE, Component
from forge_core.protocols import TrainableModel


@dataclass(frozen=True, kw_only=True)
class Lion(Component):
    """Sign of an interpolated momentum, with decoupled weight decay (Chen et al., 2023)."""

    key_class: ClassVar = FREE

    lr: Annotated[float, Gt(0)] = 1e-4
    """Peak learning rate."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.99)
    """Weight of the momentum in the update, and its own decay."""
    weight_decay: Annotated[float, Ge(0)] = 0.3
    """Decoupled decay of matrices and of an untied output head."""
    shards: ClassVar[str] = "elementwise"

    def build(self, model: TrainableModel) -> "SignedMomentum":
        return SignedMomentum(self, model)


class SignedMomentum:
    """Implements `forge_core.protocols.model.Optimizer`."""

    def __init__(self, config: Lion, model: TrainableModel) -> None:
        self.config = config
        self.lr = config.lr
        self.named = list(model.trainable())
        self.momentum = {name: torch.zeros_like(tensor) for name, tensor, _ in self.named}

    @torch.no_grad()
    def step(self, skip: torch.Tensor | None = None) -> None:
        beta1, beta2 = self.config.betas
        for name, tensor, group in self.named:
            if tensor.grad is None:
                continue
            w, g, m = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, tensor.grad, self.momentum[name]))
            decay = self.config.weight_decay if group in ("matrix", "head") else 0.0
            new_w = w * (1 - self.lr * decay) - self.lr * torch.sign(beta1 * m + (1 - beta1) * g)
            new_m = beta2 * m + (1 - beta2) * g
            w.copy_(new_w if skip is None else torch.where(skip > 0, w, new_w))
            m.copy_(new_m if skip is None else torch.where(skip > 0, m, new_m))

    def set_factor(self, factor: float) -> None:
        self.lr = self.config.lr * factor

    def zero_grad(self) -> None:
        for _, tensor, _ in self.named:
            tensor.grad = None

    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return {"momentum": self.momentum}
