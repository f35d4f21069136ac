"""The law and its optimum: closed forms against a search, and constants recovered from losses that were made with them."""

import itertools
import math

import pytest
import torch

from forge_core.errors import DataError
from forge_lab.scaling.law import (
    CHANCE,
    DELTA,
    Fit,
    Law,
    ObservedLosses,
    Terms,
    _least,
    _starts,
    chance_of,
    draw_resamples,
    fit,
    fit_frontier,
    huber,
    minimize,
    on_frontier,
)
from forge_lab.scaling.study import _warnings, interval
from harness.siblings import fast

CHINCHILLA = Law(irreducible=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28)
"""Hoffmann et al. (2022), equation 10."""
SIZES = [1e7 * 3**step for step in range(5)]
TOKENS = [2e8 * 3**step for step in range(6)]


def ladder(noise: float = 0.0, seed: int = 0, law: Law = CHINCHILLA, sizes: list = SIZES, tokens: list = TOKENS) -> list:
    """(N, D, loss) of every pair, with log-normal noise."""
    draws = torch.randn(len(sizes) * len(tokens), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pairs = itertools.product(sizes, tokens)
    return [(n, d, law.loss(n, d) * math.exp(noise * float(draw))) for (n, d), draw in zip(pairs, draws, strict=True)]


@pytest.mark.parametrize("flops", [1e15, 5.76e23])
def test_the_optimum_is_the_least_loss_of_a_search(flops: float) -> None:
    """A ternary search over log N of a function that has one minimum."""
    low, high = math.log(1e3), math.log(flops / 6 / 1e3)

    def loss(log_n: float) -> float:
        return CHINCHILLA.loss(math.exp(log_n), flops / 6 / math.exp(log_n))

    for _ in range(200):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    assert CHINCHILLA.best_parameters(flops) == pytest.approx(math.exp(low), rel=1e-5)
    assert CHINCHILLA.best_loss(flops) == pytest.approx(loss(low), rel=1e-12)
    assert 6 * CHINCHILLA.best_parameters(flops) * CHINCHILLA.best_tokens(flops) == pytest.approx(flops)


def test_the_optimum_is_the_closed_form_of_the_paper() -> None:
    a, b, alpha, beta = 406.4, 410.7, 0.34, 0.28
    g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    for flops in (1e18, 1e21, 1e24):
        assert CHINCHILLA.best_parameters(flops) == pytest.approx(g * (flops / 6) ** (beta / (alpha + beta)), rel=1e-12)
        assert CHINCHILLA.best_tokens(flops) == pytest.approx((flops / 6) ** (alpha / (alpha + beta)) / g, rel=1e-12)
    assert CHINCHILLA.parameters_exponent == pytest.approx(0.28 / 0.62)
    assert CHINCHILLA.tokens_exponent == pytest.approx(0.34 / 0.62)
    first, second = (CHINCHILLA.best_loss(flops) - 1.69 for flops in (1e20, 1e22))
    assert CHINCHILLA.loss_exponent == pytest.approx(math.log(first / second) / math.log(100), rel=1e-9)


def test_constants_are_recovered_without_noise() -> None:
    found = fit(ObservedLosses.of(ladder()), resamples=100).law
    for name in ("irreducible", "a", "b", "alpha", "beta"):
        assert getattr(found, name) == pytest.approx(getattr(CHINCHILLA, name), rel=1e-6), name


@pytest.mark.parametrize("law", [Law(0.5, 30.0, 900.0, 0.2, 0.35), Law(2.5, 5000.0, 50.0, 0.5, 0.2)])
def test_other_constants_are_recovered_too(law: Law) -> None:
    found = fit(ObservedLosses.of(ladder(law=law)), resamples=100).law
    assert vars(found) == pytest.approx(vars(law), rel=1e-5)


def test_a_run_that_went_wrong_hardly_matters() -> None:
    """The Huber loss takes it by its size, not by its square: least squares would move E by several per cent."""
    rows = ladder()
    rows[7] = (*rows[7][:2], 1.5 * rows[7][2])
    found = fit(ObservedLosses.of(rows), resamples=100).law
    assert vars(found) == pytest.approx(vars(CHINCHILLA), rel=2e-2)


def constants(law: Law) -> dict[str, float]:
    return vars(law) | {"a in N* ~ C^a": law.parameters_exponent, "N*": law.best_parameters(1e21), "D*": law.best_tokens(1e21)}


def inside(found: Fit) -> dict[str, bool]:
    """Whether the interval of each quantity has the true value."""
    drawn_values = [constants(law) for law in found.resampled]
    ends = {name: interval([values[name] for values in drawn_values]) for name in constants(CHINCHILLA)}
    return {name: ends[name][0] <= value <= ends[name][1] for name, value in constants(CHINCHILLA).items()}  # type: ignore[index]


def test_true_constants_are_inside_the_intervals_under_noise() -> None:
    assert all(inside(fit(ObservedLosses.of(ladder(0.005, seed=1)), resamples=400)).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "tokens"), [(SIZES, TOKENS), (SIZES[::2], TOKENS[::2] + TOKENS[5:])], ids=["30 runs", "12 runs"]
)
def test_intervals_cover_the_truth_as_often_as_they_say(sizes: list, tokens: list) -> None:
    """Over 60 ladders with 0.5 % noise, each 95 % interval has the true value 51 times or more: of 60 at 95 %, fewer have it with
    a chance below 1 in 1000."""
    counts = dict.fromkeys(constants(CHINCHILLA), 0)
    for seed in range(60):
        for name, hit in inside(
            fit(ObservedLosses.of(ladder(0.005, seed, sizes=sizes, tokens=tokens)), resamples=300, seed=seed)
        ).items():
            counts[name] += hit
    print(counts)
    assert min(counts.values()) >= 51, counts


