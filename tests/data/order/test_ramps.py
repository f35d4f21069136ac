"""Ramps of weights: exact shares on every stair, and errors that do not add up over the stairs."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given as each
from hypothesis import settings
from hypothesis import strategies as st

from forge_data.components import RandomTokens
from forge_data.loading.sample_order import Timeline
from forge_data.order.mixture import ramp_draws
from forge_data.order.phases import STAIRS, intervals_of
from forge_data.section import Data, Phase


def data(weights: dict[str, float], *phases: Phase, **more: Any) -> Data:
    sources = [RandomTokens(vocab_size=9, label=label, weight=weight) for label, weight in weights.items()]
    return Data(sequence_length=16, sources=sources, phases=list(phases), **more)


def harmonic(count: int) -> Fraction:
    return sum((Fraction(1, number) for number in range(1, count + 1)), Fraction(0))


def asked_by_steps(data: Data, batch: int, steps: int) -> list[list[Fraction]]:
    """Samples that each source is due before every step of one ramp that begins at its first phase, step by step."""
    (phase,) = data.phases
    weights = [Fraction(str(getattr(source, "weight", None))) for source in data.sources]
    new = [Fraction(str(phase.weights.get(source.label, weight))) for source, weight in zip(data.sources, weights, strict=True)]  # type: ignore[attr-defined]
    found, total = [[Fraction(0)] * len(weights)], [sum(weights), sum(new)]
    stairs = min(STAIRS, phase.ramp)
    borders = [phase.start + phase.ramp * stair // stairs for stair in range(stairs)]
    for step in range(steps):
        if step < phase.start:
            way = Fraction(0)
        elif step >= phase.start + phase.ramp:
            way = Fraction(1)
        else:
            way = Fraction(2 * sum(border <= step for border in borders) - 1, 2 * stairs)
        shares = [w / total[0] * (1 - way) + n / total[1] * way for w, n in zip(weights, new, strict=True)]
        found.append([before + batch * share for before, share in zip(found[-1], shares, strict=True)])
    return found


@each(
    rates=st.lists(st.lists(st.integers(0, 30), min_size=2, max_size=8).filter(any), min_size=2, max_size=2),
    samples=st.lists(st.integers(1, 9), min_size=1, max_size=40),
)
@settings(max_examples=80, deadline=None)
def test_stretches_give_to_the_source_that_is_owed_most(rates: list[list[int]], samples: list[int]) -> None:
    count = min(map(len, rates))
    rates = [[*rate[: count - 1], 1] for rate in rates]
    owed = [Fraction(0)] * count
    for number, size in enumerate(samples):
        rate = rates[number % 2]
        owed = [debt + Fraction(size * share, sum(rate)) for debt, share in zip(owed, rate, strict=True)]
        found, left = ramp_draws(owed, size), list(owed)
        for _ in range(size):
            left[max(range(count), key=lambda i: left[i])] -= 1
        owed = [debt - samples for debt, samples in zip(owed, found, strict=True)]
        assert sum(found) == size and min(found) >= 0 and sorted(owed) == sorted(left)
        assert min(owed) > -1 and max(owed) <= harmonic(count) - 1


def test_a_stretch_that_is_shorter_than_its_debts_pays_the_largest() -> None:
    owed = [Fraction(tenths, 10) for tenths in (26, 12, 25, -9, -9, -9, -6)]
    assert ramp_draws(owed, 3) == [2, 0, 1, 0, 0, 0, 0]  # 2.6, 2.5, then 1.6
    assert ramp_draws([Fraction(-9, 10), Fraction(19, 10)], 1) == [0, 1]


def test_w7_a_source_with_less_than_half_a_sample_a_stair_is_drawn_in_a_ramp() -> None:
    """1 in 1,000 over 32 stairs of 80 samples: 2.56 draws are due; rounding in each stair alone gives none."""
    recipe = data({"web": 0.999, "rare": 0.001, "code": 0}, Phase(start=1, ramp=320, weights={"code": 0.999, "web": 0}))
    timeline = Timeline(intervals_of(recipe, 8), [None] * 3)
    first, last = timeline.first_of(1), timeline.first_of(321)
    assert timeline.draws(last)[1] - timeline.draws(first)[1] in (2, 3)
    assert timeline.planned(last)[1] - timeline.planned(first)[1] == Fraction(320 * 8, 1000)


@st.composite
def ramps(draw: Any) -> tuple[Data, int]:
    count = draw(st.integers(2, 6))
    weight = st.just(0.0) | st.integers(1, 9).map(lambda value: value / 10) | st.floats(-6, 0).map(lambda power: 10**power)
    old, new = (draw(st.lists(weight, min_size=count, max_size=count).filter(any)) for _ in range(2))
    labels = [f"s{index}" for index in range(count)]
    phase = Phase(start=draw(st.integers(1, 9)), ramp=draw(st.integers(1, 90)), weights=dict(zip(labels, new, strict=True)))
    return data(dict(zip(labels, old, strict=True)), phase), draw(st.sampled_from([1, 8, 50]))


@each(ramp=ramps())
@settings(max_examples=40, deadline=None)
def test_w7_ramps_are_exact_and_do_not_add_up_errors(ramp: tuple[Data, int]) -> None:
    recipe, batch = ramp
    (phase,), count = recipe.phases, len(recipe.sources)
    timeline = Timeline(intervals_of(recipe, batch), [None] * count)
    steps = phase.start + phase.ramp
    asked = asked_by_steps(recipe, batch, steps + 3)
    for step in (phase.start, phase.start + phase.ramp // 2, steps, steps + 3):
        assert list(timeline.planned(timeline.first_of(step))) == asked[step]
    first = timeline.first_of(phase.start)
    already = [drawn - due for drawn, due in zip(timeline.draws(first), asked[phase.start], strict=True)]
    borders = {segment.first for segment in timeline.segments}
    for step in range(phase.start, steps + 1):
        sample = timeline.first_of(step)
        found = zip(timeline.draws(sample), asked[step], already, strict=True)
        errors = [drawn - due - before for drawn, due, before in found]
        assert -0.68 - harmonic(count) < min(errors) and max(errors) < 2.68
        if sample in borders:
            assert 1 - harmonic(count) <= min(errors) and max(errors) < 1
    sources, draws = timeline.locate(np.arange(timeline.first_of(steps + 3)))
    for source in range(count):
        assert draws[sources == source].tolist() == list(range(int((sources == source).sum())))
    assert timeline.draws(len(sources)) == np.bincount(sources, minlength=count).tolist()
    drawn = {(source, draw) for source, draw in zip(sources[::5].tolist(), draws[::5].tolist(), strict=True)}
    assert {timeline.sample_of(*pair) for pair in drawn} == set(range(0, len(sources), 5))


def test_a_ramp_of_the_learning_rate_keeps_weights_and_order_and_brings_its_length() -> None:
    plain, weights = Timeline(intervals_of(data({"a": 3, "b": 1}), 8), [None] * 2), {"a": 3.0, "b": 1.0}
    ramped = intervals_of(data(weights, Phase(start=3, ramp=40, lr_scale=0.1, sequence_length=8)), 8)
    assert [(interval.step, interval.length, interval.weights) for interval in ramped] == [
        (0, 16, (3, 1)),
        (3, 8, (3, 1)),
        (43, 8, (3, 1)),
    ]
    timeline = Timeline(ramped, [None] * 2)
    assert np.array_equal(timeline.locate(np.arange(999))[0], plain.locate(np.arange(999))[0]) and len(timeline.segments) == 1


def test_a_ramp_owes_nothing_of_the_one_before() -> None:
    there, back = {"a": 0.1, "b": 0.57, "c": 0.33}, {"a": 0.61, "b": 0.26, "c": 0.13}
    both = Timeline(
        intervals_of(data(back, Phase(start=5, ramp=9, weights=there), Phase(start=50, ramp=7, weights=back)), 7), [None] * 3
    )
    second = Timeline(intervals_of(data(there, Phase(start=50, ramp=7, weights=back)), 7), [None] * 3)
    ramp = np.arange(50 * 7, 57 * 7)
    assert np.array_equal(both.locate(ramp)[0], second.locate(ramp)[0])


def test_a_ramp_between_equal_shares_has_no_stairs() -> None:
    intervals = intervals_of(data({"a": 1, "b": 1}, Phase(start=2, ramp=40, weights={"a": 0.5, "b": 0.5})), 8)
    assert [(interval.step, interval.weights, interval.stair) for interval in intervals] == [
        (0, (1, 1), False),
        (2, (1, 1), False),
        (42, (0.5, 0.5), False),
    ]


def test_a_source_that_is_used_up_on_a_stair_leaves_the_rest_to_the_others() -> None:
    recipe = data({"a": 0.5, "b": 0.3, "c": 0.2}, Phase(start=2, ramp=64, weights={"a": 0.1, "b": 0.7}))
    timeline = Timeline(intervals_of(recipe, 10), [150, None, 60])
    sources, draws = timeline.locate(np.arange(1000))
    assert np.bincount(sources).tolist() == [150, 790, 60] == timeline.draws(1000)
    assert draws[sources == 1].tolist() == list(range(790))
    assert timeline.sample_of(0, 150) is None and timeline.sample_of(0, 149) == int(np.flatnonzero(sources == 0)[-1])


def test_after_a_source_is_used_up_a_ramp_owes_nothing() -> None:
    """Inside a stair or, with some limits, right at its end."""
    recipe = data({"a": 0.53, "b": 0.29, "c": 0.18}, Phase(start=2, ramp=64, weights={"a": 0.11, "b": 0.71}))
    for cap in range(60, 80):
        timeline = Timeline(intervals_of(recipe, 10), [None, None, cap])
        cut = next(segment for segment in timeline.segments if segment.before[2] == cap)
        samples = next(segment.first for segment in timeline.segments if segment.first > cut.first) - cut.first
        due = [Fraction(samples * share, sum(cut.shares)) for share in cut.shares]
        assert cut.shares[2] == 0 and cut.mixture.shares == tuple(ramp_draws(due, samples))
        assert timeline.draws(2000)[2] == cap


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_long_stairs_and_temperatures_of_ramps_are_exact_too(temperature: float) -> None:
    """Stairs of 31 million samples."""
    recipe = data({"a": 0.9, "b": 0.1}, Phase(start=1, ramp=32, weights={"a": 0.1, "b": 0.9}))
    batch = 31_234_567
    timeline = Timeline(intervals_of(recipe, batch), [None] * 2, temperature)
    due, first = 0.0, timeline.first_of(1)
    for stair in range(STAIRS):
        a, b = (w ** (1 / temperature) for w in (0.9 - 0.8 * (stair + 0.5) / 32, 0.1 + 0.8 * (stair + 0.5) / 32))
        due += batch * a / (a + b)
        drawn = timeline.draws(timeline.first_of(stair + 2))[0] - timeline.draws(first)[0]
        assert abs(drawn - due) < 1 + 1e-4
    sources, _ = timeline.locate(np.arange(timeline.first_of(17) - 500, timeline.first_of(17) + 500))
    assert abs((sources == 0).sum() - 500) < 25
