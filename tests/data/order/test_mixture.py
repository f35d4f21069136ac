"""Draws follow the weights at every prefix, exactly and for ever; a weight of 0 is never drawn."""

import math
from fractions import Fraction
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.errors import DataError
from forge_data.order.mixture import LONGEST_TABLE, Mixture, TableMixture, TreeMixture, floors, mixture_of
from forge_data.order.phases import shares_of, tempered

TENTHS = st.lists(st.integers(0, 60).map(lambda value: value / 10), min_size=1, max_size=9).filter(any)
WIDE = st.lists(st.just(0.0) | st.floats(-12, 0).map(lambda power: 10**power), min_size=1, max_size=12).filter(any)
SAMPLES = st.integers(0, 10**12) | st.integers(0, 50)
TEMPERATURES = st.sampled_from([1.0, 1.0, 2.0, 0.3, 3.7])


def deviations(mixture: Mixture, first: int, count: int) -> Fraction:
    """The largest |draws - samples * share| after each of the samples [first, first + count), counted one by one."""
    sources, draws = (found.tolist() for found in mixture.locate(np.arange(first, first + count)))
    drawn, largest = mixture.draws(first), 0
    for sample, (source, draw) in enumerate(zip(sources, draws, strict=True), first):
        assert draw == drawn[source]  # neither a gap nor a repetition
        drawn[source] += 1
        for count_of, share in zip(drawn, mixture.shares, strict=True):
            largest = max(largest, abs(count_of * mixture.period - (sample + 1) * share))
    assert drawn == mixture.draws(first + count) and sum(drawn) == first + count
    return Fraction(largest, mixture.period)


@given(weights=TENTHS)
@settings(max_examples=60, deadline=None)
def test_deviation_stays_within_tijdemans_bound_at_every_prefix(weights: list[float]) -> None:
    mixture = mixture_of(shares_of(weights))
    assert isinstance(mixture, TableMixture)
    total, count = sum(Fraction(str(weight)) for weight in weights), sum(weight > 0 for weight in weights)
    assert [Fraction(share, mixture.period) for share in mixture.shares] == [Fraction(str(w)) / total for w in weights]
    assert mixture.bound == (1 - Fraction(1, 2 * count - 2) if count > 1 else 0)
    assert deviations(mixture, 0, 2 * mixture.period + 3) <= mixture.bound < 1


@given(weights=WIDE, temperature=TEMPERATURES, first=SAMPLES)
@settings(max_examples=120, deadline=None)
def test_w7_any_weights_are_drawn_exactly_at_any_sample(weights: list[float], temperature: float, first: int) -> None:
    mixture = TreeMixture(shares_of(tempered(weights, temperature)))
    for weight, share in zip(weights, mixture.shares, strict=True):
        asked = (weight / max(weights)) ** (1 / temperature)
        assert float(Fraction(share, max(mixture.shares))) == pytest.approx(asked, rel=1e-13, abs=0)
    assert deviations(mixture, first, 40) <= mixture.bound < 1.68
    (source,), (draw,) = (found.tolist() for found in mixture.locate(np.array([first])))
    assert weights[source] > 0 and mixture.sample_of(source, draw) == first
    # The next draw of every source, however far away, is its draw and comes at no other sample.
    for source, draw in enumerate(mixture.draws(first)):
        if mixture.shares[source]:
            later = mixture.sample_of(source, draw)
            assert later >= first and mixture.draws(later)[source] == draw and mixture.draws(later + 1)[source] == draw + 1


class Merge:
    """The same order by definition: every node merges the draws of its two children by their virtual times."""

    def __init__(self, shares: list[int]) -> None:
        nodes: list[Any] = [(share, source, source) for source, share in enumerate(shares) if share]
        while len(nodes) > 1:
            light, heavy, *nodes = sorted(nodes, key=lambda node: node[:2])
            nodes.append((light[0] + heavy[0], 1000 - len(nodes), [light, heavy, 0, 0]))
        self.root = nodes[0]

    def start(self, node: Any, draws: int) -> None:
        """Goes to the state after so many draws of a node: every earlier draw has the earlier virtual time."""
        if isinstance(node[2], list):
            light, heavy = node[2][:2]
            node[2][2] = first = math.floor(Fraction(draws * light[0], node[0]) + Fraction(1, 2))
            node[2][3] = second = draws - first
            assert not first or Fraction(2 * first - 1, light[0]) <= Fraction(2 * second + 1, heavy[0])
            assert not second or Fraction(2 * second - 1, heavy[0]) < Fraction(2 * first + 1, light[0])
            self.start(light, first)
            self.start(heavy, second)

    def draw(self, node: Any) -> int:
        if not isinstance(node[2], list):
            return node[2]
        light, heavy, first, second = node[2]
        chosen = 0 if Fraction(2 * first + 1, light[0]) <= Fraction(2 * second + 1, heavy[0]) else 1
        node[2][2 + chosen] += 1
        return self.draw(node[2][chosen])


