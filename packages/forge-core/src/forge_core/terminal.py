"""Output of commands: tables for people, one JSON document for programs, errors without tracebacks, numbers with units."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from forge_core.errors import ConfigError, ForgeError

if TYPE_CHECKING:
    from rich.console import Console as RichConsole


class Console:
    """The output of one command. With `as_json`, only `document` and `error` write to standard output.

    Colors follow rich: no colors if `NO_COLOR` is set or the stream is not a terminal.
    """

    def __init__(self, *, as_json: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.as_json = as_json
        self._out = out or sys.stdout
        self._err = err or sys.stderr

    def text(self, message: str = "") -> None:
        """Prints a line for people on standard output, without markup and wrapping."""
        if not self.as_json:
            print(message, file=self._out)

    def note(self, message: str) -> None:
        """Prints a remark on standard error."""
        print(_redacted(message), file=self._err)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
        """Prints a table for people. If the output is not a terminal, it is tab-separated and not truncated, for pipes."""
        if self.as_json:
            return
        if not self._out.isatty():
            for row in [columns, *rows]:
                print("\t".join(str(cell) for cell in row), file=self._out)
            return
        from rich.table import Table
        from rich.text import Text

        drawn = Table(*columns, title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
        for row in rows:
            drawn.add_row(*(Text(str(cell)) for cell in row))
        _rich(self._out).print(drawn)

    @property
    def colors(self) -> bool:
        """Whether standard output shows colors."""
        rich = _rich(self._out)
        return rich.is_terminal and not rich.no_color

    def styled(self, parts: Sequence[tuple[str, str]], color: bool = True) -> None:
        """Prints (text, style of rich) parts one after the other, without markup and wrapping; without `color` only the text."""
        if self.as_json:
            return
        if not color:
            print("".join(text for text, _ in parts), end="", file=self._out)
            return
        from rich.text import Text

        _rich(self._out).print(Text.assemble(*parts), end="", highlight=False, soft_wrap=True)

    def document(self, value: Any) -> None:
        """Prints the result for programs: one JSON document on standard output."""
        print(json.dumps(value, indent=2, ensure_ascii=False, default=str), file=self._out)

    def error(self, error: ForgeError) -> int:
        """Prints an error without a traceback, and returns the exit code."""
        if self.as_json:
            self.document(failure(error))
        else:
            _rich(self._err).print("error:", style="bold red", end=" ", highlight=False)
            print(_redacted(str(error)), file=self._err)
        return error.exit_code


@contextmanager
def kept_for_document() -> Iterator[None]:
    """Context in which all that this process and its children print on standard output goes to standard error, so that a command
    that runs other code still prints one document only."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def failure(error: ForgeError) -> dict[str, Any]:
    """Returns an error as JSON: `{ok: false, error, message, faults}`."""
    faults = error.faults if isinstance(error, ConfigError) else ()
    entries = ({"key": f.key, "message": f.message, "origin": f.origin, "hint": f.hint} for f in faults)
    return {
        "ok": False,
        "error": type(error).__name__,
        "message": _redacted(str(error)),
        "faults": [{name: _redacted(text) for name, text in fault.items()} for fault in entries],
    }


def _redacted(text: str) -> str:
    from forge_core.redaction import redacted_text  # imported here, because compiling its patterns takes milliseconds

    return redacted_text(text)


def _rich(stream: TextIO) -> "RichConsole":
    from rich.console import Console as RichConsole

    return RichConsole(file=stream, markup=False, soft_wrap=not stream.isatty())


def size(count: int) -> str:
    """Formats bytes in binary units with two decimals: `14.96 GiB`, `950 B`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count:,} B" if unit == "B" else f"{value:,.2f} {unit}"


def duration(seconds: float) -> str:
    """Formats seconds as `45 s`, `3 min 40 s`, or `1 h 02 min` from an hour on."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def clock(seconds: float) -> str:
    """Formats seconds as `3:40`, or `1:02:03` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(value: float) -> str:
    """Formats a number with a suffix: `950`, `21.3k`, `1.4M`."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.1f}{suffix}"
    return f"{value:.0f}"


class ProgressMeter:
    """Reports the progress of a long job every few seconds: amount, percentage, rate and remaining time."""

    def __init__(self, what: str, total: int | None, unit: str, report: Callable[[str], None], every: float = 2.0) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self._report, self._every = report, every
        self._began = self._spoke = time.monotonic()

    def advance(self, amount: int) -> None:
        """Adds `amount` to the finished work."""
        self.done += amount
        now = time.monotonic()
        if now - self._spoke < self._every:
            return
        self._spoke = now
        rate = self.done / (now - self._began)
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        left = f", {duration((self.total - self.done) / rate)} left" if self.total and rate else ""
        self._report(f"{self.what}: {self.done / 1e6:.1f} M {self.unit}{share}, {rate / 1e6:.2f} M/s{left}")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return max(time.monotonic() - self._began, 1e-9)
