"""Steps, samples and sources of a whole run by arithmetic, whatever its phases change.

A sample is one row of the run's longest length, its `unit`; where rows are shorter, a step cuts each sample into
several. The run is a list of segments with constant weights. In each of them, draws follow the weights within less
than one sample at every prefix (`mixture`), and each source goes on where the segment before left it. A segment ends
where a phase begins, or where a source has been read `max_epochs` times and its share goes to the others.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from forge_data.mixture import LONGEST_PERIOD, Mixture, tempered
from forge_data.phases import Stage

_STAIR_PERIOD = 4096


@dataclass(frozen=True)
class Span:
    """Steps [step, ...) of one shape: `units` samples each, cut into rows of `length` tokens.

    Attributes:
        first: number of the first sample.
        first_row: rows of the run before it.
        rows: of one step.
    """

    step: int
    first: int
    first_row: int
    units: int
    rows: int
    length: int


@dataclass(frozen=True)
class Segment:
    """Samples [first, ...) of one mixture; `before` holds the draws of each source until then."""

    first: int
    mixture: Mixture
    before: tuple[int, ...]


class Timeline:
    """Where every step and sample of a run lies.

    Attributes:
        unit: tokens of one sample: the longest row of the run.
        spans: steps by shape.
        segments: samples by mixture.
        end: samples until every source that is still wanted is used up, or None.
    """

    def __init__(self, stages: Sequence[Stage], caps: Sequence[int | None], temperature: float = 1.0) -> None:
        """
        Args:
            stages: of the run; see `phases.stages_of`.
            caps: draws of each source after which it is used up, or None.
            temperature: of the weights.
        """
        self.unit = max(stage.length for stage in stages)
        self.caps = tuple(caps)
        self.spans: list[Span] = []
        self.segments: list[Segment] = []
        self.end: int | None = None
        self._mixtures: dict[tuple[float, ...], Mixture] = {}
        for stage in stages:
            self._begin(stage)
        # Only where weights change the even assignment begins anew.
        changes = [place for place in range(len(stages)) if not place or stages[place].weights != stages[place - 1].weights]
        for place, after in zip(changes, [*changes[1:], None], strict=True):
            longest = _STAIR_PERIOD if stages[place].stair else LONGEST_PERIOD
            stop = None if after is None else self.spans[after].first
            if self.end is None:
                self._cut(self.spans[place].first, stop, tempered(stages[place].weights, temperature), longest)

    def span_at(self, step: int) -> Span:
        """The span of a step."""
        return self.spans[bisect_right(self.spans, step, key=lambda span: span.step) - 1]

    def first_of(self, step: int) -> int:
        """Number of the first sample of a step."""
        span = self.span_at(step)
        return span.first + (step - span.step) * span.units

    def first_row_of(self, step: int) -> int:
        """Rows of the run before a step."""
        span = self.span_at(step)
        return span.first_row + (step - span.step) * span.rows

    def steps_in(self, samples: int) -> int:
        """Whole steps that the first `samples` samples fill."""
        span = self.spans[bisect_right(self.spans, samples, key=lambda span: span.first) - 1]
        return span.step + (samples - span.first) // span.units

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number of the draw within that source over the whole run) of each sample (N,) int64."""
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
        """Draws of each source among the first `samples` samples of the run."""
        segment = self._segment_at(samples)
        more = segment.mixture.draws(samples - segment.first)
        return [before + drawn for before, drawn in zip(segment.before, more, strict=True)]

    def sample_of(self, source: int, draw: int) -> int | None:
        """The sample that is draw number `draw` of a source; None when it never comes."""
        for segment, after in pairwise([*self.segments, None]):
            assert segment is not None
            if after is not None and after.before[source] <= draw:
                continue
            if not segment.mixture.shares[source]:
                return None
            sample = segment.first + segment.mixture.sample_of(source, draw - segment.before[source])
            return sample if self.end is None or sample < self.end else None
        return None

    def planned(self, samples: int) -> list[float]:
        """Draws of each source that the weights ask for among the first `samples` samples, as fractions of a sample."""
        found = [0.0] * len(self.caps)
        for segment, after in pairwise([*self.segments, None]):
            assert segment is not None
            count = min(samples, samples if after is None else after.first) - segment.first
            for source, share in enumerate(segment.mixture.shares):
                found[source] += max(0, count) * share / segment.mixture.period
        return found

    @cached_property
    def _firsts(self) -> np.ndarray:
        return np.array([segment.first for segment in self.segments])

    def _segment_at(self, sample: int) -> Segment:
        return self.segments[bisect_right(self.segments, sample, key=lambda segment: segment.first) - 1]

    def _begin(self, stage: Stage) -> None:
        """Adds the span of a stage, which goes on with the samples where the last one stopped."""
        pieces = self.unit // stage.length
        first = first_row = 0
        if self.spans:
            last = self.spans[-1]
            first = last.first + (stage.step - last.step) * last.units
            first_row = last.first_row + (stage.step - last.step) * last.rows
        self.spans.append(Span(stage.step, first, first_row, stage.batch // pieces, stage.batch, stage.length))

    def _cut(self, first: int, stop: int | None, weights: Sequence[float], longest: int) -> None:
        """Adds the segments of samples [first, stop), one more for every source that is used up on the way."""
        while stop is None or first < stop:
            before = tuple(self.draws(first)) if self.segments else (0,) * len(weights)
            left = [None if cap is None else cap - drawn for cap, drawn in zip(self.caps, before, strict=True)]
            own = tuple(0.0 if rest == 0 else weight for weight, rest in zip(weights, left, strict=True))
            if not any(own):
                self.end = first
                return
            mixture = self._mixture(own, longest)
            self.segments.append(Segment(first, mixture, before))
            used_up = [mixture.sample_of(i, rest) for i, rest in enumerate(left) if rest and mixture.shares[i]]
            if not used_up or (stop is not None and first + min(used_up) >= stop):
                return
            first += self._last_draw(mixture, left)

    def _last_draw(self, mixture: Mixture, left: Sequence[int | None]) -> int:
        """Samples until the first source has made the last draw that is left to it."""
        return 1 + min(mixture.sample_of(i, rest - 1) for i, rest in enumerate(left) if rest and mixture.shares[i])

    def _mixture(self, weights: tuple[float, ...], longest: int) -> Mixture:
        if weights not in self._mixtures:
            self._mixtures[weights] = Mixture(weights, longest)
        return self._mixtures[weights]
