"""Metrics of a run as curves over steps, tokens and hours."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from forge_train.trackers import metric_value

POINTS = 2000
"""Maximum number of points of a curve, plus one per gap; pages with many curves use fewer, down to `FEWEST`."""
FEWEST = 250
ALL_POINTS = 200_000
"""Maximum number of points of all curves of a page: at about 15 bytes each, 3 MB."""


@dataclass
class Series:
    """One metric over the run: increasing steps and their values; a value that is not finite is a gap."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Appends a value; replaces an earlier value of the same step."""
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
        else:
            self.steps.append(step)
            self.values.append(value)

    def cut(self, step: int) -> None:
        """Removes values after `step`."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.values.pop()

    @property
    def last(self) -> float:
        """The newest value; NaN without values."""
        return self.values[-1] if self.values else math.nan


def limit(curves: int) -> int:
    """Returns the maximum number of points per curve for a number of curves."""
    return max(FEWEST, min(POINTS, ALL_POINTS // max(curves, 1)))


def thin(values: "array[float]", most: int) -> list[int]:
    """Returns the indices of the points to draw: all points, or at most about `most`.

    Of each of `most / 2` equal parts, the lowest and the highest point are drawn, so that no extreme is lost, and the first value
    that is not finite, which keeps the gap. Both ends are always drawn.
    """
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for start, stop in stretches(len(values), most):
        there = finite(values[start:stop])
        if len(there) < stop - start:
            kept.add(next(at for at in range(start, stop) if not math.isfinite(values[at])))
        if there:
            kept.update(values.index(extreme, start, stop) for extreme in (min(there), max(there)))
    return sorted(kept)


def finite(values: "array[float]") -> Sequence[float]:
    """Returns the finite values."""
    return values if math.isfinite(sum(values)) else [value for value in values if math.isfinite(value)]


def stretches(count: int, most: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of `most / 2` equal, non-empty parts of `count` points."""
    number = max(1, min(most // 2, count))
    return [(part * count // number, (part + 1) * count // number) for part in range(number)]


def means(series: Series, most: int) -> tuple[list[float], list[float]]:
    """Returns mean step and mean value of each part, as input of smoothing, for which extremes would be a biased sample."""
    steps, values = [], []
    for start, stop in stretches(len(series.steps), most):
        there, at = series.values[start:stop], series.steps[start:stop]
        if not math.isfinite(sum(there)):
            whole = [number for number, value in enumerate(there) if math.isfinite(value)]
            there, at = [there[number] for number in whole], [at[number] for number in whole]
        if there:
            steps.append(sum(at) / len(at))
            values.append(math.fsum(there) / len(there))
    return steps, values


def short(value: float) -> float | int | None:
    """Rounds to six significant digits; integers stay integers. Returns None for values that are not finite."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


@dataclass
class StepProgress:
    """Time and tokens of every step with a line in the metrics.

    Attributes:
        tokens: tokens seen so far; NaN if no line of the step has them.
        seconds: training time so far, without lost steps and the time between starts.
        wall: time of the line in seconds since 1970.
    """

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    wall: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: int, tokens: float, seconds: float, wall: float) -> None:
        """Adds a line; all lines of one step form one entry."""
        columns = (self.tokens, self.seconds, self.wall)
        if self.steps and self.steps[-1] == step:
            tokens = self.tokens[-1] if math.isnan(tokens) else tokens
            for column in columns:
                column.pop()
        else:
            self.steps.append(step)
        for column, value in zip(columns, (tokens, seconds, wall), strict=True):
            column.append(value)

    def cut(self, step: int) -> None:
        """Forgets what is later than `step`."""
        while self.steps and self.steps[-1] > step:
            for column in (self.steps, self.tokens, self.seconds, self.wall):
                column.pop()

    def step_at(self, wall: float) -> int | None:
        """Returns the newest step that was written by a time."""
        at = bisect_right(self.wall, wall)
        return self.steps[at - 1] if at else None


@dataclass(frozen=True)
class Restart:
    """A restart after step `after`; steps up to `reached` had lines and were trained again."""

    after: int
    reached: int
    time: str


@dataclass
class History:
    """The metrics of a run; of steps that were trained twice, those of the later time.

    Attributes:
        series: metric -> curve, in order of appearance.
        restarts: all starts except the first.
        unread: number of lines without metrics, which are incomplete or damaged.
        first, last: times of the first and the newest line, as text; empty without lines.
    """

    series: dict[str, Series] = field(default_factory=dict)
    clock: StepProgress = field(default_factory=StepProgress)
    restarts: list[Restart] = field(default_factory=list)
    unread: int = 0
    first: str = ""
    last: str = ""
    _origin: float = math.nan
    _base: float = 0.0

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> "History":
        """Reads the lines of `forge_train.trackers.json_objects` in order."""
        history = cls()
        for line in lines:
            history._take(line)
        return history

    @property
    def step(self) -> int | None:
        """The last step with a line; None without lines."""
        return self.clock.steps[-1] if self.clock.steps else None

    @property
    def seconds(self) -> float:
        """Seconds of training up to the last line."""
        return self.clock.seconds[-1] if self.clock.seconds else 0.0

    @property
    def tokens(self) -> float | None:
        """Tokens seen by the run; None if no line has them."""
        return next((value for value in reversed(self.clock.tokens) if math.isfinite(value)), None)

    def _take(self, line: Mapping[str, Any]) -> None:
        time = text if isinstance(text := line.get("time"), str) else ""
        if (after := _whole(line.get("rewind"))) is not None:
            self._rewind(after, time)
        elif (step := _whole(line.get("step"))) is not None:
            if self.step is not None and step < self.step:  # a foreign writer without rewind markers
                self._rewind(step - 1, time)
            self._add(step, time, line)
        else:
            self.unread += 1
            return
        self.first, self.last = self.first or time, time or self.last

    def _add(self, step: int, time: str, line: Mapping[str, Any]) -> None:
        numbers = {name: value for name, given in line.items() if (value := metric_value(given)) is not None}
        wall = _epoch(time)
        if math.isnan(wall):
            wall = self.clock.wall[-1] if self.clock.wall else math.nan
        if math.isnan(self._origin):
            self._origin = wall
        elapsed = self._base + wall - self._origin
        seconds = self.seconds if math.isnan(elapsed) else max(self.seconds, elapsed)
        self.clock.add(step, numbers.get("tokens", math.nan), seconds, wall)
        for name, value in numbers.items():
            if name not in ("step", "tokens"):
                self.series.setdefault(name, Series()).add(step, value)

    def _rewind(self, after: int, time: str) -> None:
        if self.step is None:
            return
        self.restarts.append(Restart(after, max(after, self.step), time))
        self.clock.cut(after)
        for series in self.series.values():
            series.cut(after)
        self._origin, self._base = _epoch(time), self.seconds


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def _epoch(time: str) -> float:
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return math.nan
