"""Phases, ramps and epochs as arithmetic, against counting one sample after the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forge_core.errors import ConfigError
from forge_data.components import RandomTokens
from forge_data.loading.sample_order import Timeline
from forge_data.order.phases import STAIRS, PhaseInterval, faults_of, intervals_of, lr_scale_at, refuse_faults, tempered
from forge_data.section import Data, Phase

SHARES = st.integers(0, 9).map(lambda value: value / 10)


@st.composite
def runs(draw: Any) -> tuple[list[PhaseInterval], list[int | None]]:
    """Intervals of some sources, and how often each may be drawn."""
    count = draw(st.integers(1, 4))
    weights = st.lists(SHARES, min_size=count, max_size=count).filter(any).map(tuple)
    starts = sorted(draw(st.sets(st.integers(1, 12), max_size=3)))
    shapes = [(draw(st.sampled_from([8, 16])), draw(st.sampled_from([4, 6, 8]))) for _ in (0, *starts)]
    intervals = [
        PhaseInterval(start, draw(weights), length, batch) for start, (length, batch) in zip((0, *starts), shapes, strict=True)
    ]
    caps = draw(st.lists(st.none() | st.integers(1, 60), min_size=count, max_size=count))
    return intervals, caps


def walked_weights(intervals: Sequence[PhaseInterval], timeline: Timeline, samples: int) -> list[tuple[float, ...]]:
    """Returns the weights of the interval of each sample, found by walking through the steps."""
    weights: list[tuple[float, ...]] = []
    for step in range(10_000):
        interval = next(interval for interval in reversed(intervals) if interval.step <= step)
        weights += [interval.weights] * (interval.batch * interval.length // timeline.unit)
        if len(weights) >= samples:
            return weights[:samples]
    raise AssertionError


class _Ledger:
    """How far the draws of each source are from what constant weights ask for, in integers."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._tenths = [round(10 * weight) for weight in weights]
        assert all(tenths / 10 == weight for tenths, weight in zip(self._tenths, weights, strict=True))
        self._owed = [0] * len(weights)  # samples times the sum of all weights

    def follows(self, source: int) -> bool:
        """Enters a draw; returns whether all sources are less than one sample away."""
        whole = sum(self._tenths)
        self._owed = [owed + tenths for owed, tenths in zip(self._owed, self._tenths, strict=True)]
        self._owed[source] -= whole
        return all(abs(owed) < whole for owed in self._owed)


USED_UP_AT_THE_END = (
    [PhaseInterval(0, (0.4, 0.4, 0.5, 0.4), 8, 8), *(PhaseInterval(step, (0.0, 0.0, 0.0, 0.1), 16, 4) for step in (5, 7))],
    [None, None, None, 4],
)
"""The last source is used up four samples before its interval ends, and would be drawn next after that end."""


@given(run=runs())
@example(run=USED_UP_AT_THE_END)
@settings(max_examples=80, deadline=None)
def test_every_draw_comes_once_in_order_and_follows_the_weights(run: tuple[list[PhaseInterval], list[int | None]]) -> None:
    intervals, caps = run
    timeline = Timeline(intervals, caps)
    samples = min(200, timeline.end if timeline.end is not None else 200)
    sources, draws = timeline.locate(np.arange(samples))
    drawn = [0] * len(caps)
    ledgers: list[_Ledger] = []
    before: tuple[Any, ...] = ()
    weights = walked_weights(intervals, timeline, samples)
    for source, draw, wanted in zip(sources.tolist(), draws.tolist(), weights, strict=True):
        assert draw == drawn[source]  # neither replayed nor skipped, across every switch
        used_up = tuple(cap is not None and count == cap for cap, count in zip(caps, drawn, strict=True))
        own = tuple(0.0 if gone else weight for weight, gone in zip(wanted, used_up, strict=True))
        assert own[source] > 0
        if before != (wanted, own):
            # Shares stay as they are if the interval has no further draw for the source that is used up.
            ledgers = [*(ledgers if before and before[0] == wanted else []), _Ledger(own)]
            before = wanted, own
        drawn[source] += 1
        ledgers = [ledger for ledger in ledgers if ledger.follows(source)]
        assert ledgers, "below one sample at every prefix"
    assert timeline.draws(samples) == drawn
    assert all(cap is None or count <= cap for cap, count in zip(caps, drawn, strict=True))
    for source, draw in zip(sources.tolist()[::7], draws.tolist()[::7], strict=True):
        found = timeline.sample_of(source, draw)
        assert found is not None and (sources[found], draws[found]) == (source, draw)


