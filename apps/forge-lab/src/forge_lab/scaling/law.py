"""The scaling law L(N, D) = E + A/N^alpha + B/D^beta, its fit to runs with resamples, and the frontier of compute.

The objective is that of Hoffmann et al. (2022, approach 3): the Huber loss, with delta = 1e-3, of the residuals
log L(N, D) - log L, where log L(N, D) is the log-sum-exp of the terms. They minimized it by L-BFGS from a grid of starts. Here
each step solves the least-squares problem with the weights that make its gradient that of the Huber loss, damped as by Levenberg
and Marquardt. It takes all starts and all weightings of the runs in one batch, and converges to the last digits, on which the
exponents depend (Besiroglu et al., 2024). A test compares it with torch's L-BFGS.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from forge_core.errors import DataError

_LARGEST = math.log(1e300)
FLOPS = 6
"""FLOPs of forward and backward per parameter and token: the compute of a run is C = 6 N D."""


@dataclass(frozen=True)
class Law:
    """Constants of the law; losses in nats per token. In the formulas, N is the number of parameters and D of tokens.

    Attributes:
        irreducible: E, the irreducible loss.
        a, alpha: A and alpha of the parameter term.
        b, beta: B and beta of the token term.
    """

    irreducible: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """L(N, D)."""
        return self.irreducible + self.a / parameters**self.alpha + self.b / tokens**self.beta

    @property
    def parameters_exponent(self) -> float:
        """a in N*(C) ~ C^a: beta / (alpha + beta)."""
        return self.beta / (self.alpha + self.beta)

    @property
    def tokens_exponent(self) -> float:
        """b in D*(C) ~ C^b: alpha / (alpha + beta)."""
        return self.alpha / (self.alpha + self.beta)

    @property
    def loss_exponent(self) -> float:
        """gamma in L*(C) - E ~ C^-gamma: alpha beta / (alpha + beta)."""
        return self.alpha * self.beta / (self.alpha + self.beta)

    def best_parameters(self, flops: float) -> float:
        """N*(C) = G (C / 6)^a with G = (alpha A / (beta B))^(1 / (alpha + beta)): minimizes the loss for C = 6 N D.

        Raises:
            OverflowError: N*(C) is not a positive finite number, for example if a term does not fall.
        """
        terms = self.alpha * self.a, self.beta * self.b
        if min(*terms, self.alpha, self.beta) > 0 and max(terms) < math.inf:
            power = math.log(terms[0]) - math.log(terms[1]) + self.beta * math.log(flops / FLOPS)
            if abs(power := power / (self.alpha + self.beta)) < _LARGEST:
                return math.exp(power)
        raise OverflowError(f"the law has no best size for {flops:g} FLOPs that is a finite number: {self}")

    def best_tokens(self, flops: float) -> float:
        """D*(C) = C / (6 N*(C))."""
        return flops / (FLOPS * self.best_parameters(flops))

    def best_loss(self, flops: float) -> float:
        """Returns the lowest loss that C FLOPs can reach."""
        return self.loss(self.best_parameters(flops), self.best_tokens(flops))


DELTA = 1e-3
"""Threshold of the Huber loss: smaller residuals are squared and larger ones are linear, which limits the pull of an outlier."""
_STEPS = 2000
_STILL = 12
"""Number of consecutive steps without notable gain after which a problem is done."""
_GAIN = 1e-9


@dataclass(frozen=True)
class Terms:
    """Logarithm of a sum of terms exp(c - p x), for n runs.

    Attributes:
        inputs: (terms, n) x of each term, the logarithm of parameters, tokens or compute; zero for the constant term. Centered,
            so that c and p are not nearly collinear.
    """

    inputs: Tensor

    def __call__(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the (..., n) logarithm of the sum and the (..., n, terms) shares of the terms in it. `at` has shape
        (..., 2 terms - 1): the constants of all terms, then the powers of all but the first."""
        count = self.inputs.shape[0]
        powers = torch.cat([torch.zeros_like(at[..., :1]), at[..., count:]], -1)
        each = at[..., :count, None] - powers[..., None] * self.inputs
        return torch.logsumexp(each, -2), torch.softmax(each, -2).transpose(-1, -2)


