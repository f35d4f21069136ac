"""Computes steps, samples and sources of a whole run, including its phases.

A sample is one row of the run's longest length, its `unit`; shorter rows are cut from a sample, several per sample. The run is
a list of segments with constant weights. In each segment, draws follow the weights within the bound of its mixture at every
prefix (`mixture`), and each source continues where the previous segment left it. A segment ends where a phase or a stair of its
ramp begins, or where a source reaches `max_epochs` and its share goes to the others. The stairs of a ramp pass on their debts
(`mixture.ramp_draws`), so that deviations do not accumulate over the ramp.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from forge_data.order.mixture import Mixture, TreeMixture, mixture_of, ramp_draws
from forge_data.order.phases import PhaseInterval, shares_of, tempered


@dataclass(frozen=True)
class StepSpan:
    """Steps from `step` on with one shape: `units` samples per step, cut into rows of `length` tokens.

    Attributes:
        first: number of the first sample.
        first_row: number of rows of the run before the first sample.
        rows: rows per step.
    """

    step: int
    first: int
    first_row: int
    units: int
    rows: int
    length: int


@dataclass(frozen=True)
class Segment:
    """Samples from `first` on with constant weights.

    Attributes:
        first: number of the first sample.
        shares: exact shares of the sources: whole numbers in the ratio of the weights.
        mixture: order of the draws; in a ramp, its shares are the whole number of samples of each source in the stair.
        before: number of draws of each source before this segment.
        asked: exact number of draws of each source before this segment that the weights require.
    """

    first: int
    shares: tuple[int, ...]
    mixture: Mixture
    before: tuple[int, ...]
    asked: tuple[Fraction, ...]

    def asked_at(self, sample: int) -> tuple[Fraction, ...]:
        """Returns the exact number of draws of each source before a sample that the weights require."""
        return tuple(
            asked + Fraction((sample - self.first) * share, sum(self.shares))
            for asked, share in zip(self.asked, self.shares, strict=True)
        )


class Timeline:
    """Steps and samples of a whole run.

    Attributes:
        unit: tokens per sample: the longest row of the run.
        spans: ranges of steps with one shape.
        segments: ranges of samples with one mixture.
        end: number of samples until all sources with a weight are exhausted, or None.
    """

    def __init__(self, intervals: Sequence[PhaseInterval], caps: Sequence[int | None], temperature: float = 1.0) -> None:
        """
        Args:
            intervals: intervals of the run; see `phases.intervals_of`.
            caps: maximum number of draws of each source, or None.
            temperature: temperature of the weights.
        """
        self.unit = max(interval.length for interval in intervals)
        self.caps = tuple(caps)
        self.spans: list[StepSpan] = []
        self.segments: list[Segment] = []
        self.end: int | None = None
        self._temperature = temperature
        self._mixtures: dict[tuple[int, ...], Mixture] = {}
        self._owed = [Fraction(0)] * len(self.caps)
        for interval in intervals:
            self._begin(interval)
        # The assignment restarts only where weights change.
        changes = [
            place for place in range(len(intervals)) if not place or intervals[place].weights != intervals[place - 1].weights
        ]
        for place, after in zip(changes, [*changes[1:], None], strict=True):
            stop = None if after is None else self.spans[after].first
            if self.end is None:
                self._cut(self.spans[place].first, stop, intervals[place])

    def span_at(self, step: int) -> StepSpan:
        """Returns the span of a step."""
        return self.spans[bisect_right(self.spans, step, key=lambda span: span.step) - 1]

    def first_of(self, step: int) -> int:
        """Returns the number of the first sample of a step."""
        span = self.span_at(step)
        return span.first + (step - span.step) * span.units

    def first_row_of(self, step: int) -> int:
        """Returns the number of rows of the run before a step."""
        span = self.span_at(step)
        return span.first_row + (step - span.step) * span.rows

    def steps_in(self, samples: int) -> int:
        """Returns the number of whole steps in the first `samples` samples."""
        span = self.spans[bisect_right(self.spans, samples, key=lambda span: span.first) - 1]
        return span.step + (samples - span.first) // span.units

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, number of the draw within that source over the whole run) of each sample (N,) int64."""
        if len(self.segments) == 1:
            return self.segments[0].mixture.locate(samples)
        places = np.searchsorted(self._firsts, samples, side="right") - 1
        sources, draws = np.empty_like(samples), np.empty_like(samples)
        for place in np.unique(places).tolist():
            segment, own = self.segments[place], np.flatnonzero(places == place)
            sources[own], counted = segment.mixture.locate(samples[own] - segment.first)
            draws[own] = counted + np.array(segment.before)[sources[own]]
        return sources, draws

    def draws(self, samples: int) -> list[int]:
        """Returns the number of draws of each source among the first `samples` samples of the run."""
        segment = self._segment_at(samples)
        more = segment.mixture.draws(samples - segment.first)
        return [before + drawn for before, drawn in zip(segment.before, more, strict=True)]

    def sample_of(self, source: int, draw: int) -> int | None:
        """Returns the sample that is draw number `draw` of a source, or None if there is no such draw."""
        for segment, after in pairwise([*self.segments, None]):
            assert segment is not None
            if after is not None and after.before[source] <= draw:
                continue
            if not segment.mixture.shares[source]:
                return None
            sample = segment.first + segment.mixture.sample_of(source, draw - segment.before[source])
            return sample if self.end is None or sample < self.end else None
        return None

    def planned(self, samples: int) -> tuple[Fraction, ...]:
        """Returns the exact number of draws of each source that the weights require in the first `samples` samples."""
        return self._segment_at(samples).asked_at(samples)

    @cached_property
    def _firsts(self) -> np.ndarray:
        return np.array([segment.first for segment in self.segments])

    def _segment_at(self, sample: int) -> Segment:
        return self.segments[bisect_right(self.segments, sample, key=lambda segment: segment.first) - 1]

    def _begin(self, interval: PhaseInterval) -> None:
        """Adds the span of an interval; its samples continue where the previous span ends."""
        pieces = self.unit // interval.length
        first = first_row = 0
        if self.spans:
            last = self.spans[-1]
            first = last.first + (interval.step - last.step) * last.units
            first_row = last.first_row + (interval.step - last.step) * last.rows
        self.spans.append(StepSpan(interval.step, first, first_row, interval.batch // pieces, interval.batch, interval.length))

    def _cut(self, first: int, stop: int | None, interval: PhaseInterval) -> None:
        """Adds the segments of samples [first, stop): one, plus one for every source that is exhausted on the way."""
        if not interval.stair:
            self._forget()
        while stop is None or first < stop:
            before = tuple(self.draws(first)) if self.segments else (0,) * len(self.caps)
            asked = self.planned(first) if self.segments else (Fraction(0),) * len(self.caps)
            left = [None if cap is None else cap - drawn for cap, drawn in zip(self.caps, before, strict=True)]
            if self.segments and any(share and rest == 0 for share, rest in zip(self.segments[-1].shares, left, strict=True)):
                self._forget()  # debts to a source end when it is exhausted
            own = tuple(0.0 if rest == 0 else weight for weight, rest in zip(interval.weights, left, strict=True))
            if not any(own):
                self.end = first
                return
            shares = shares_of(tempered(own, self._temperature))
            counts = self._given(shares, stop - first) if interval.stair and stop is not None else None
            # A stair is read once, so computing a table would not pay off.
            mixture = self._mixture(shares) if counts is None else TreeMixture(counts)
            self.segments.append(Segment(first, shares, mixture, before, asked))
            limited = [(i, rest) for i, rest in enumerate(left) if rest and mixture.shares[i]]
            drawn = mixture.draws(stop - first) if limited and stop is not None else None
            if not limited or (drawn is not None and all(drawn[i] <= rest for i, rest in limited)):
                return
            # The segment ends with the last draw of the first source that is exhausted.
            first += 1 + min(mixture.sample_of(i, rest - 1) for i, rest in limited)

    def _given(self, shares: Sequence[int], samples: int) -> list[int]:
        """Returns the number of samples of each source in a stair, and updates the debts for the next one."""
        owed = [debt + Fraction(samples * share, sum(shares)) for debt, share in zip(self._owed, shares, strict=True)]
        counts = ramp_draws(owed, samples)
        self._owed = [debt - count for debt, count in zip(owed, counts, strict=True)]
        return counts

    def _forget(self) -> None:
        self._owed = [Fraction(0)] * len(self.caps)

    def _mixture(self, shares: tuple[int, ...]) -> Mixture:
        if shares not in self._mixtures:
            self._mixtures[shares] = mixture_of(shares)
        return self._mixtures[shares]