@given(run=runs())
@settings(max_examples=60, deadline=None)
def test_steps_and_samples_are_those_of_a_walk(run: tuple[list[PhaseInterval], list[int | None]]) -> None:
    intervals, _ = run
    timeline = Timeline(intervals, [None] * len(intervals[0].weights))
    first = rows = 0
    for step in range(20):
        interval = next(interval for interval in reversed(intervals) if interval.step <= step)
        span = timeline.span_at(step)
        assert (span.rows, span.length) == (interval.batch, interval.length)
        assert (timeline.first_of(step), timeline.first_row_of(step)) == (first, rows)
        assert timeline.steps_in(first) == step and timeline.steps_in(first + span.units - 1) == step
        first, rows = first + span.units, rows + interval.batch


def test_a_run_ends_when_every_wanted_source_is_used_up() -> None:
    timeline = Timeline([PhaseInterval(0, (1, 1, 0), 8, 4), PhaseInterval(50, (0, 0, 1), 8, 4)], [10, 7, None])
    assert timeline.end == 17  # the third source would be wanted later, but nothing fills the steps until then
    sources, _ = timeline.locate(np.arange(17))
    assert np.bincount(sources, minlength=3).tolist() == [10, 7, 0]
    assert set(sources[14:].tolist()) == {0}  # what the second one leaves goes to the first
    assert timeline.sample_of(0, 10) is None and timeline.planned(17) == pytest.approx([10, 7, 0], abs=1)


def test_the_share_of_a_used_up_source_goes_to_the_others_in_proportion() -> None:
    timeline = Timeline([PhaseInterval(0, (0.5, 0.3, 0.2), 8, 4)], [100, None, None])
    sources, _ = timeline.locate(np.arange(1200))
    last = int(np.flatnonzero(sources == 0)[-1])
    assert np.bincount(sources[: last + 1])[0] == 100 and timeline.end is None
    rest = np.bincount(sources[last + 1 :], minlength=3)
    assert rest[0] == 0 and abs(rest[1] - 0.6 * rest.sum()) < 1


def test_a_limit_that_a_phase_just_reaches_changes_nothing_and_one_less_is_kept() -> None:
    intervals = [PhaseInterval(0, (0.7, 0.2, 0.1), 8, 4), PhaseInterval(25, (0.1, 0.2, 0.7), 8, 4)]
    free = Timeline(intervals, [None] * 3)
    drawn = free.draws(100)[1]
    assert free.locate(np.arange(100))[0][-1] != 1  # so a cut after the last draw would begin anew before the phase does
    just = Timeline(intervals, [None, drawn, None])
    assert np.array_equal(just.locate(np.arange(100))[0], free.locate(np.arange(100))[0]) and len(just.segments) == 2
    less = Timeline(intervals, [None, drawn - 1, None])
    assert less.draws(100)[1] == less.draws(1000)[1] == drawn - 1 and len(less.segments) == 3


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 3.0, 10.0, 1e6])
def test_weight_zero_is_never_drawn_at_any_temperature(temperature: float) -> None:
    timeline = Timeline([PhaseInterval(0, (0.9, 0.0, 0.1), 8, 4)], [None] * 3, temperature)
    counts = np.bincount(timeline.locate(np.arange(10_000))[0], minlength=3)
    assert counts[1] == 0
    first, _, third = tempered((0.9, 0.0, 0.1), temperature)
    assert counts[0] / 10_000 == pytest.approx(first / (first + third), abs=1e-4)  # w ** (1 / T), normalized
    assert first / third == pytest.approx(9 ** (1 / temperature))


def data(*phases: Phase, sources: int = 2, **more: Any) -> Data:
    labels = ("web", "code", "math")[:sources]
    return Data(
        sequence_length=16,
        sources=[RandomTokens(vocab_size=9, label=label, weight=0.5) for label in labels],
        phases=list(phases),
        **more,
    )