def test_the_minimum_is_that_of_lbfgs() -> None:
    """torch's L-BFGS with a strong Wolfe search, as the paper fits it, on the same objective written down again."""
    rows = ladder(0.005, seed=3)
    n, d, losses = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    found = fit(ObservedLosses.of(rows), resamples=100)
    x, y = n.log() - n.log().mean(), d.log() - d.log().mean()
    at = torch.tensor([0.3, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([at], max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe")

    def objective() -> torch.Tensor:
        e, a, b, alpha, beta = at
        fitted = torch.logsumexp(torch.stack([a - alpha * x, b - beta * y, e.expand_as(x)]), 0)
        return torch.nn.functional.huber_loss(fitted, losses.log(), reduction="sum", delta=1e-3)

    def closure() -> torch.Tensor:
        solver.zero_grad()
        value = 1e4 * objective()
        value.backward()
        return value

    solver.step(closure)
    reference = at.detach()
    assert found.objective == pytest.approx(float(objective().detach()), rel=1e-6)
    assert found.law.alpha == pytest.approx(float(reference[3]), rel=1e-4)
    assert found.law.beta == pytest.approx(float(reference[4]), rel=1e-4)
    assert found.law.irreducible == pytest.approx(float(reference[0].exp()), rel=1e-4)
    assert found.starts[1] > found.starts[0] / 2, "most starts lead to the same minimum"


def test_the_huber_loss_is_torchs() -> None:
    residuals = torch.tensor([0.0, 5e-4, -1e-3, 3e-3, -2.0], dtype=torch.float64)
    expected = torch.nn.functional.huber_loss(residuals, torch.zeros(5).double(), reduction="none", delta=DELTA)
    weights = torch.tensor([1.0, 2.0, 3.0, 0.0, 1.0], dtype=torch.float64)
    assert float(huber(residuals, weights)) == pytest.approx(float((weights * expected).sum()), rel=1e-12)


def test_a_weight_is_a_run_that_often() -> None:
    """The minimum of a resample is that of the runs written down as often as they were drawn."""
    rows = ladder(0.01, seed=5)
    given = ObservedLosses.of(rows)
    weights = draw_resamples(given, 100, 3)[:3]
    terms = Terms(torch.stack([torch.zeros(30).double(), given.parameters.log() - 20, given.tokens.log() - 22]))
    start = _starts(given.losses)[:1].expand(3, -1)
    found, _ = minimize(terms, given.losses.log().expand(3, -1), weights, start)
    for index in range(3):
        often = [row for row, count in zip(range(30), weights[index], strict=True) for _ in range(int(count))]
        again = Terms(terms.inputs[:, often])
        alone, _ = minimize(again, given.losses.log()[often][None], torch.ones(1, 30).double(), start[:1])
        torch.testing.assert_close(found[index], alone[0], rtol=1e-3, atol=1e-3)


def test_resamples_are_seeded_and_can_tell_the_constants_apart() -> None:
    given = ObservedLosses.of(ladder())
    first = draw_resamples(given, 50, 0)
    assert torch.equal(first, draw_resamples(given, 50, 0)) and not torch.equal(first, draw_resamples(given, 50, 1))
    assert (first.sum(1) == 30).all()
    few = ObservedLosses.of(ladder(sizes=SIZES[:3], tokens=TOKENS[:3]))
    for counts in draw_resamples(few, 50, 0):
        runs = torch.nonzero(counts)[:, 0]
        assert len(few.parameters[runs].unique()) == len(few.tokens[runs].unique()) == 3 and len(runs) >= 5


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (ladder()[:1] + ladder()[7:8], "2 runs, but the five constants need 6"),
        (ladder(sizes=SIZES[:1]), "all runs have the same number of parameters"),
        (ladder(sizes=SIZES[:2]), "the runs have 2 numbers of parameters, but 3 different"),
        (ladder(tokens=TOKENS[:1]), "all runs have the same number of tokens"),
        (ladder(tokens=TOKENS[:2]), "the runs have 2 numbers of tokens"),
        (
            [(n, 20 * n, CHINCHILLA.loss(n, 20 * n)) for n in [1e6 * 2**i for i in range(8)]],
            "tokens grow in proportion to parameters",
        ),
        ([*ladder(), (1e9, 1e10, -1.0)], "not a positive number"),
        ([*ladder(), (1e9, 1e10, math.nan)], "not a positive number"),
    ],
)
def test_what_cannot_be_fitted(rows: list, words: str) -> None:
    with pytest.raises(DataError, match=words):
        ObservedLosses.of(rows)


def test_losses_that_do_not_fall_are_refused() -> None:
    rows = [(n, d, 2 + 10 / d**0.2 + 1e-3 * n**0.2) for n, d, _ in ladder()]
    with pytest.raises(DataError, match="do not fall with more parameters"):
        fit(ObservedLosses.of(rows), resamples=100)


@pytest.mark.parametrize("seed", fast(0, of=range(3)))
def test_trials_c7_losses_that_only_scatter_make_no_law(seed: int) -> None:
    draws = torch.randn(len(SIZES) * 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pairs = itertools.product(SIZES, TOKENS[::2])
    with pytest.raises(DataError, match="a scaling law cannot be fitted"):
        fit(
            ObservedLosses.of([(n, d, 5.5 + 0.02 * float(draw)) for (n, d), draw in zip(pairs, draws, strict=True)]),
            resamples=100,
        )


@pytest.mark.parametrize(("what", "place"), fast(("parameters", 1), of=[("parameters", 1), ("tokens", 0)]))
def test_trials_c7_a_law_that_does_as_well_without_a_term_is_refused(what: str, place: int) -> None:
    """Losses that fall with one of both; whichever sign the other's exponent happens to have, its term means nothing."""
    for seed in (None, 3):
        draws = torch.randn(30, generator=torch.Generator().manual_seed(seed or 0), dtype=torch.float64) * (seed is not None)
        rows = [(*row[:2], (2 + 10 / row[place] ** 0.2) * math.exp(0.005 * d)) for row, d in zip(ladder(), draws, strict=True)]
        with pytest.raises(DataError, match=f"do not fall with more {what}|a law without {what} fits the losses as well"):
            fit(ObservedLosses.of(rows), resamples=100)


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.02])
def test_a_true_law_is_never_taken_for_chance(noise: float) -> None:
    """Also of nine runs, and where one went wrong."""
    few = ladder(noise, 4, sizes=SIZES[::2], tokens=TOKENS[::2])
    wrong = [(n, d, loss * (1.2 if place == 7 else 1)) for place, (n, d, loss) in enumerate(ladder(noise, 5))]
    for rows in (few, wrong):
        assert max(fit(ObservedLosses.of(rows), resamples=100).chance) < CHANCE