def huber(residuals: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted sum over the last dimension of r^2 / 2 within DELTA and of DELTA (|r| - DELTA / 2) outside."""
    size = residuals.abs()
    return (weights * torch.where(size <= DELTA, 0.5 * residuals**2, DELTA * (size - 0.5 * DELTA))).sum(-1)


@torch.no_grad()
def minimize(terms: Terms, losses: Tensor, weights: Tensor, start: Tensor, steps: int = _STEPS) -> tuple[Tensor, Tensor]:
    """Returns the minimum that each start leads to: (problems, 2 terms - 1) constants and powers, and (problems,) objectives.

    Args:
        terms: terms of the law; the first is the constant one, which has no power.
        losses: (problems, n) logarithms of the observed losses.
        weights: (problems, n) weights of the runs.
        start: (problems, 2 terms - 1) constants of all terms, then powers of all but the first.
        steps: maximum number of steps.
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
    """State of the problems that are not done; every tensor has one row per problem."""

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
    """Takes one step of every problem if it lowers the objective; otherwise keeps the position and raises the damping."""
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


FEWEST_RUNS = 6
"""Minimum number of runs, one more than the law has constants."""
DISTINCT = 3
"""Minimum number of distinct parameter counts, and of token counts: two do not identify E and the constants of the term."""
_ALIKE = 0.99
"""Correlation of log N and log D from which the two terms are not identifiable."""

CHANCE = 0.05
"""Significance level of the permutation test; a term with a higher p-value is refused."""
_PERMUTATIONS = 59
_FEWER_STEPS = 120
"""Maximum number of steps for one permutation, where the last digits do not matter."""
_ROUNDING = 1e-12
"""Objective that fp32 rounding leaves for losses that follow a law exactly."""

# Grid of starts: E as fractions of the lowest loss, the terms as fractions of the mean loss, and the exponents.
_LEVELS, _TERMS, _POWERS = (0.2, 0.5, 0.8), (0.1, 0.4), (0.1, 0.3, 0.6, 1.0)


@dataclass(frozen=True)
class ObservedLosses:
    """Parameters, tokens and losses of n runs, as fp64 tensors of shape (n,)."""

    parameters: Tensor
    tokens: Tensor
    losses: Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, float]]) -> "ObservedLosses":
        """Builds the tensors from (parameters, tokens, loss) of each run.

        Raises:
            DataError: the runs are too few, or parameters and tokens vary too little to identify the constants.
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


def _faults(given: ObservedLosses) -> list[str]:
    count, faults = len(given.losses), []
    if count < FEWEST_RUNS:
        faults.append(f"{count} runs, but the five constants need {FEWEST_RUNS}")
    if bool((given.losses <= 0).any()) or not bool(torch.isfinite(given.losses).all()):
        faults.append("a loss is not a positive number")
    for what, values in (("parameters", given.parameters), ("tokens", given.tokens)):
        distinct = len(values.unique())
        if distinct < DISTINCT:
            said = f"all runs have the same number of {what}" if distinct < 2 else f"the runs have {distinct} numbers of {what}"
            faults.append(f"{said}, but {DISTINCT} different ones are needed")
    if not faults and _correlation(given) > _ALIKE:
        faults.append(
            "tokens grow in proportion to parameters, so their effects cannot be separated: add runs with more or fewer tokens "
            "for the same parameters"
        )
    return faults


def _correlation(given: ObservedLosses) -> float:
    return abs(float(torch.corrcoef(torch.stack([given.parameters.log(), given.tokens.log()]))[0, 1]))


@dataclass(frozen=True)
class Fit:
    """The law fitted to all runs, and the laws fitted to bootstrap resamples of the runs.

    Attributes:
        objective: Huber loss at the minimum, summed over runs.
        starts: number of starts of the minimization, and number of those that reached this minimum.
        chance: p-values of the parameter term and of the token term (see `chance_of`).
    """

    law: Law
    resampled: tuple[Law, ...]
    objective: float
    starts: tuple[int, int]
    chance: tuple[float, float]


def fit(given: ObservedLosses, resamples: int = 1000, seed: int = 0) -> Fit:
    """Fits the law from a grid of starts; each resample starts from the minimum of all runs.

    Raises:
        DataError: the losses do not fall with parameters or with tokens, a law without one of them fits as well, or a constant is
            not finite.
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
        raise DataError(f"a scaling law cannot be fitted: its constants are not finite ({law})")
    chance = chance_of(terms, losses, float(objectives[best]), seed)
    for what, often in zip(("parameters", "tokens"), chance, strict=True):
        if often > CHANCE:
            raise DataError(
                f"a scaling law cannot be fitted: a law without {what} fits the losses as well. In {often:.0%} of "
                f"{_PERMUTATIONS} permutations of its residuals, the term of {what} lowers the Huber loss as much as in the "
                f"data; at most {CHANCE:.0%} are allowed. Add runs whose {what} differ more, or runs that train longer"
            )
    weights = draw_resamples(given, resamples, seed)
    again, _ = minimize(terms, losses.expand(resamples, -1), weights, found[best].expand(resamples, -1).contiguous())
    return Fit(law, tuple(_law(one, middle) for one in again), float(objectives[best]), (len(start), reached), chance)


