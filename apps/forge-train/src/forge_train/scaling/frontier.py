"""The least loss that was reached with so much compute, and a power law through it: L(C) = E' + k C^-gamma."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_train.scaling.fit import Losses, drawn
from forge_train.scaling.minimize import Terms, minimize

FEWEST_ON_FRONTIER = 4
"""Runs on the frontier, one more than the power law has constants."""


@dataclass(frozen=True)
class PowerLaw:
    """L(C) = irreducible + k C^-gamma, in nats per token and FLOPs."""

    irreducible: float
    k: float
    gamma: float

    def loss(self, flops: float) -> float:
        """L(C)."""
        return self.irreducible + self.k * flops**-self.gamma


@dataclass(frozen=True)
class Frontier:
    """The power law of all runs on the frontier, and those of resamples.

    Attributes:
        runs: indexes of the runs on the frontier, by compute.
    """

    law: PowerLaw
    resampled: tuple[PowerLaw, ...]
    runs: tuple[int, ...]


def on_frontier(flops: Tensor, losses: Tensor) -> list[int]:
    """Indexes of the runs that no run with as little compute beats, by compute."""
    order = sorted(range(len(losses)), key=lambda index: (float(flops[index]), float(losses[index])))
    found: list[int] = []
    for index in order:
        if not found or losses[index] < losses[found[-1]]:
            found.append(index)
    return found


def fit_frontier(given: Losses, resamples: int = 1000, seed: int = 0) -> Frontier | None:
    """As `forge_train.scaling.fit.fit`, of the runs on the frontier; each resample has a frontier too. None where
    the frontier has too few runs."""
    runs = on_frontier(given.flops, given.losses)
    if len(runs) < FEWEST_ON_FRONTIER:
        return None
    middle = given.flops.log().mean()
    terms = Terms(torch.stack([torch.zeros_like(given.losses), given.flops.log() - middle]))
    losses = given.losses.log()
    least, highest = float(given.losses.min()), float(given.losses.max())
    start = torch.tensor(
        [
            [math.log(level * least), math.log(part * highest), power]
            for level in (0.2, 0.5, 0.8, 0.95)
            for part in (0.1, 0.4)
            for power in (0.05, 0.15, 0.3, 0.6)
        ],
        dtype=torch.float64,
    )
    weights = _mask(runs, len(losses))
    found, objectives = minimize(terms, losses.expand(len(start), -1), weights.expand(len(start), -1), start)
    best = found[int(torch.where(objectives.isfinite(), objectives, torch.inf).argmin())]
    counts = drawn(given, resamples, seed)
    masks = [_frontier_of(given, one) for one in counts]
    usable = torch.stack([mask for mask in masks if mask.sum() >= FEWEST_ON_FRONTIER - 1] or [weights])
    again, _ = minimize(terms, losses.expand(len(usable), -1), usable, best.expand(len(usable), -1).contiguous())
    return Frontier(_power(best, middle), tuple(_power(one, middle) for one in again), tuple(runs))


def _frontier_of(given: Losses, count: Tensor) -> Tensor:
    present = torch.nonzero(count)[:, 0]
    inside = on_frontier(given.flops[present], given.losses[present])
    return _mask([int(present[index]) for index in inside], len(count))


def _mask(runs: list[int], count: int) -> Tensor:
    mask = torch.zeros(count, dtype=torch.float64)
    mask[runs] = 1.0
    return mask


def _power(found: Tensor, middle: Tensor) -> PowerLaw:
    irreducible, k, gamma = found
    return PowerLaw(float(irreducible.exp()), float((k + gamma * middle).exp()), float(gamma))
