"""The JSON-lines tracker: strict JSON, rewinding, torn lines, and a disk that fails."""

import json
import logging
import math
import os
from datetime import datetime
from types import SimpleNamespace

import pytest

from forge_train.trackers import Jsonl, JsonlTracker, SafeTracker, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def steps(path) -> list[int]:
    return [entry["step"] for entry in read_metrics(path)]


def test_each_write_is_one_strict_json_line_at_once(path) -> None:
    tracker = Jsonl().build(SimpleNamespace(directory=path.parent))
    tracker.write(1, {"loss": 2.5, "tokens": 4096})
    tracker.write(2, {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf})

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    first, second = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert datetime.fromisoformat(first.pop("time")).utcoffset() is not None
    assert first == {"step": 1, "loss": 2.5, "tokens": 4096}
    assert second["grad_norm"] == "inf"
    entry = read_metrics(path)[1]
    assert math.isnan(entry["loss"]) and entry["grad_norm"] == math.inf and entry["low"] == -math.inf


def test_a_rewind_voids_later_lines_and_keeps_them_in_the_file(path) -> None:
    tracker = JsonlTracker(path)
    for step in (10, 20, 30):
        tracker.write(step, {"loss": float(step)})
    again = JsonlTracker(path)
    again.rewind(20)
    again.write(25, {"loss": -25.0})
    again.write(30, {"loss": -30.0})
    assert [(e["step"], e["loss"]) for e in read_metrics(path)] == [(10, 10.0), (20, 20.0), (25, -25.0), (30, -30.0)]
    assert '"loss": 30.0' in path.read_text()


def test_every_start_but_the_first_leaves_a_marker(path) -> None:
    """Also one that voids nothing, so that a report can tell when a run was started."""
    tracker = JsonlTracker(path)
    tracker.rewind(0)
    assert not path.exists()
    tracker.write(10, {"loss": 1.0})
    tracker.rewind(10)
    marker = json.loads(path.read_text().splitlines()[-1])
    assert marker["rewind"] == 10 and datetime.fromisoformat(marker["time"]).utcoffset() is not None
    assert steps(path) == [10]


def test_a_rewind_to_the_start_voids_all(path) -> None:
    tracker = JsonlTracker(path)
    tracker.write(0, {"loss": 9.0})
    tracker.write(5, {"loss": 1.0})
    tracker.rewind(0)
    assert steps(path) == [0]


def test_every_cut_of_the_last_line_loses_that_line_only(path) -> None:
    tracker = JsonlTracker(path)
    tracker.write(1, {"loss": 1.0})
    kept = path.stat().st_size
    tracker.write(2, {"loss": 2.0})
    whole = path.read_bytes()
    for cut in range(kept, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert steps(path) == [1]
        JsonlTracker(path).write(3, {"loss": 3.0})
        assert steps(path) == [1, 3], cut


def test_fault_43_a_failing_disk_is_one_warning_and_heals(path, caplog, monkeypatch) -> None:
    tracker = SafeTracker(JsonlTracker(path))
    tracker.write(1, {"loss": 1.0})
    real = os.write
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", lambda handle, data: real(handle, data[:7]))  # a full disk takes a part
        tracker.write(2, {"loss": 2.0})
        patch.setattr(os, "write", lambda handle, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        tracker.write(3, {"loss": 3.0})
    tracker.write(4, {"loss": 4.0})
    assert steps(path) == [1, 4]
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


def test_fault_43_a_missing_directory_is_one_warning(tmp_path, caplog) -> None:
    tracker = SafeTracker(JsonlTracker(tmp_path / "gone" / "metrics.jsonl"))
    with caplog.at_level(logging.WARNING):
        tracker.rewind(3)
        tracker.write(1, {"loss": 1.0})
        tracker.write(2, {"loss": 1.0})
        tracker.close()
    assert len(caplog.records) == 1
