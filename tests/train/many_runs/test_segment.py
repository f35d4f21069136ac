"""Parts of metrics, read from their ends: equal to what reading every line finds, while most of a long file stays unread."""

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forge_train.runs import segment
from forge_train.runs.segment import MetricsSegment, line_of
from train.many_runs.records import EPOCH, iso


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[int]:
    """A file of three starts: 400 lines each, of different lengths; every third is of another hook, some are empty or damaged."""
    lines = []
    for number in range(1200):
        values: dict[str, Any] = {"step": number // 2, "time": iso(number), "x" * (number % 97): 1}
        lines.append(json.dumps(values | ({} if number % 3 else {"loss": 1.5})))
    lines[17], lines[30], lines[401] = "", '{"step": 1', "\u00e9" * 9
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    descriptor = os.open(tmp_path / "metrics.jsonl", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def all_lines(handle: int, begin: int, end: int) -> list[bytes]:
    return [line for line in os.pread(handle, end - begin, begin).split(b"\n") if line.strip()]


@pytest.mark.parametrize("block", [1, 7, 100, 8192])
def test_lines_forward_and_backward_are_those_of_the_file(handle: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "BLOCK", block)
    size = os.fstat(handle).st_size
    content = os.pread(handle, size, 0)
    borders = [0, content.index(b"\n", 9000) + 1, content.index(b"\n", 9100) + 1, content.index(b"\n", 20_000) + 1, size]
    for begin, end in [(0, size), *pairwise(borders), (size, size)]:
        part, every = MetricsSegment(handle, begin, end), all_lines(handle, begin, end)
        assert list(part.forward(begin)) == every
        assert list(part.backward()) == every[::-1]


def test_forward_begins_at_the_next_whole_line(handle: int) -> None:
    size = os.fstat(handle).st_size
    part, content = MetricsSegment(handle, 0, size), os.pread(handle, size, 0)
    for at in (1, 5, content.index(b"\n"), content.index(b"\n") + 1, content.index(b"\n") + 2, 1000, size - 1):
        begin = 0 if at == 0 else content.find(b"\n", at - 1) + 1
        assert list(part.forward(at)) == [line for line in content[begin:].split(b"\n") if line.strip()], at


def test_steps_are_found_by_bisection(handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "BLOCK", 300)
    size = os.fstat(handle).st_size
    part = MetricsSegment(handle, 0, size)
    logged = [line for text in all_lines(handle, 0, size) if (line := line_of(text)) and "loss" in line.values]
    assert len(logged) > 390
    for step in [*range(-1, 620, 7), 599, 600]:
        before = [line for line in logged if line.step is not None and line.step <= step]
        after = [line for line in logged if line.step is not None and line.step > step]
        for share in (0.5, 0.0, 1.0, step / 600):
            assert part.around(step, share) == (before[-1] if before else None, after[0] if after else None)
        assert part.first_after(step) == (after[0] if after else None)
    assert part.newest() == logged[-1]


def test_a_long_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        file.writelines(
            json.dumps({"step": step, "time": iso(step), "loss": 1.0, "pad": "x" * 900}) + "\n" for step in range(9000)
        )
    read, pread, size = [0], os.pread, path.stat().st_size

    def counted(handle: int, count: int, at: int) -> bytes:
        read[0] += count
        return pread(handle, count, at)

    monkeypatch.setattr(os, "pread", counted)
    descriptor = os.open(path, os.O_RDONLY)
    part = MetricsSegment(descriptor, 0, size)
    before, after = part.around(4321)
    assert before is not None and after is not None and (before.step, after.step) == (4321, 4322)
    newest = part.newest()
    assert newest is not None and newest.step == 8999
    os.close(descriptor)
    assert read[0] < 400_000 < size / 20


@pytest.mark.parametrize("what", [b"\0", b"x"])
def test_a_file_without_lines_is_given_up(tmp_path: Path, what: bytes) -> None:
    with (tmp_path / "m").open("wb") as file:
        file.write(what * 2**23)
    descriptor = os.open(tmp_path / "m", os.O_RDONLY)
    part = MetricsSegment(descriptor, 0, 2**23)
    assert list(part.backward()) == list(part.forward(0)) == [] and part.newest() is None
    os.close(descriptor)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", '{"step": 1}', '{"time": 3, "step": 1}', '{"time": "yesterday", "step": 1}', '{"step": true, "time": "T"}']
    + [json.dumps({"time": iso(1), "step": value}) for value in (True, -1, 1.5, "1", None)]
    + [json.dumps({"time": iso(1), "rewind": value}) for value in (True, -1, "1")],
)
def test_what_is_no_line(text: str) -> None:
    assert line_of(text.encode()) is None


def test_what_a_line_has() -> None:
    line = line_of(json.dumps({"time": iso(1.5), "step": 3, "loss": "nan", "pauses/save": 2, "pauses/x": "?"}).encode())
    assert line is not None and line.is_of_log
    assert (line.step, line.time - EPOCH, line.pauses, line.waited) == (3, 1.5, {"save": 2.0}, 2.0)
    marker = line_of(json.dumps({"time": iso(1), "rewind": 7}).encode())
    assert marker is not None and (marker.step, marker.rewind, marker.is_of_log) == (None, 7, False)
