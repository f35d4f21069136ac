"""Fits the law to runs, and again to many resamples of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from forge_core.errors import DataError
from forge_train.scaling.law import FLOPS, Law
from forge_train.scaling.minimize import Terms, minimize

FEWEST_RUNS = 6
"""Runs, one more than the law has constants."""
DISTINCT = 3
"""Parameter counts, and token counts: with two of either, E and the constants of that term cannot be told apart."""
_ALIKE = 0.99
"""Correlation of log N and log D from which on the two terms cannot be told apart."""

CHANCE = 0.05
"""Where a term lowers the objective no more than chance would do so often, it means nothing."""
_PERMUTATIONS = 59
_FEWER_STEPS = 120
"""Of the minimizations of one permutation, whose last digits do not matter."""
_ROUNDING = 1e-12
"""Of an objective: what losses in fp32 that follow a law exactly leave over."""

# Fractions of the lowest loss at which E starts, of the mean loss at which the terms do, and exponents.
_LEVELS, _TERMS, _POWERS = (0.2, 0.5, 0.8), (0.1, 0.4), (0.1, 0.3, 0.6, 1.0)


@dataclass(frozen=True)
class Losses:
    """What was observed: of n runs the parameters, tokens and losses, fp64 tensors of shape (n,)."""

    parameters: Tensor
    tokens: Tensor
    losses: Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, float]]) -> "Losses":
        """From (parameters, tokens, loss) of each run.

        Raises:
            DataError: too few runs, or parameters and tokens that do not vary enough to tell the constants apart.
        """
        columns = torch.tensor([tuple(map(float, row)) for row in rows], dtype=torch.float64).reshape(-1, 3).T
        made = cls(*columns)
        if faults := list(_faults(made)):
            raise DataError("a scaling law cannot be fitted: " + "; ".join(faults))
        return made

    @property
    def flops(self) -> Tensor:
        """C = 6 N D of each run."""
        return FLOPS * self.parameters * self.tokens


def _faults(given: Losses) -> list[str]:
    count, faults = len(given.losses), []
    if count < FEWEST_RUNS:
        faults.append(f"{count} runs, and {FEWEST_RUNS} are needed for the five constants")
    if bool((given.losses <= 0).any()) or not bool(torch.isfinite(given.losses).all()):
        faults.append("a loss is not a positive number")
    for what, values in (("parameters", given.parameters), ("tokens", given.tokens)):
        distinct = len(values.unique())
        if distinct < DISTINCT:
            said = f"all runs have the same number of {what}" if distinct < 2 else f"the runs have {distinct} numbers of {what}"
            faults.append(f"{said}, and {DISTINCT} different ones are needed")
    if not faults and _correlation(given) > _ALIKE:
        faults.append(
            "tokens grow in step with parameters, so their effects cannot be told apart: add runs with more or fewer tokens for "
            "the same parameters"
        )
    return faults


def _correlation(given: Losses) -> float:
    return abs(float(torch.corrcoef(torch.stack([given.parameters.log(), given.tokens.log()]))[0, 1]))


@dataclass(frozen=True)
class Fit:
    """The law of all runs, and those of `resamples` of as many runs, drawn with replacement.

    Attributes:
        objective: the Huber loss at the minimum, summed over runs.
        starts: of the minimization, and how many of them led to this minimum.
        chance: how often chance alone lowers the objective as much as the term of the parameters does, and that of the tokens.
    """

    law: Law
    resampled: tuple[Law, ...]
    objective: float
    starts: tuple[int, int]
    chance: tuple[float, float]


def fit(given: Losses, resamples: int = 1000, seed: int = 0) -> Fit:
    """Minimizes from a grid of starts; each resample from the minimum of all runs.

    Raises:
        DataError: the losses do not fall with parameters, or with tokens; a law without them fits as well; or a constant is no
            finite number.
    """
    middle = given.parameters.log().mean(), given.tokens.log().mean()
    inputs = [torch.zeros_like(given.losses), given.parameters.log() - middle[0], given.tokens.log() - middle[1]]
    terms, losses = Terms(torch.stack(inputs)), given.losses.log()
    start = _starts(given.losses)
    found, objectives = minimize(terms, losses.expand(len(start), -1), torch.ones(len(start), len(losses)).double(), start)
    objectives = torch.where(objectives.isfinite(), objectives, torch.inf)
    best = int(objectives.argmin())
    reached = int((objectives <= objectives[best] * (1 + 1e-6) + 1e-20).sum())
    law = _law(found[best], middle)
    for what, power in (("parameters", law.alpha), ("tokens", law.beta)):
        if not power > 0:
            raise DataError(f"a scaling law cannot be fitted: the losses do not fall with more {what} (exponent {power:.3g})")
    if not all(math.isfinite(value) for value in vars(law).values()):
        raise DataError(f"a scaling law cannot be fitted: its constants are no finite numbers ({law})")
    chance = chance_of(terms, losses, float(objectives[best]), seed)
    for what, often in zip(("parameters", "tokens"), chance, strict=True):
        if often > CHANCE:
            raise DataError(
                f"a scaling law cannot be fitted: a law without {what} fits the losses as well. Their term lowers the Huber loss "
                f"as much in {often:.0%} of {_PERMUTATIONS} permutations of what that law leaves over, and may in "
                f"{CHANCE:.0%}. Add runs whose {what} differ more, or runs that train longer"
            )
    weights = drawn(given, resamples, seed)
    again, _ = minimize(terms, losses.expand(resamples, -1), weights, found[best].expand(resamples, -1).contiguous())
    return Fit(law, tuple(_law(one, middle) for one in again), float(objectives[best]), (len(start), reached), chance)


def chance_of(terms: Terms, losses: Tensor, objective: float, seed: int) -> tuple[float, float]:
    """Of the parameters' term and of the tokens': how often what the law without it leaves over, dealt out to the runs anew,
    gains as much from it. The permutation test of Freedman and Lane (1983); the statistic is the ratio of both objectives, that
    of a likelihood ratio, and needs no assumption about the noise.

    Args:
        terms: of the law.
        losses: (n,) logarithms.
        objective: of the law at its minimum.
        seed: of the permutations.
    """
    generator, count = torch.Generator().manual_seed(seed), len(losses)
    orders = torch.stack([torch.randperm(count, generator=generator) for _ in range(_PERMUTATIONS)])
    found = []
    for place in (1, 2):
        rest = Terms(terms.inputs[[0, 3 - place]])
        without, least = _least(rest, losses.expand(1, -1), steps=2000)
        fitted = rest(without)[0]
        dealt = fitted + (losses - fitted)[0][orders]
        gains = (_least(rest, dealt)[1] + _ROUNDING) / (_least(terms, dealt)[1] + _ROUNDING)
        gain = (float(least) + _ROUNDING) / (objective + _ROUNDING)
        found.append((1 + int((gains >= gain).sum())) / (1 + _PERMUTATIONS))
    return found[0], found[1]


def _least(terms: Terms, losses: Tensor, steps: int = _FEWER_STEPS) -> tuple[Tensor, Tensor]:
    """(problems, 2 terms - 1) and (problems,): the minimum of each row of `losses`, from fewer starts than a law's."""
    level, powers = losses.exp().mean(-1), len(terms.inputs) - 1
    grid = [[math.log(0.6), *[math.log(0.2)] * powers, *each] for each in product((0.1, 1.0), repeat=powers)]
    start = torch.tensor(grid, dtype=torch.float64)
    shifted = start.repeat(len(losses), 1)
    shifted[:, : powers + 1] += level.log().repeat_interleave(len(start)).unsqueeze(1)
    rows = losses.repeat_interleave(len(start), 0)
    found, objectives = minimize(terms, rows, torch.ones_like(rows), shifted, steps)
    objectives = torch.where(objectives.isfinite(), objectives, torch.inf).view(len(losses), -1)
    least = objectives.min(-1)
    return found.view(len(losses), len(start), -1)[torch.arange(len(losses)), least.indices], least.values


