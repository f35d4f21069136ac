"""Muon: momentum of hidden matrices, orthogonalized by Newton-Schulz (Jordan et al., 2024); AdamW for all other parameters.

Polar Express (Amsel et al., 2025) orthogonalizes with another polynomial in each iteration. NorMuon (Li et al., 2025) then
divides each row, the weights of one neuron, by the root of a running mean of its squares, and keeps the norm of the matrix.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from forge_core.errors import PlanError
from forge_core.protocols.model import LaidOutModel, NamedTensor
from forge_parallel.optim.elementwise import AdamW
from forge_parallel.optim.groups import HasTorchView
from forge_parallel.optim.whole_matrices import Part, WholeMatrices, row_state

Scale = Literal["original", "match_rms_adamw"]

Coefficients = Literal["original", "polar_express"]

ORIGINAL = ((3.4445, -4.7750, 2.0315),)
"""Coefficients of a x + b x^3 + c x^5, which is steep at 0 and maps values up to 1 close to 1 (Jordan et al., 2024)."""

POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""Coefficients of each iteration; the last ones are those of all later iterations. Each polynomial has the smallest possible
maximum distance from 1 on the interval to which those before it map singular values of 0.001 to 1 (Amsel et al., 2025, appendix
G)."""

MARGIN = 1.01
"""Factor by which singular values may exceed their interval in 16 bits, in all iterations of Polar Express but the last of the
table."""

POLYNOMIALS: dict[Coefficients, tuple[tuple[float, float, float], ...]] = {
    "original": ORIGINAL,
    "polar_express": (*((a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in POLAR_EXPRESS[:-1]), POLAR_EXPRESS[-1]),
}

NEURON_EPS = 1e-10
"""Added to roots and norms of NorMuon, so that rows of zeros stay zero."""

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
        coefficients: Coefficients = "original",
        neuron_beta: float | None = None,
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
        # fp64 matrices are never rounded to a narrower dtype, so that layouts can be compared.
        self._dtype = torch.float64 if torch.float64 in formats else precision
        # A mean of squares travels bit by bit: in 16 bits it would not follow small changes.
        self._wide = torch.promote_types(self._dtype, torch.float32)
        self._row_values = 0 if neuron_beta is None else self._wide.itemsize // self._dtype.itemsize
        self._matrices = WholeMatrices(model, cost=lambda rows, columns: flops(rows, columns, steps), row_values=self._row_values)
        self._named = {name: tensor for name, tensor, _ in self._matrices.named}
        self._momentum = {
            name: torch.zeros_like(tensor, memory_format=torch.preserve_format) for name, tensor in self._named.items()
        }
        wide = {} if neuron_beta is None else self._named
        self._neurons = {name: row_state(tensor, self._wide) for name, tensor in wide.items()}
        self._coefficients: Coefficients = coefficients
        self._neuron_beta = neuron_beta
        self._rest = AdamW(_Rest(self._matrices.rest), adamw_lr, adamw_betas, adamw_eps, weight_decay)
        self._peak, self.lr = lr, lr
        self._decay, self._mu, self._nesterov, self._steps = weight_decay, momentum, nesterov, steps
        self._scale: Scale = scale

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

        def given(part: Part) -> Tensor:
            if self._neuron_beta is None:
                return direction(part)
            mean = part.rows_of(self._neurons[part.name])
            return torch.cat((direction(part).to(self._dtype), mean.contiguous().view(self._dtype)), dim=-1)

        for part, update in self._matrices.each(given, self._worked, self._dtype):
            tensor = self._named[part.name]
            if tensor.grad is None:
                continue
            if self._neuron_beta is not None:
                update, mean = update[..., : -self._row_values], update[..., -self._row_values :]
                held = part.rows_of(self._neurons[part.name])
                _put(mean.to(held.device).contiguous().view(self._wide), held, skip)
            weight = part.of(tensor)
            updated = weight * (1 - self.lr * self._decay)
            updated.add_(update.to(weight.device, weight.dtype), alpha=-self.lr * factor(*part.matrix.shape, self._scale))
            _put(updated, weight, skip)
        self._rest.step(skip)

    def _worked(self, matrix: Tensor) -> Tensor:
        """Returns the update of a matrix, of norm sqrt(min(rows, columns)) or so, with the new mean squares of its rows."""
        columns = matrix.shape[1] - self._row_values
        made = orthogonalized(matrix[:, :columns], self._steps, self._coefficients)
        if self._neuron_beta is None:
            return made
        mean = matrix[:, columns:].contiguous().view(self._wide)
        made, mean = normalized_neurons(made.to(self._wide), mean, self._neuron_beta)
        return torch.cat((made.to(self._dtype), mean.view(self._dtype)), dim=1)

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
        """Returns `momentum` of matrices, with NorMuon `neurons` (..., rows, 1), and AdamW's state of all other parameters, by
        global name, sharded like the parameter."""
        neurons = {} if self._neuron_beta is None else {"neurons": self._neurons}
        return {"momentum": self._momentum, **neurons, **self._rest.state()}


def factor(rows: int, columns: int, scale: Scale) -> float:
    """Returns the factor of the learning rate. `original`: sqrt(max(1, rows / columns)) (Jordan et al., 2024). `match_rms_adamw`:
    0.2 sqrt(max(rows, columns)), with which updates are as large as AdamW's (Liu et al., 2025)."""
    return sqrt(max(1, rows / columns)) if scale == "original" else 0.2 * sqrt(max(rows, columns))


def orthogonalized(matrix: Tensor, steps: int, coefficients: Coefficients = "original") -> Tensor:
    """Returns a matrix (rows, columns) with the singular vectors of `matrix` and singular values near 1, in its dtype.

    Runs `steps` iterations x <- a x + (b g + c g^2) x with g = x x^T, after dividing by the Frobenius norm (Jordan et al., 2024).
    The a, b and c of Polar Express differ from one iteration to the next.
    """
    polynomials = POLYNOMIALS[coefficients]
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # so that g is the smaller of the two products
    x = x / ((MARGIN if coefficients == "polar_express" else 1.0) * x.norm()).clamp(min=SMALLEST)
    for step in range(steps):
        a, b, c = polynomials[min(step, len(polynomials) - 1)]
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def normalized_neurons(matrix: Tensor, mean: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Divides each row of a matrix (rows, columns) by the root of its mean square, a running mean with decay `beta`, and restores
    the norm of the matrix (Li et al., 2025). Returns the matrix and the new mean squares (rows, 1); `mean` are those before."""
    mean = torch.lerp(mean, matrix.square().mean(1, keepdim=True), 1 - beta)
    made = matrix / (mean.sqrt() + NEURON_EPS)
    return made * (matrix.norm() / (made.norm() + NEURON_EPS)), mean


def flops(rows: int, columns: int, steps: int) -> int:
    """Returns the number of multiplications and additions in `orthogonalized`: three matrix products per iteration."""
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)


def _put(new: Tensor, target: Tensor, skip: Tensor | None) -> None:
    """Copies `new` into `target`; if `skip` is 1, `target` keeps its bits."""
    target.copy_(new if skip is None else torch.where(skip.to(target.device) > 0, target, new))
