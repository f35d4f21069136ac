"""Draws follow the weights at every prefix; a weight of 0 is never drawn."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.errors import DataError
from forge_data.mixture import LONGEST_PERIOD, Mixture, shares_of

WEIGHTS = st.lists(st.integers(0, 60).map(lambda value: value / 10), min_size=1, max_size=9).filter(any)


@given(weights=WEIGHTS)
@settings(max_examples=60, deadline=None)
def test_deviation_stays_within_tijdemans_bound_at_every_prefix(weights: list[float]) -> None:
    mixture = Mixture(weights)
    samples = 2 * mixture.period + 3
    sources, draws = mixture.locate(np.arange(samples))
    count = sum(weight > 0 for weight in weights)
    bound = 1 - Fraction(1, 2 * count - 2) if count > 1 else Fraction(0)
    total = sum(Fraction(str(weight)) for weight in weights)
    for source, weight in enumerate(weights):
        drawn = np.cumsum(sources == source)
        share = Fraction(str(weight)) / total
        # |drawn - n * share| <= bound, in integers.
        n = np.arange(1, samples + 1)
        deviation = np.abs(drawn * share.denominator - n * share.numerator).max()
        assert deviation <= bound * share.denominator
        assert draws[sources == source].tolist() == list(range(int(drawn[-1])))  # each draw once, in order


@given(weights=WEIGHTS, sample=st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_positions_are_arithmetic(weights: list[float], sample: int) -> None:
    mixture = Mixture(weights)
    sources, draws = mixture.locate(np.array([sample]))
    source, draw = int(sources[0]), int(draws[0])
    assert weights[source] > 0
    before, after = mixture.draws(sample), mixture.draws(sample + 1)
    assert sum(before) == sample and before[source] == draw and after[source] == draw + 1
    assert mixture.sample_of(source, draw) == sample


def test_weights_are_read_as_they_are_written() -> None:
    assert shares_of([0.7, 0.3]) == (7, 3)
    assert shares_of([0.1, 0.2, 0]) == (1, 2, 0)
    assert shares_of([5]) == (1,)


def test_odd_weights_are_rounded_to_the_longest_period() -> None:
    weights = [0.123456789, 0.5, 1e-12, 0.0]
    shares = shares_of(weights)
    assert sum(shares) == LONGEST_PERIOD and shares[2] == 1 and shares[3] == 0
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share / LONGEST_PERIOD - weight / sum(weights)) < 2 / LONGEST_PERIOD


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("inf"), 1], [float("nan"), 1]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="weight"):
        Mixture(weights)