@given(weights=WIDE, temperature=TEMPERATURES, first=SAMPLES)
@settings(max_examples=40, deadline=None)
def test_w7_the_order_is_that_of_virtual_times(weights: list[float], temperature: float, first: int) -> None:
    mixture = TreeMixture(shares_of(tempered(weights, temperature)))
    merge = Merge(list(mixture.shares))
    merge.start(merge.root, first)
    assert mixture.locate(np.arange(first, first + 60))[0].tolist() == [merge.draw(merge.root) for _ in range(60)]


@given(shares=st.lists(st.integers(0, 12), min_size=2, max_size=7).filter(any))
@settings(max_examples=40, deadline=None)
def test_w7_small_shares_without_a_table_repeat_after_their_period(shares: list[int]) -> None:
    mixture = TreeMixture(shares)
    sources, draws = mixture.locate(np.arange(3 * mixture.period))
    assert np.bincount(sources[: mixture.period], minlength=len(shares)).tolist() == shares
    assert (sources.reshape(3, -1) == sources[: mixture.period]).all() and deviations(mixture, 0, 99) <= mixture.bound
    for source, share in enumerate(shares):
        assert draws[sources == source].tolist() == list(range(3 * share))


def test_w7_a_weight_of_one_in_ten_million_is_drawn_once() -> None:
    mixture = mixture_of(shares_of([1, 1e-7]))
    assert mixture.draws(10_000_000) == [9_999_999, 1] and mixture.draws(10**12)[1] == 100_000
    tiny = mixture_of(shares_of([1, 1e-12]))
    assert tiny.draws(10**12) == [10**12 - 1, 1] and tiny.sample_of(1, 0) == 5 * 10**11


@pytest.mark.parametrize("samples", [2_000_000, 10**9, 10**12])
def test_w7_a_temperature_does_not_drift(samples: int) -> None:
    """T = 2 against roots of 50 digits by integer arithmetic: doubles are off by 1e-16 of a share, and no more."""
    roots = [math.isqrt(weight * 10**100) for weight in (7, 2, 1)]
    mixture = mixture_of(shares_of(tempered([0.7, 0.2, 0.1], 2)))
    for drawn, root in zip(mixture.draws(samples), roots, strict=True):
        assert abs(drawn - samples * Fraction(root, sum(roots))) < 1 + samples * 2e-16


@pytest.mark.parametrize("samples", [2_000_000, 10**9 + 7, 10**12 - 1])
def test_w7_weights_of_many_digits_do_not_drift(samples: int) -> None:
    written = ["0.31415926535897", "0.27182818284590", "0.14142135623731", "0.0000000000123", "0.1", "0.17320508075688"]
    total = sum(map(Fraction, written))
    mixture = mixture_of(shares_of([float(weight) for weight in written]))
    for drawn, weight in zip(mixture.draws(samples), written, strict=True):
        assert abs(drawn - samples * Fraction(weight) / total) < 1.68


