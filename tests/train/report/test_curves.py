"""Fewer points keep the extremes, gaps and ends of a curve; smoothing has means to begin from."""

import math
from array import array
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_train.report.curves import ALL_POINTS, FEWEST, POINTS, Series, limit, means, short, stretches, thin

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)), min_size=1, max_size=300)


@given(VALUES, st.integers(2, 40))
def test_each_part_keeps_its_extremes_its_first_gap_and_both_ends(values, most) -> None:
    kept = thin(array("d", values), most)
    assert kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == len(values) - 1
    if len(values) <= most:
        assert kept == list(range(len(values)))
        return
    parts = stretches(len(values), most)
    assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])] and parts[-1][1] == len(values)
    assert max(stop - start for start, stop in parts) - min(stop - start for start, stop in parts) <= 1
    gaps = 0
    for start, stop in parts:
        finite = [value for value in values[start:stop] if math.isfinite(value)]
        shown = [values[at] for at in kept if start <= at < stop]
        if finite:
            assert min(finite) in shown and max(finite) in shown
        assert (len(finite) < stop - start) == (not all(map(math.isfinite, shown)))
        gaps += len(finite) < stop - start
    assert len(kept) <= 2 * len(parts) + gaps + 2


def test_a_spike_in_a_million_steps_stays() -> None:
    values = [1.0] * 1_000_000
    values[543_210], values[700_001] = 99.0, -99.0
    kept = thin(array("d", values), POINTS)
    assert {543_210, 700_001} <= set(kept) and len(kept) <= POINTS + 2


@given(VALUES, st.integers(2, 40))
def test_means_are_those_of_the_parts(values, most) -> None:
    series = Series()
    for step, value in enumerate(values):
        series.add(3 * step, value)
    steps, found = means(series, most)
    expected = []
    for start, stop in stretches(len(values), most):
        finite = [at for at in range(start, stop) if math.isfinite(values[at])]
        if finite:
            expected.append((3 * fmean(finite), fmean(values[at] for at in finite)))
    assert steps == pytest.approx([step for step, _ in expected])
    assert found == pytest.approx([value for _, value in expected])


def test_numbers_are_short_and_what_json_lacks_is_a_gap() -> None:
    assert [short(value) for value in (2.3456789, 1e-9 / 3, 123456789.0, 5.0, math.nan, math.inf)] == [
        2.34568, 3.33333e-10, 123457000, 5, None, None,
    ]  # fmt: skip
    assert isinstance(short(5.0), int) and short(1e300) == 1e300


def test_many_curves_share_the_points_of_a_page() -> None:
    assert limit(1) == limit(0) == POINTS
    assert limit(200) == ALL_POINTS // 200
    assert limit(10_000) == FEWEST


def test_a_series_forgets_what_is_later() -> None:
    series = Series()
    for step in (1, 3, 5):
        series.add(step, float(step))
    series.add(5, -5.0)
    assert list(series.values) == [1.0, 3.0, -5.0]
    series.cut(3)
    assert list(series.steps) == [1, 3] and series.last == 3.0
    series.cut(0)
    assert math.isnan(series.last)
