"""Merges the logs of a run's ranks by time, without holding them in memory or keeping their files open."""

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from heapq import merge
from pathlib import Path

from forge_core.errors import DataError

_BLOCK = 2**20
_TIME = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.]*Z ")
_NAME = re.compile(r"rank-(\d+)\.log")


def log_files(directory: Path, ranks: Collection[int] = ()) -> dict[int, Path]:
    """Returns the log file of each rank, or of the given ranks.

    Raises:
        DataError: the directory has no logs, or none of a given rank.
    """
    folder = directory / "logs"
    named = {int(match[1]): path for path in sorted(folder.glob("rank-*.log")) if (match := _NAME.fullmatch(path.name))}
    if not named:
        raise DataError(f"{directory} has no logs: there is no logs/rank-00000.log; give a run's directory, such as runs/demo")
    if missing := sorted(set(ranks) - set(named)):
        raise DataError(f"{directory} has no log of rank {missing[0]}; it has those of ranks {_listed(sorted(named))}")
    return {rank: named[rank] for rank in sorted(ranks or named)}


def _listed(ranks: list[int]) -> str:
    return f"0 to {ranks[-1]}" if ranks == [*range(len(ranks))] and len(ranks) > 2 else ", ".join(map(str, ranks))


def merged(files: dict[int, Path], tail: int | None = None) -> Iterator[tuple[int, str]]:
    """Yields (rank, line) of all logs by time, the lower rank first at equal times; `tail` keeps only the last lines.

    A line without a time, as of a traceback, follows the line before it. A clock that was set back does not change the order
    within a rank.
    """
    streams = [_timed(rank, _lines(path) if tail is None else _last_lines(path, tail)) for rank, path in files.items()]
    lines = ((rank, text.decode("utf-8", "replace")) for _, rank, text in merge(*streams, key=lambda item: item[:2]))
    if tail is None:
        yield from lines
    else:
        yield from deque(lines, maxlen=tail)


def _timed(rank: int, lines: Iterable[bytes]) -> Iterator[tuple[bytes, int, bytes]]:
    """Yields (time, rank, line); the time never decreases."""
    time = b""
    for line in lines:
        if found := _TIME.match(line):
            time = max(time, found[0])
        yield time, rank, line


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file in blocks; the file is open only while a block is read, as a run may have thousands of ranks."""
    at, carry = 0, b""
    while block := _block(path, at, _BLOCK):
        at += len(block)
        *lines, carry = (carry + block).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
    if carry:
        yield carry


def _last_lines(path: Path, count: int) -> list[bytes]:
    """Returns at least the last `count` lines of a file, from a line with a time on."""
    size, most = path.stat().st_size, _BLOCK
    while True:
        lines = _block(path, max(0, size - most), most).removesuffix(b"\n").split(b"\n")
        if most >= size:
            return lines if size else []
        begin = next((place for place in range(len(lines) - count, 0, -1) if _TIME.match(lines[place])), 0)
        if begin > 0:  # the line at 0 may be cut off
            return lines[begin:]
        most *= 4


def _block(path: Path, at: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(size)
