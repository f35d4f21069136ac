"""Reads a part of `metrics.jsonl` from its ends, and finds single steps in it, without reading it as a whole.

The lines of one start of a run stand together, and their steps increase. So the newest lines are found by reading backward, and
a step by bisection.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from forge_train.trackers import metric_value

BLOCK = 8192
"""Bytes of one read."""

MOST = 2**22
"""Maximum number of bytes that one search reads; a file without line feeds is not read to its end."""

_NEAR = 2
_PAUSES = "pauses/"
_WRITTEN = re.compile(rb'\{"step": (\d+), "time": "[^"]+", ')
_LOSS = b'"loss": '


@dataclass(frozen=True)
class MetricsLine:
    """A line of the metrics.

    Attributes:
        step: step of its values; None if the line is a marker after which the run goes on from `rewind`.
        time: seconds since 1970.
        values: values by name.
        rewind: step after which earlier lines are void; None if the line has values.
    """

    step: int | None
    time: float
    values: Mapping[str, Any]
    rewind: int | None = None

    @property
    def is_of_log(self) -> bool:
        """Whether hook `log` wrote the line; other hooks write lines with their own values."""
        return "loss" in self.values

    @property
    def pauses(self) -> dict[str, float]:
        """Seconds that this start had waited for each hook."""
        named = {
            name.removeprefix(_PAUSES): metric_value(value) for name, value in self.values.items() if name.startswith(_PAUSES)
        }
        return {name: seconds for name, seconds in named.items() if seconds is not None}

    @property
    def waited(self) -> float:
        """Seconds that this start had waited for hooks."""
        return sum(self.pauses.values())


def line_of(text: bytes) -> MetricsLine | None:
    """Reads a line; None if it is incomplete, damaged or has no time."""
    try:
        values = json.loads(text.decode())
        time = datetime.fromisoformat(values["time"]).timestamp()
        step, rewind = values.get("step"), values.get("rewind")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    if rewind is not None:
        return MetricsLine(None, time, {}, rewind) if _is_step(rewind) else None
    return MetricsLine(step, time, values) if _is_step(step) else None


def _logged_step(text: bytes) -> int | None:
    """Returns the step of a line of hook `log`; None for other lines. Lines as Forge writes them are not parsed."""
    if (written := _WRITTEN.match(text)) and _LOSS in text and text.endswith(b"}"):
        return int(written[1])
    line = line_of(text)
    return line.step if line is not None and line.is_of_log else None


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class MetricsSegment:
    """The bytes `begin` to `end` of an open file of metrics."""

    handle: int
    begin: int
    end: int

    def backward(self) -> Iterator[bytes]:
        """Yields the lines from the newest to the oldest, without empty ones. The newest may be incomplete."""
        at, carry = self.end, b""
        stop = max(self.begin, self.end - MOST)
        while at > stop:
            size = min(BLOCK, at - stop)
            at -= size
            carry, *lines = (os.pread(self.handle, size, at) + carry).split(b"\n")
            yield from filter(bytes.strip, reversed(lines))
        if carry.strip() and at == self.begin:
            yield carry

    def forward(self, at: int) -> Iterator[bytes]:
        """Yields the lines from the first one that begins at or after the byte `at`, without empty ones."""
        carry, skip = b"", at > self.begin
        if skip:
            at -= 1  # a line feed in front of `at` means that a line begins there
        stop = min(self.end, at + MOST)
        while at < stop:
            block = os.pread(self.handle, min(BLOCK, stop - at), at)
            if not block:  # the file was cut meanwhile
                break
            at += len(block)
            *lines, carry = (carry + block).split(b"\n")
            if skip and lines:
                del lines[0]
                skip = False
            yield from filter(bytes.strip, lines)
        if carry.strip() and not skip and at == self.end:
            yield carry

    def newest(self) -> MetricsLine | None:
        """Returns the newest line of hook `log`."""
        return next((line for text in self.backward() if (line := line_of(text)) and line.is_of_log), None)

    def first_after(self, step: int) -> MetricsLine | None:
        """Returns the first line of hook `log` with a later step."""
        return next((line for line in self._logged(self.begin) if line.step is not None and line.step > step), None)

    def around(self, step: int, share: float = 0.5) -> tuple[MetricsLine | None, MetricsLine | None]:
        """Returns the last line of hook `log` up to a step, and the first one after it.

        Args:
            step: the step.
            share: share of the bytes after which the step is expected; the search begins there.
        """
        low, high = self.begin, self.end
        near = self.begin + round(share * (self.end - self.begin))
        guesses = [near + _NEAR * BLOCK, near - _NEAR * BLOCK]
        while high - low > BLOCK:
            guess = guesses.pop() if guesses else (low + high) // 2
            if not low < guess < high:
                continue
            there = next((found for text in self.forward(guess) if (found := _logged_step(text)) is not None), None)
            if there is None or there > step:
                high = guess
            else:
                low = guess
        before = b""
        for text in self.forward(low):
            there = _logged_step(text)
            if there is not None and there > step:
                return line_of(before), line_of(text)
            before = before if there is None else text
        return line_of(before), None

    def _logged(self, at: int) -> Iterator[MetricsLine]:
        return (line for text in self.forward(at) if (line := line_of(text)) and line.is_of_log)