def drawn(given: Losses, resamples: int, seed: int) -> Tensor:
    """(resamples, n) how often each run is in each resample: the bootstrap of Efron (1979) over runs. A resample that could not
    tell the constants apart is drawn again."""
    generator, count = torch.Generator().manual_seed(seed), len(given.losses)
    kept: list[Tensor] = []
    while len(kept) < resamples:
        chosen = torch.randint(count, (count,), generator=generator)
        runs = chosen.unique()
        several = min(len(given.parameters[runs].unique()), len(given.tokens[runs].unique())) >= DISTINCT
        if several and len(runs) >= FEWEST_RUNS - 1:
            kept.append(torch.bincount(chosen, minlength=count).double())
    return torch.stack(kept)


def _starts(losses: Tensor) -> Tensor:
    """(starts, 5): constants of E and both terms, then both exponents."""
    least, mean = float(losses.min()), float(losses.mean())
    grid = product(_LEVELS, _TERMS, _TERMS, _POWERS, _POWERS)
    rows = [[math.log(level * least), math.log(n * mean), math.log(d * mean), alpha, beta] for level, n, d, alpha, beta in grid]
    return torch.tensor(rows, dtype=torch.float64)


def _law(found: Tensor, middle: tuple[Tensor, Tensor]) -> Law:
    """The law in parameters and tokens themselves, not relative to their middle."""
    irreducible, a, b, alpha, beta = found
    made = irreducible.exp(), (a + alpha * middle[0]).exp(), (b + beta * middle[1]).exp(), alpha, beta
    return Law(*(float(value) for value in made))
