"""What the metrics file tells: which steps count, hours and tokens of each, restarts, and lines that are no metrics."""

import json
import math

import pytest

from forge_train.report.curves import History, Restart, finite
from forge_train.trackers import JsonlTracker, json_objects


def at(hours: float) -> str:
    minutes = round(hours * 60)
    return f"2026-03-{1 + minutes // 1440:02d}T{minutes // 60 % 24:02d}:{minutes % 60:02d}:00.000+00:00"


def line(step: int, hours: float, **values: object) -> dict:
    return {"step": step, "time": at(hours), **values}


def test_of_steps_that_were_trained_twice_the_later_time_counts() -> None:
    lines = [line(step, step / 10, loss=float(step)) for step in (10, 20, 30)]
    again = [line(25, 7.0, loss=-25.0), line(30, 7.5, loss=-30.0)]
    history = History.of([*lines, {"rewind": 20, "time": at(5.0)}, *again])
    loss = history.series["loss"]
    assert list(loss.steps) == [10, 20, 25, 30]
    assert list(loss.values) == [10.0, 20.0, -25.0, -30.0]
    assert history.restarts == [Restart(after=20, reached=30, time=at(5.0))]
    assert history.step == 30 and (history.first, history.last) == (at(1.0), at(7.5))


def test_hours_leave_out_lost_steps_and_the_time_between_starts() -> None:
    """Steps 10 and 20 took an hour; 30 was lost; the run stood until hour 5, and took two hours to step 25."""
    lines = [line(step, step / 10) for step in (10, 20, 30)]
    history = History.of([*lines, {"rewind": 20, "time": at(5.0)}, line(25, 7.0), line(30, 7.5)])
    assert [seconds / 3600 for seconds in history.clock.seconds] == pytest.approx([0.0, 1.0, 3.0, 3.5])
    assert history.seconds == pytest.approx(3.5 * 3600)


def test_a_clock_that_was_set_back_does_not_take_hours_away() -> None:
    history = History.of([line(1, 2.0), line(2, 3.0), line(3, 1.0), line(4, 4.0)])
    assert [seconds / 3600 for seconds in history.clock.seconds] == pytest.approx([0.0, 1.0, 1.0, 2.0])


def test_a_line_without_a_time_keeps_the_hours_before() -> None:
    history = History.of([line(1, 0.0), {"step": 2, "loss": 1.0}, {"step": 3, "time": "soon", "loss": 1.0}, line(4, 1.0)])
    assert [seconds / 3600 for seconds in history.clock.seconds] == pytest.approx([0.0, 0.0, 0.0, 1.0])


def test_the_tracker_marks_every_start_after_the_first(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    for after in (0, 2, 1):
        tracker = JsonlTracker(path)
        tracker.rewind(after)
        for step in range(after + 1, after + 3):
            tracker.write(step, {"loss": 1.0})
    history = History.of(json_objects(path))
    assert [(one.after, one.reached) for one in history.restarts] == [(2, 2), (1, 4)]
    assert list(history.series["loss"].steps) == [1, 2, 3]
    assert history.unread == 0


def test_steps_that_go_back_without_a_marker_are_a_restart() -> None:
    history = History.of([line(step, step, loss=float(step)) for step in (1, 2, 3)] + [line(2, 9.0, loss=-2.0)])
    assert list(history.series["loss"].values) == [1.0, -2.0]
    assert [(one.after, one.reached) for one in history.restarts] == [(1, 3)]


def test_a_start_after_the_last_line_lost_nothing() -> None:
    """A checkpoint may be newer than the last step that was logged."""
    assert History.of([line(20, 2.0), {"rewind": 25, "time": at(3.0)}]).restarts == [Restart(25, 25, at(3.0))]


def test_a_marker_in_an_empty_file_is_no_restart() -> None:
    assert History.of([{"rewind": 5, "time": at(1.0)}, line(6, 2.0)]).restarts == []


def test_the_lines_of_one_step_are_one_point_of_the_clock() -> None:
    history = History.of([line(1, 0.0, tokens=64, loss=2.0), line(1, 1.0, **{"routing/a/entropy": 1.0}), line(2, 2.0)])
    assert list(history.clock.steps) == [1, 2]
    assert history.clock.tokens[0] == 64 and math.isnan(history.clock.tokens[1])
    assert history.tokens == 64
    assert list(history.series) == ["loss", "routing/a/entropy"]


def test_the_step_at_a_time() -> None:
    clock = History.of([line(1, 1.0), line(2, 2.0)]).clock
    noon = clock.wall[0]
    assert [clock.step_at(noon + hours * 3600) for hours in (-0.5, 0.0, 0.9, 1.0, 50.0)] == [None, 1, 1, 2, 2]


def test_values_that_are_no_numbers() -> None:
    odd = {"a": "nan", "b": "-inf", "c": True, "d": None, "e": "text", "f": [1], "g": 10**400, "h": 7}
    history = History.of([line(1, 0.0, **odd)])
    values = {name: series.last for name, series in history.series.items()}
    assert list(values) == ["a", "b", "g", "h"]
    assert math.isnan(values["a"]) and (values["b"], values["g"], values["h"]) == (-math.inf, math.inf, 7.0)
    assert list(finite(history.series["b"].values)) == [] and list(finite(history.series["h"].values)) == [7.0]


def test_lines_that_are_no_metrics_are_counted_and_left_out(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps(line(1, 0.0, loss=1.0))
    damaged = ["[1]", "7", '{"loss": 1.0}', '{"step": "2"}', '{"step": true}', '{"step": 1e99}', "\x00\x00"]
    path.write_bytes(
        "\n".join([whole, "", *damaged, whole.replace('"step": 1', '"step": 2')]).encode() + b"\n" + whole[:20].encode()
    )
    history = History.of(json_objects(path))
    assert list(history.series["loss"].steps) == [1, 2]
    assert history.unread == len(damaged) + 1, "the blank line is none, the last one is cut off"
    path.write_bytes(b'{"step": 1, "loss": 1.0, "a": "\xff"}\n')
    assert History.of(json_objects(path)).step == 1
