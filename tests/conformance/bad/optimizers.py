"""Optimizers that do not do what they have to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from forge_core.component import Component


class Built:
    """Momentum descent, right in every respect; `lr` is the peak rate."""

    def __init__(self, model: Any, lr: float = 0.02) -> None:
        self.named = list(model.trainable())
        self.momentum = {name: torch.zeros_like(tensor) for name, tensor, _ in self.named}
        self.peak = self.lr = lr

    def set_factor(self, factor: float) -> None:
        self.lr = self.peak * factor

    def direct(self, weight: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return slope

    @torch.no_grad()
    def step(self, skip: Any = None) -> None:
        for name, tensor, _ in self.named:
            momentum = self.momentum[name] * 0.9 + self.direct(tensor, tensor.grad)  # type: ignore[arg-type]
            moved = tensor - self.lr * momentum
            tensor.copy_(moved if skip is None else torch.where(skip > 0, tensor, moved))
            self.momentum[name].copy_(momentum if skip is None else torch.where(skip > 0, self.momentum[name], momentum))

    def zero_grad(self) -> None:
        for _, tensor, _ in self.named:
            tensor.grad = None

    def state(self) -> Any:
        return {"momentum": self.momentum}


@dataclass(frozen=True, kw_only=True)
class Part(Component):
    """An optimizer that is made by `make`, and claims to be elementwise."""

    make: Callable[[Any], Any]
    shards: str = "elementwise"

    def build(self, model: Any) -> Any:
        return self.make(model)


class Multiplies(Built):
    """Skips by multiplying with zero: zero times NaN is NaN."""

    @torch.no_grad()
    def step(self, skip: Any = None) -> None:
        for _, tensor, _ in self.named:
            tensor.sub_(self.lr * tensor.grad * (1 - skip))


class Sleeps(Built):
    """Never moves."""

    def step(self, skip: Any = None) -> None:
        pass


class Accumulates(Built):
    """Keeps gradients."""

    def zero_grad(self) -> None:
        pass


class DecaysAll(Built):
    """Decays norms and tables too."""

    def direct(self, weight: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return slope + 0.1 * weight


class Compounds(Built):
    """Multiplies the rate that an earlier call has set."""

    def set_factor(self, factor: float) -> None:
        self.lr *= factor


class Ignores(Built):
    """Has no learning rate."""

    def set_factor(self, factor: float) -> None:
        pass


class Forgets(Built):
    """Keeps its momentum to itself."""

    def state(self) -> Any:
        return {}


class Late(Built):
    """Has a state from its first step on only."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.begun = False

    def step(self, skip: Any = None) -> None:
        super().step(skip)
        self.begun = True

    def state(self) -> Any:
        return super().state() if self.begun else {}


class Lamb(Built):
    """Directions as long as the weight that they move (You et al., 2020)."""

    def direct(self, weight: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return slope * weight.norm() / slope.norm().clamp(min=1e-12)


class Muon(Built):
    """Orthogonal directions for matrices (Jordan et al., 2024), by an SVD."""

    def direct(self, weight: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        if slope.dim() != 2 or not slope.numel():
            return slope
        left, _, right = torch.linalg.svd(torch.nan_to_num(slope), full_matrices=False)
        return left @ right


GOOD = Part(make=Built)
BAD = {
    "check_skip": [(Part(make=Multiplies), "skip = 1 changes"), (Part(make=Sleeps), "skip = 0 does not change")],
    "check_zero_grad": [(Part(make=Accumulates), "leaves a gradient of a.weight")],
    "check_decay": [(Part(make=DecaysAll), r"move table\.weight, norm\.weight, which weight decay is not for")],
    "check_factor": [(Part(make=Ignores), r"set_factor\(0\)"), (Part(make=Compounds), "depends on the factor before")],
    "check_resume": [(Part(make=Forgets), "after a resume"), (Part(make=Late), "other tensors after 4 steps")],
    "check_parts": [(Part(make=Lamb), "in parts differs"), (Part(make=Muon), "in parts differs")],
}
