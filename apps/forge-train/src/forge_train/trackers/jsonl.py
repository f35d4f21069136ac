"""Metrics as JSON lines: one object per write, appended by a single system call, readable while the run goes on.

A line is `{"step": 120, "time": "2026-01-31T12:00:00.123+00:00", "loss": 3.2, ...}`. JSON has no number for NaN and the
infinities, so these are the strings "nan", "inf" and "-inf"; `read` gives them back as floats.

A resume after step s appends `{"rewind": s, "time": ...}`: earlier lines of later steps are void, and `read` leaves
them out. Nothing is ever cut from the file, so what a crash lost stays there to be looked at, and every start of a run can
be seen in it.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
"""File in the run's directory."""

_ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class JsonlTracker:
    """Appends to one file.

    Raises:
        OSError: the disk is full or gone; a later write mends a line that was cut off (`write` and `rewind`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._torn = _ends_inside_a_line(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends `values` of optimizer step `step` with the time of now."""
        self._append({"step": step, "time": _now(), **{name: _number(value) for name, value in values.items()}})

    def rewind(self, step: int) -> None:
        """A run goes on after `step`: later lines are void. Writes nothing into a file without lines: a run begins."""
        if any("step" in item for item in objects(self.path)):
            self._append({"rewind": step, "time": _now()})

    def close(self) -> None:
        """Nothing is held open between writes."""

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, allow_nan=False).encode() + b"\n"
        if self._torn:
            line = b"\n" + line
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(handle, line)
        finally:
            os.close(handle)
        self._torn = written < len(line)
        if self._torn:
            raise OSError(f"only {written} of {len(line)} bytes were written to {self.path}")


def read(path: Path) -> list[dict[str, Any]]:
    """Entries of the file in the order written, without what a rewind made void. No file means no entries.

    A line that a kill cut off is skipped. `time` is text, `step` an int, every other value a float.
    """
    entries: list[dict[str, Any]] = []
    for item in objects(path):
        if "rewind" in item:
            entries = [entry for entry in entries if entry["step"] <= item["rewind"]]
        elif "step" in item:
            entries.append({name: _value(name, value) for name, value in item.items()})
    return entries


def objects(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of the file one by one, as they are in it, void ones too; `{}` for one that is cut off or no JSON object."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in filter(str.strip, lines):
            try:
                item = json.loads(line)
            except ValueError:  # cut off by a kill or a full disk
                item = {}
            yield item if isinstance(item, dict) else {}


def _value(name: str, value: Any) -> Any:
    return _ODD.get(value, value) if isinstance(value, str) and name != "time" else value


def _number(value: float) -> float | int | str:
    if isinstance(value, int):
        return value
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _ends_inside_a_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # no file yet, or one that the first write will complain about
        return False
