"""Slow ranks among noisy times: those are named which are slow again and again, and no others."""

import random

import pytest

from forge_train.hooks.stragglers import MOST, WINDOWS, Slow, SlowRanks, Time


def equal(size: int, own: float = 1.0, **other: float) -> list[Time]:
    """Ranks that take the same, but for those that are given: `r2=2.0`."""
    return [Time(other.get(f"r{rank}", own), max(own, *other.values(), 0.0)) for rank in range(size)]


def test_fault_36_a_rank_that_takes_twice_as_long_is_named_in_its_third_window() -> None:
    found = SlowRanks()
    assert [found.take(equal(4, r2=2.0)) for _ in range(4)] == [[], [], [Slow(2, 2.0, 1.0)], []]
    assert found.named == {2} and MOST == 3


def test_fault_36_one_of_two_ranks_is_named_and_never_the_other() -> None:
    found = SlowRanks()
    seen = [slow for _ in range(WINDOWS) for slow in found.take(equal(2, r0=1.6))]
    assert seen == [Slow(0, 1.6, 1.0)]


def test_a_rank_is_named_until_it_was_as_fast_as_the_others_for_all_windows() -> None:
    found = SlowRanks()
    for _ in range(3):
        found.take(equal(4, r1=3.0))
    assert [found.take(equal(4)) for _ in range(WINDOWS)] == [[], [], [], [], [Slow(1, 1.0, 1.0, over=True)]]
    assert found.named == set()


def test_slow_windows_that_are_rare_name_none() -> None:
    found = SlowRanks()
    for window in range(100):
        assert found.take(equal(8, **({"r3": 9.0} if window % WINDOWS in (0, 1) else {}))) == []


def test_what_is_below_the_ratio_or_the_scatter_or_does_not_matter_names_none() -> None:
    for times in (
        equal(4, r2=1.49),
        [Time(own, 4.0) for own in (1.0, 2.0, 3.0, 4.0)],  # all differ: 4 is 1.3 times the median of the others by their scatter
        [Time(own, 10.0) for own in (0.1, 0.1, 0.1, 0.9)],  # nine times as long, of a step that takes ten
        equal(1),
    ):
        found = SlowRanks()
        assert [found.take(times) for _ in range(WINDOWS)] == [[]] * WINDOWS
    coarse = SlowRanks(resolution=0.02)
    assert [coarse.take([Time(own, 0.02) for own in (0.004, 0.004, 0.02)]) for _ in range(WINDOWS)] == [[]] * WINDOWS


def test_only_ranks_that_do_the_same_work_are_compared() -> None:
    times = [Time(own, 3.0, stage) for own, stage in ((1.0, "a"), (3.0, "b"), (1.0, "a"), (3.0, "b"), (2.0, "c"))]
    found = SlowRanks()
    assert [found.take(times) for _ in range(WINDOWS)] == [[]] * WINDOWS
    times[3] = Time(5.0, 5.0, "b")
    assert [found.take(times) for _ in range(3)][-1] == [Slow(3, 5.0, 3.0)]


@pytest.mark.parametrize("size", [2, 3, 4, 16, 64])
def test_fault_36_a_thousand_noisy_clean_steps_name_none(size: int) -> None:
    """Log-normal times of a fifth, and one step in fifty that takes ten times as long, as medians of windows of 20."""
    draw, found = random.Random(size), SlowRanks()
    for _ in range(1000 // 20):
        steps = [[draw.lognormvariate(0.0, 0.2) * (10 if draw.random() < 0.02 else 1) for _ in range(20)] for _ in range(size)]
        assert found.take([Time(sorted(each)[10], 1.5) for each in steps]) == []
