"""Muon: momentum of hidden matrices, orthogonalized by Newton-Schulz (Jordan et al., 2024); AdamW for all other parameters."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from forge_core.errors import PlanError
from forge_core.protocols.model import LaidOutModel, NamedTensor
from forge_parallel.optim.elementwise import AdamW
from forge_parallel.optim.groups import HasTorchView
from forge_parallel.optim.whole_matrices import Part, WholeMatrices

Scale = Literal["original", "match_rms_adamw"]

A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of a x + b x^3 + c x^5, which is steep at 0 and maps values up to 1 close to 1 (Jordan et al., 2024)."""

SMALLEST = 1e-7
"""Lower bound of norms in a division, so that a zero gradient stays zero."""


class _Rest(NamedTuple):
    """A model with only the parameters that AdamW updates."""

    named: Sequence[NamedTensor]

    def trainable(self) -> Sequence[NamedTensor]:
        return self.named


class Muon(HasTorchView):
    """Updates `model.trainable()`; implements `forge_core.protocols.model.Optimizer`.

    Parameters of group `matrix` are updated by -lr * s * orthogonal(momentum), each matrix separately: every expert of a stack,
    and every one of fused matrices. Each full matrix is orthogonalized once over all ranks, by its owner. AdamW updates
    embeddings, head, routers, norms and biases.
    """

    def __init__(
        self,
        model: LaidOutModel,
        lr: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        scale: Scale,
        steps: int,
        precision: torch.dtype,
        adamw_lr: float,
        adamw_betas: tuple[float, float],
        adamw_eps: float,
    ) -> None:
        """Collective: see `forge_parallel.optim.optimizers.MuonConfig` for the arguments.

        Raises:
            PlanError: parameters are in bf16, or a parameter of group `matrix` does not consist of matrices.
        """
        formats = {tensor.dtype for _, tensor, _ in model.trainable()}
        if low := formats - {torch.float32, torch.float64}:
            raise PlanError(
                f"muon needs parameters in fp32 or fp64, not {', '.join(map(str, low))}; set precision.state = 'fp32'"
            )
        self._matrices = WholeMatrices(model, cost=lambda rows, columns: flops(rows, columns, steps))
        self._named = {name: tensor for name, tensor, _ in self._matrices.named}
        self._momentum = {
            name: torch.zeros_like(tensor, memory_format=torch.preserve_format) for name, tensor in self._named.items()
        }
        self._rest = AdamW(_Rest(self._matrices.rest), adamw_lr, adamw_betas, adamw_eps, weight_decay)
        self._peak, self.lr = lr, lr
        self._decay, self._mu, self._nesterov, self._steps = weight_decay, momentum, nesterov, steps
        self._scale: Scale = scale
        # fp64 matrices are never rounded to a narrower dtype, so that layouts can be compared.
        self._dtype = torch.float64 if torch.float64 in formats else precision

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """Collective: updates the parameters; if `skip` is 1, nothing changes."""

        def direction(part: Part) -> Tensor:
            mean, grad = part.of(self._momentum[part.name]), self._named[part.name].grad
            if grad is None:
                return torch.zeros_like(mean)
            gradient = part.of(grad)
            new = torch.lerp(mean, gradient, 1 - self._mu)
            _put(new, mean, skip)
            return torch.lerp(gradient, new, self._mu) if self._nesterov else new

        for part, update in self._matrices.each(direction, lambda matrix: orthogonalized(matrix, self._steps), self._dtype):
            tensor = self._named[part.name]
            if tensor.grad is None:
                continue
            weight = part.of(tensor)
            updated = weight * (1 - self.lr * self._decay)
            updated.add_(update.to(weight.device, weight.dtype), alpha=-self.lr * factor(*part.matrix.shape, self._scale))
            _put(updated, weight, skip)
        self._rest.step(skip)

    def set_factor(self, factor: float) -> None:
        """Sets both learning rates to `factor` times their peaks."""
        self.lr = self._peak * factor
        self._rest.set_factor(factor)

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for tensor in self._named.values():
            tensor.grad = None
        self._rest.zero_grad()

    def trained(self) -> Sequence[NamedTensor]:
        """Returns the updated parameters, matrices first."""
        return [*self._matrices.named, *self._rest.trained()]

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns `momentum` of matrices and AdamW's state of all other parameters, by global name, sharded like the
        parameter."""
        return {"momentum": self._momentum, **self._rest.state()}


def factor(rows: int, columns: int, scale: Scale) -> float:
    """Returns the factor of the learning rate. `original`: sqrt(max(1, rows / columns)) (Jordan et al., 2024). `match_rms_adamw`:
    0.2 sqrt(max(rows, columns)), with which updates are as large as AdamW's (Liu et al., 2025)."""
    return sqrt(max(1, rows / columns)) if scale == "original" else 0.2 * sqrt(max(rows, columns))


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """Returns a matrix (rows, columns) with the singular vectors of `matrix` and singular values near 1, in its dtype.

    Runs `steps` iterations x <- a x + (b g + c g^2) x with g = x x^T, after dividing by the Frobenius norm (Jordan et al., 2024).
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # so that g is the smaller of the two products
    x = x / x.norm().clamp(min=SMALLEST)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x


def flops(rows: int, columns: int, steps: int) -> int:
    """Returns the number of multiplications and additions in `orthogonalized`: three matrix products per iteration."""
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)


def _put(new: Tensor, target: Tensor, skip: Tensor | None) -> None:
    """Copies `new` into `target`; if `skip` is 1, `target` keeps its bits."""
    target.copy_(new if skip is None else torch.where(skip.to(target.device) > 0, target, new))
