"""Metrics of a run as curves over steps, tokens and hours."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

POINTS = 2000
"""Points of a curve at most, but for one more per gap; a page with many curves has fewer, down to `FEWEST`."""
FEWEST = 250
ALL_POINTS = 200_000
"""Points that the curves of a page share: at about 15 bytes each, 3 MB."""


@dataclass
class Series:
    """One metric over the run: steps that grow, and a value at each; one that is not finite is a gap."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Appends; of two values at one step the later one counts."""
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
        else:
            self.steps.append(step)
            self.values.append(value)

    def cut(self, step: int) -> None:
        """Forgets what is later than `step`."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.values.pop()

    @property
    def last(self) -> float:
        """The newest value; NaN without any."""
        return self.values[-1] if self.values else math.nan


def limit(curves: int) -> int:
    """Points that each of so many curves may have."""
    return max(FEWEST, min(POINTS, ALL_POINTS // max(curves, 1)))


def thin(values: "array[float]", most: int) -> list[int]:
    """Indices of the points to draw: all, or of each of `most / 2` equal stretches the lowest and highest one, so that no extreme
    is lost; both ends always; and the first value that is not finite in a stretch, which keeps the gap."""
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
    """Those that are numbers: all of them, as a rule."""
    return values if math.isfinite(sum(values)) else [value for value in values if math.isfinite(value)]


def stretches(count: int, most: int) -> list[tuple[int, int]]:
    """(start, stop) of `most / 2` equal stretches of `count` points, of which none is empty."""
    number = max(1, min(most // 2, count))
    return [(part * count // number, (part + 1) * count // number) for part in range(number)]


def means(series: Series, most: int) -> tuple[list[float], list[float]]:
    """Mean step and mean value of each stretch: what smoothing begins from, as lowest and highest would not be a fair sample."""
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
    """Six significant digits; None for what JSON has no number for. A whole number stays whole."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


_ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass
class StepProgress:
    """Of every step with a line: when it was written, tokens seen, and seconds of training that led there.

    Attributes:
        tokens: NaN where no line of the step has them.
        seconds: without steps that were lost at a restart, and without the time between two starts.
        wall: seconds since 1970.
    """

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    wall: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: int, tokens: float, seconds: float, wall: float) -> None:
        """Takes a line; the lines of one step are one entry."""
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
        """The newest step that was written by then."""
        at = bisect_right(self.wall, wall)
        return self.steps[at - 1] if at else None


@dataclass(frozen=True)
class Restart:
    """The run went on after step `after`; steps up to `reached` had a line and were trained again."""

    after: int
    reached: int
    time: str


@dataclass
class History:
    """What was logged for the steps that count: of those that were trained twice, the later time.

    Attributes:
        series: metric -> curve, in the order of appearance.
        restarts: every start but the first.
        unread: lines without metrics: cut off, or damaged.
        first, last: time of the first and of the newest line, as it is written there; empty without one.
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
        """Reads lines as `forge_train.trackers.json_objects` gives them, in their order."""
        history = cls()
        for line in lines:
            history._take(line)
        return history

    @property
    def step(self) -> int | None:
        """The last step that has a line; None before any."""
        return self.clock.steps[-1] if self.clock.steps else None

    @property
    def seconds(self) -> float:
        """Of training, up to the last line."""
        return self.clock.seconds[-1] if self.clock.seconds else 0.0

    @property
    def tokens(self) -> float | None:
        """Seen by the run; None where no line says."""
        return next((value for value in reversed(self.clock.tokens) if math.isfinite(value)), None)

    def _take(self, line: Mapping[str, Any]) -> None:
        time = text if isinstance(text := line.get("time"), str) else ""
        if (after := _whole(line.get("rewind"))) is not None:
            self._rewind(after, time)
        elif (step := _whole(line.get("step"))) is not None:
            if self.step is not None and step < self.step:  # no writer of ours leaves out the marker
                self._rewind(step - 1, time)
            self._add(step, time, line)
        else:
            self.unread += 1
            return
        self.first, self.last = self.first or time, time or self.last

    def _add(self, step: int, time: str, line: Mapping[str, Any]) -> None:
        numbers = {name: value for name, given in line.items() if (value := _number(given)) is not None}
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


def _number(value: Any) -> float | None:
    """A float, also of the text that stands for one that JSON lacks; None for anything else."""
    if isinstance(value, str):
        return _ODD.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _epoch(time: str) -> float:
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return math.nan