@pytest.mark.slow
def test_the_chance_of_a_term_is_even_where_it_has_none() -> None:
    """Of many draws without any effect, about as many chances lie below a share as that share: what makes it a test."""
    log_n, log_d = (torch.tensor(values).log() for values in zip(*itertools.product(SIZES[:3], TOKENS[:3]), strict=True))
    terms = Terms(torch.stack([0 * log_n, log_n - log_n.mean(), log_d - log_d.mean()]).double())
    found = []
    for seed in range(12):
        losses = 1.7 + 0.01 * torch.randn(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found += chance_of(terms, losses, float(_least(terms, losses.expand(1, -1))[1]), seed)
    assert 0.3 < sum(found) / len(found) < 0.7 and sum(chance <= CHANCE for chance in found) <= 5  # of 24; more: 1 in 500


def test_a_law_without_a_finite_optimum_says_so() -> None:
    far, rising = Law(1, 1e5, 1, 1e-4, 1e-4), Law(1, 1, 1, 0.3, -0.1)
    for law in (far, rising, Law(1, 1, 1e-300, 1e-3, 1e-3), Law(1, 0, 1, 0.3, 0.3)):
        with pytest.raises(OverflowError, match="has no best size for 1e\\+20 FLOPs"):
            law.best_parameters(1e20)


def test_an_exponent_whose_interval_has_zero_is_named() -> None:
    given = {"alpha": {"value": 0.1, "low": -0.2, "high": 0.4}, "beta": {"value": 0.3, "low": 0.2, "high": 0.4}}
    (said,) = _warnings(given)
    assert "interval of alpha, -0.2 to 0.4, contains 0" in said


def test_the_frontier_is_what_no_cheaper_run_beats() -> None:
    flops = torch.tensor([1.0, 2.0, 2.0, 3.0, 4.0, 5.0])
    losses = torch.tensor([5.0, 4.0, 3.0, 3.5, 3.0, 2.0])
    assert on_frontier(flops, losses) == [0, 2, 5]


def test_the_power_law_of_the_best_sizes_is_that_of_the_law() -> None:
    """At the best sizes L*(C) = E + k C^-gamma exactly, with gamma = alpha beta / (alpha + beta)."""
    budgets = [1e18 * 4**step for step in range(8)]
    best = [(n := CHINCHILLA.best_parameters(c), c / 6 / n, CHINCHILLA.best_loss(c)) for c in budgets]
    worse = [(64 * n, d / 8, CHINCHILLA.loss(64 * n, d / 8)) for n, d, _ in best[:-2]]
    given = ObservedLosses.of([*best, *worse])
    found = fit_frontier(given, resamples=100)
    assert found is not None and len(found.runs) == 8
    assert found.law.gamma == pytest.approx(0.34 * 0.28 / 0.62, rel=1e-5)
    assert found.law.irreducible == pytest.approx(1.69, rel=1e-5)
    assert found.law.k == pytest.approx((CHINCHILLA.best_loss(1e20) - 1.69) * 1e20**CHINCHILLA.loss_exponent, rel=1e-4)
    assert found.law.loss(3e21) == pytest.approx(CHINCHILLA.best_loss(3e21), rel=1e-6)


def test_a_short_frontier_has_no_power_law() -> None:
    rows = [(n, d, 5.0 if (n, d) != (SIZES[0], TOKENS[0]) else 4.0) for n, d, _ in ladder()]
    assert fit_frontier(ObservedLosses.of(rows), resamples=100) is None


def test_percentiles_are_interpolated() -> None:
    values = [float(value) for value in torch.randperm(101, generator=torch.Generator().manual_seed(0))]
    assert interval(values, 0.9) == pytest.approx((5.0, 95.0))
    assert interval([3.0, math.inf, 1.0], 0.5) == pytest.approx((1.5, 2.5))
    assert interval([math.nan]) is None
