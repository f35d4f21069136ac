"""AdamW whose parameters and moments are bf16, computed in fp32 and rounded stochastically.

Six bytes an element instead of twelve, and unlike plain bf16 it learns: what a single step cannot show is kept on average.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from forge_core.protocols.model import TrainableModel
from forge_parallel.optim.adamw import DECAYED
from forge_parallel.optim.rounding import chunks, key_of, noise, rounded
from forge_parallel.placement.boxes import Box, local_box

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWBf16:
    """Updates `model.trainable()`, all bf16; implements `forge_core.protocols.model.Optimizer`."""

    def __init__(self, model: TrainableModel, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self._named = list(model.trainable())
        self._peak, self.lr = lr, lr
        self._betas, self._eps, self._decay = betas, eps, weight_decay
        device = self._named[0].tensor.device
        # One count for all: a step is taken by every parameter or by none.
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._moments = {key: {name: torch.zeros_like(tensor) for name, tensor, _ in self._named} for key in MOMENTS}
        self._update: Callable[..., Any] = torch.compile(_update, dynamic=True) if device.type == "cuda" else _update

    @torch.no_grad()
    def step(self, skip: torch.Tensor | None = None) -> None:
        """One update; where `skip` is 1 nothing changes, the step count included."""
        taken = torch.ones_like(self._step) if skip is None else (1 - skip).to(self._step.device, torch.int64)
        self._step += taken
        for name, tensor, group in self._named:
            gradient = tensor.grad
            if gradient is None:
                continue
            weight, slope = local_box(tensor), local_box(gradient).local
            mean, square = (local_box(self._moments[key][name]).local for key in MOMENTS)
            decay = self._decay if group in DECAYED else 0.0
            self._update_box(name, weight, slope, mean, square, decay, taken)

    def _update_box(
        self,
        name: str,
        weight: Box,
        slope: torch.Tensor,
        mean: torch.Tensor,
        square: torch.Tensor,
        decay: float,
        taken: torch.Tensor,
    ) -> None:
        keys = [key_of(name, state) for state in ("weight", *MOMENTS)]
        rate = torch.tensor(self.lr, dtype=torch.float32, device=slope.device)  # a tensor, so that no rate is compiled in
        for region, index in chunks(weight):
            old = [tensor[region] for tensor in (weight.local, mean, square)]
            bits = [noise(index, key, self._step) for key in keys]
            new = self._update(*old, slope[region], *bits, self._step, rate, self._betas, self._eps, decay)
            for before, after in zip(old, new, strict=True):
                before.copy_(torch.where(taken.bool(), after, before))

    def set_factor(self, factor: float) -> None:
        """Sets the learning rate to `factor` times its peak."""
        self.lr = self._peak * factor

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for _, tensor, _ in self._named:
            tensor.grad = None

    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """`exp_avg` and `exp_avg_sq` (as the parameter) by global name, and the `step` of all, under the name `all`."""
        return {"step": {"all": self._step}, **self._moments}


def _update(
    weight: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    slope: torch.Tensor,
    weight_bits: torch.Tensor,
    mean_bits: torch.Tensor,
    square_bits: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New weight, mean and mean square, each rounded once; the arithmetic of Loshchilov and Hutter (2019) in fp32."""
    gradient = slope.float()
    first = torch.lerp(mean.float(), gradient, 1 - betas[0])
    second = torch.lerp(square.float(), gradient.square(), 1 - betas[1])
    corrected = first / (1 - betas[0] ** step)
    root = (second / (1 - betas[1] ** step)).sqrt() + eps
    moved = weight.float() * (1 - rate * decay) - rate * corrected / root
    return rounded(moved, weight_bits), rounded(first, mean_bits), rounded(second, square_bits)