def chance_of(terms: Terms, losses: Tensor, objective: float, seed: int) -> tuple[float, float]:
    """Returns the p-values of the parameter term and of the token term, by the permutation test of Freedman and Lane (1983).

    The residuals of the law without the term are permuted over the runs; the p-value is the fraction of permutations in which the
    term helps as much as in the data. The statistic is the ratio of the two objectives, as in a likelihood-ratio test, and needs
    no assumption about the noise.

    Args:
        terms: terms of the law.
        losses: (n,) logarithms of the losses.
        objective: objective of the law at its minimum.
        seed: seed of the permutations.
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
    """Returns the (problems, 2 terms - 1) minimum and (problems,) objective of each row of `losses`, from fewer starts than
    `fit`."""
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


def draw_resamples(given: ObservedLosses, resamples: int, seed: int) -> Tensor:
    """Returns (resamples, n) counts of each run in each bootstrap resample (Efron, 1979). A resample that does not identify the
    constants is drawn again."""
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
    """Returns the (starts, 5) grid of starts: constants of E and both terms, then both exponents."""
    least, mean = float(losses.min()), float(losses.mean())
    grid = product(_LEVELS, _TERMS, _TERMS, _POWERS, _POWERS)
    rows = [[math.log(level * least), math.log(n * mean), math.log(d * mean), alpha, beta] for level, n, d, alpha, beta in grid]
    return torch.tensor(rows, dtype=torch.float64)


def _law(found: Tensor, middle: tuple[Tensor, Tensor]) -> Law:
    """Returns the law in uncentered parameters and tokens."""
    irreducible, a, b, alpha, beta = found
    made = irreducible.exp(), (a + alpha * middle[0]).exp(), (b + beta * middle[1]).exp(), alpha, beta
    return Law(*(float(value) for value in made))


FEWEST_ON_FRONTIER = 4
"""Minimum number of runs on the frontier, one more than the power law has constants."""


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
    """The power law fitted to the runs on the frontier, and the laws fitted to resamples.

    Attributes:
        runs: indexes of the runs on the frontier, sorted by compute.
    """

    law: PowerLaw
    resampled: tuple[PowerLaw, ...]
    runs: tuple[int, ...]


def on_frontier(flops: Tensor, losses: Tensor) -> list[int]:
    """Returns the indexes of the Pareto-optimal runs, by compute: no run with the same or less compute has a lower loss."""
    order = sorted(range(len(losses)), key=lambda index: (float(flops[index]), float(losses[index])))
    found: list[int] = []
    for index in order:
        if not found or losses[index] < losses[found[-1]]:
            found.append(index)
    return found


def fit_frontier(given: ObservedLosses, resamples: int = 1000, seed: int = 0) -> Frontier | None:
    """Fits the power law to the runs on the frontier, as `fit` does for the law; each resample has its own frontier. Returns None
    if the frontier has too few runs."""
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
    counts = draw_resamples(given, resamples, seed)
    masks = [_frontier_of(given, one) for one in counts]
    usable = torch.stack([mask for mask in masks if mask.sum() >= FEWEST_ON_FRONTIER - 1] or [weights])
    again, _ = minimize(terms, losses.expand(len(usable), -1), usable, best.expand(len(usable), -1).contiguous())
    return Frontier(_power(best, middle), tuple(_power(one, middle) for one in again), tuple(runs))


def _frontier_of(given: ObservedLosses, count: Tensor) -> Tensor:
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