def test_a_ramp_moves_in_stairs_between_the_shares() -> None:
    intervals = intervals_of(data(Phase(start=100, ramp=64, weights={"web": 0.0}), Phase(start=400, weights={"web": 0.5})), 8)
    assert [interval.step for interval in intervals[:4]] == [0, 100, 102, 104] and len(intervals) == 1 + STAIRS + 1 + 1
    shares = [interval.weights[0] / sum(interval.weights) for interval in intervals]
    assert shares[0] == 0.5 and shares[-2] == 0.0 and shares[-1] == 0.5
    # Each stair is as high as the line in its middle; the steps of the ramp together are those of the line.
    line = [0.5 * (1 - (step - 100 + 0.5) / 64) for step in range(100, 164)]
    assert [shares[1 + (step - 100) // 2] for step in range(100, 164)] == pytest.approx(line, abs=0.5 / 64)
    timeline = Timeline(intervals, [None, None])
    sources, draws = timeline.locate(np.arange(4000))
    ramped = sources[800 : 164 * 8]
    assert abs((ramped == 0).sum() - sum(line) * 8) < 1
    assert draws[sources == 0].tolist() == list(range(int((sources == 0).sum())))
    assert not (sources[164 * 8 : 3200] == 0).any()


def test_the_learning_rate_follows_from_the_first_step_of_a_phase() -> None:
    phases = [Phase(start=5, lr_scale=0.5), Phase(start=8, weights={"web": 1}), Phase(start=10, lr_scale=0.1, ramp=3)]
    scales = [lr_scale_at(phases, step) for step in range(15)]
    assert scales[:10] == [1.0] * 5 + [0.5] * 5
    assert scales[10:] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.1])


def test_a_phase_that_keeps_the_weights_keeps_the_order() -> None:
    alone = Timeline(intervals_of(data(), 8), [None, None])
    scaled = Timeline(intervals_of(data(Phase(start=3, lr_scale=0.1)), 8), [None, None])
    assert np.array_equal(alone.locate(np.arange(99))[0], scaled.locate(np.arange(99))[0])


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([Phase(start=5, weights={"cod": 1})], r"phases\.0\.weights\.cod: no source has the label 'cod'; did you mean 'code'"),
        ([Phase(start=100, lr_scale=0.1)], r"phases\.0\.start: step 100 is never reached: the run has 100 steps"),
        ([Phase(start=90, ramp=20, lr_scale=0.1)], r"phases\.0\.ramp: ends at step 110, after the run"),
        ([Phase(start=9, lr_scale=1), Phase(start=9, lr_scale=2)], r"phases\.1\.start: 9 is too early"),
        ([Phase(start=9, ramp=5, lr_scale=1), Phase(start=12, lr_scale=2)], "ramps until step 14"),
        ([Phase(start=5)], r"phases\.0: changes nothing"),
        ([Phase(start=5, ramp=3, sequence_length=32)], "ramp: has no effect without weights or lr_scale"),
        ([Phase(start=5, weights={"web": 0, "code": 0})], r"phases\.0\.weights: no source has a weight above 0"),
        ([Phase(start=5, sequence_length=24)], r"data\.sequence_length: 16 does not divide the longest length of the run, 24"),
        ([Phase(start=5, sequence_length=128)], r"train\.global_batch: 4 rows of 16 tokens .* use a multiple of 8"),
    ],
)
def test_phases_that_mean_nothing_are_faults(phases: list[Phase], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_faults(faults_of(data(*phases), 4, 100))


def test_phases_without_a_mixture_and_packings_of_one_length_are_faults() -> None:
    with pytest.raises(ConfigError, match="have no effect with fewer than two sources"):
        refuse_faults(faults_of(data(Phase(start=5, weights={"web": 1}), sources=1), 4))
    with pytest.raises(ConfigError, match="no source has the label 'web'"):
        refuse_faults(faults_of(data(Phase(start=5, weights={"web": 1}), sources=0), 4))
    with pytest.raises(ConfigError, match="packing 'best_fit' requires rows of one length"):
        refuse_faults(faults_of(data(Phase(start=5, sequence_length=8), packing="best_fit"), 4))
    assert not faults_of(data(Phase(start=5, sequence_length=8)), 4)
