"""Fits a sum of power laws to losses: many starts, and many weightings of the runs, in one batch.

The objective is that of Hoffmann et al. (2022, approach 3): the Huber loss, with delta = 1e-3, of the residuals
log L(N, D) - log L, where log L(N, D) is the log-sum-exp of the terms. They minimized it by L-BFGS from a grid of starts. Here
each step solves the least-squares problem with the weights that make its gradient that of the Huber loss, damped as by Levenberg
and Marquardt: it takes every start and every weighting at once, and converges to the last digits, on which the exponents depend
(Besiroglu et al., 2024). A test compares it with torch's L-BFGS.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

DELTA = 1e-3
"""Residuals below count squared, those above by their size: a run that went wrong pulls no more than any other."""
_STEPS = 2000
_STILL = 12
"""Steps in a row with no gain to speak of, after which a problem is done."""
_GAIN = 1e-9


@dataclass(frozen=True)
class Terms:
    """log of a sum of terms exp(c - p x), for n runs.

    Attributes:
        inputs: (terms, n) logarithms of what each term falls with, zero for the constant; centered, so that c and p do not
            point in almost the same direction.
    """

    inputs: Tensor

    def __call__(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """(..., n) logarithms of the sum, and (..., n, terms) shares of the terms in it, for (..., 2 terms - 1) constants of all
        terms and powers of all but the first."""
        count = self.inputs.shape[0]
        powers = torch.cat([torch.zeros_like(at[..., :1]), at[..., count:]], -1)
        each = at[..., :count, None] - powers[..., None] * self.inputs
        return torch.logsumexp(each, -2), torch.softmax(each, -2).transpose(-1, -2)


def huber(residuals: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over the last dimension of r^2 / 2 within DELTA and of DELTA (|r| - DELTA / 2) outside."""
    size = residuals.abs()
    return (weights * torch.where(size <= DELTA, 0.5 * residuals**2, DELTA * (size - 0.5 * DELTA))).sum(-1)


@torch.no_grad()
def minimize(terms: Terms, losses: Tensor, weights: Tensor, start: Tensor, steps: int = _STEPS) -> tuple[Tensor, Tensor]:
    """(problems, 2 terms - 1) constants and powers, and (problems,) objectives, of the minimum that each start leads to.

    Args:
        terms: the first of them is the constant one, which has no power.
        losses: (problems, n) logarithms of what was observed.
        weights: (problems, n) of the runs.
        start: (problems, 2 terms - 1) constants of all terms, then powers of all but the first.
        steps: after which a problem ends in any case.
    """
    best, least = start.clone(), torch.empty_like(start[:, 0])
    left = torch.arange(start.shape[0])
    state = _begin(terms, losses, weights, start)
    for step in range(steps):
        state = _moved(terms, state)
        if step % _STILL == 0 or step == steps - 1:
            done = (state.still >= _STILL) | (step == steps - 1)
            best[left[done]], least[left[done]] = state.at[done], state.value[done]
            left, state = left[~done], state.only(~done)
            if not len(left):
                break
    return best, least


@dataclass(frozen=True)
class _State:
    """Where the problems stand that are not done; every tensor has one row for each of them."""

    losses: Tensor
    weights: Tensor
    at: Tensor
    residuals: Tensor
    shares: Tensor
    value: Tensor
    damping: Tensor
    still: Tensor

    def only(self, kept: Tensor) -> "_State":
        return replace(self, **{name: tensor[kept] for name, tensor in vars(self).items()})


def _begin(terms: Terms, losses: Tensor, weights: Tensor, start: Tensor) -> _State:
    fitted, shares = terms(start)
    residuals = fitted - losses
    value = huber(residuals, weights)
    return _State(losses, weights, start, residuals, shares, value, torch.full_like(value, 1e-2), torch.zeros_like(value))


def _moved(terms: Terms, state: _State) -> _State:
    """One step of every problem, taken where it lowers the objective; elsewhere the next one is shorter."""
    slopes = torch.cat([state.shares, -state.shares[..., 1:] * terms.inputs[1:].T], -1)
    pull = state.weights * torch.clamp(DELTA / state.residuals.abs().clamp_min(1e-300), max=1.0)
    curvature = slopes.transpose(-1, -2) @ (pull[..., None] * slopes)
    gradient = (slopes * (pull * state.residuals)[..., None]).sum(-2)
    scale = torch.diagonal(curvature, dim1=-2, dim2=-1).clamp_min(1e-30)
    damped = curvature + torch.diag_embed(state.damping[..., None] * scale)
    proposed = state.at - torch.linalg.solve_ex(damped, gradient[..., None])[0][..., 0]
    fitted, shares = terms(proposed)
    residuals = fitted - state.losses
    value = huber(residuals, state.weights)
    better = value < state.value  # false of NaN
    gained = better & (state.value - value > _GAIN * state.value)
    return replace(
        state,
        at=torch.where(better[:, None], proposed, state.at),
        residuals=torch.where(better[:, None], residuals, state.residuals),
        shares=torch.where(better[:, None, None], shares, state.shares),
        value=torch.where(better, value, state.value),
        damping=torch.where(better, state.damping / 5, state.damping * 3).clamp(1e-14, 1e8),
        still=torch.where(gained, torch.zeros_like(state.still), state.still + 1),
    )