@given(weights=TENTHS, sample=st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_positions_are_arithmetic(weights: list[float], sample: int) -> None:
    mixture = mixture_of(shares_of(weights))
    sources, draws = mixture.locate(np.array([sample]))
    source, draw = int(sources[0]), int(draws[0])
    assert weights[source] > 0
    before, after = mixture.draws(sample), mixture.draws(sample + 1)
    assert sum(before) == sample and before[source] == draw and after[source] == draw + 1
    assert mixture.sample_of(source, draw) == sample


@pytest.mark.parametrize("kind", [TableMixture, TreeMixture])
def test_samples_may_be_asked_for_in_any_order(kind: type[TableMixture] | type[TreeMixture]) -> None:
    shares = shares_of([0.31, 0.2, 0.19, 0.3])
    asked = np.random.default_rng(0).integers(0, 10**6, 400)
    sources, draws = kind(shares).locate(asked)
    one = [kind(shares).locate(np.array([sample])) for sample in asked[:40]]
    assert [(int(s[0]), int(d[0])) for s, d in one] == list(zip(sources[:40].tolist(), draws[:40].tolist(), strict=True))
    assert all(len(found) == 0 for found in kind(shares).locate(np.array([], dtype=np.int64)))
    long = np.arange(50_000)[::-1]
    assert np.array_equal(kind(shares).locate(long)[1], kind(shares).locate(np.arange(50_000))[1][::-1])


@pytest.mark.parametrize("order", [("draws", "locate"), ("sample_of", "draws"), ("locate", "sample_of")])
def test_a_table_that_grows_is_that_of_the_whole_period(order: tuple[str, str]) -> None:
    shares = shares_of([0.40001, 0.3, 0.2, 0.09999])
    whole, grown = TableMixture(shares), TableMixture(shares)
    sources, draws = whole.locate(np.arange(whole.period))
    asked: dict[str, Any] = {
        "draws": lambda mixture: mixture.draws(33_333),
        "locate": lambda mixture: [found.tolist() for found in mixture.locate(np.array([20_000, 70_001, 5]))],
        "sample_of": lambda mixture: [mixture.sample_of(source, 7000) for source in range(4)],
    }
    for name in order:
        assert asked[name](grown) == asked[name](whole)
    assert asked["draws"](grown) == np.bincount(sources[:33_333], minlength=4).tolist()
    assert asked["sample_of"](grown) == [int(np.flatnonzero((sources == i) & (draws == 7000))[0]) for i in range(4)]


@pytest.mark.parametrize(
    ("weights", "digest"),
    [
        ([0.7, 0.2, 0.1], "aad3c192f762bcc9"),
        ([3, 1, 4, 1, 5, 9, 2, 6], "9204d7f153acdc84"),
        ([0.3277, 0.5, 0.1723], "1ed976701308777e"),
    ],
)
def test_the_order_of_short_periods_never_changes(weights: list[float], digest: str) -> None:
    """Checkpoints count on it: these are the orders of the first version."""
    mixture = mixture_of(shares_of(weights))
    sources, _ = mixture.locate(np.arange(mixture.period))
    assert sha256(sources.astype(np.uint8).tobytes()).hexdigest()[:16] == digest


@given(start=st.integers(0, 2**62), step=st.integers(1, 2**90), divisor=st.integers(1, 2**90), count=st.sampled_from([1, 2, 77]))
@settings(max_examples=200, deadline=None)
def test_floors_are_exact(start: int, step: int, divisor: int, count: int) -> None:
    if start // divisor < 2**31 and (start + (count - 1) * step) // divisor < 2**31:
        assert floors(start, step, divisor, count).tolist() == [(start + j * step) // divisor for j in range(count)]


@pytest.mark.parametrize("bits", [31, 32, 64, 96])
def test_trials_i_floors_are_exact_where_only_the_last_is_close_to_a_whole_number(bits: int) -> None:
    """Rounding errors add up over `count` results, so the fraction must have room for them beyond that of the divisor."""
    divisor, count = 2**bits - 5, 16_384
    step = divisor * 7 // 10
    start = (divisor - 1 - (count - 1) * step) % divisor  # the last fraction is (divisor - 1) / divisor
    assert floors(start, step, divisor, count).tolist() == [(start + j * step) // divisor for j in range(count)]


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_floors_are_exact_where_the_quotient_is_whole(count: int) -> None:
    divisor = 3**50
    for start, step in (
        (0, divisor),
        (divisor - 1, divisor),
        (divisor, 3 * divisor),
        (divisor - 1, divisor // 3),
        (0, divisor // 9),
    ):
        assert floors(start, step, divisor, count).tolist() == [(start + j * step) // divisor for j in range(count)]


def test_weights_are_read_as_they_are_written() -> None:
    assert shares_of([0.7, 0.3]) == (7, 3)
    assert shares_of([0.1, 0.2, 0]) == (1, 2, 0)
    assert shares_of([5]) == (1,)
    assert shares_of([Fraction(1, 3), 0.5]) == (2, 3)
    assert shares_of([0.123456789, 0.5, 1e-12, 0.0]) == (123456789000, 500000000000, 1, 0)


def test_the_longest_table_is_below_one_sample() -> None:
    at, above = shares_of([2**19 + 5, 3, 2**19 - 8]), shares_of([2**19 + 5, 4, 2**19 - 8])
    assert sum(at) == LONGEST_TABLE and isinstance(mixture_of(at), TableMixture) and isinstance(mixture_of(above), TreeMixture)


@given(numerator=st.integers(1, 2**10))
@settings(max_examples=50, deadline=None)
def test_powers_are_rounded_correctly(numerator: int) -> None:
    weight = numerator / 2**10  # its decimals and its square fit a double, and IEEE roots are correctly rounded
    assert tempered([1.0, weight, 0.0], 2) == (1.0, math.sqrt(weight), 0.0)
    assert tempered([1.0, weight, 0.0], 0.5) == (1.0, weight * weight, 0.0)


def test_powers_of_extreme_temperatures() -> None:
    assert tempered([1.0, 1e-12], 0.01) == (1.0, 0.0) and tempered([1e-12, 1.0], 1e300) == (1.0, 1.0)
    assert tempered([3e-12, 1e-12], 0.01) == (1.0, pytest.approx(3.0**-100, rel=1e-13, abs=0))
    assert tempered([3.0, 1.0], 1) == (3.0, 1.0) and tempered([0.0, 0.0], 2) == (0.0, 0.0)


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("inf"), 1], [float("nan"), 1], []])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="weight"):
        shares_of(weights)
