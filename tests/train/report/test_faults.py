"""What went wrong in a run, read from its logs and metrics, and on the page."""

import re
from pathlib import Path

import pytest

from forge_train.process.logs import logging_of
from forge_train.report import record as module
from forge_train.report.curves import History
from forge_train.report.page import report
from forge_train.report.record import RunFault, read_record, run_faults
from train.report.conftest import metrics, time_of


def log(directory: Path, rank: int, *lines: str) -> None:
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    (directory / "logs" / f"rank-{rank:05d}.log").write_text("".join(line + "\n" for line in lines))


def said(seconds: int, level: str, text: str, rank: int = 0, by: str = "forge_train.run.health") -> str:
    return f"{time_of(seconds)[:23]}Z rank {rank}/8 {level} {by}: {text}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return metrics(tmp_path, {step: {"loss": 2.0} for step in (10, 20, 30)}, seconds=1.0)


def test_warnings_and_errors_belong_to_the_step_they_name_or_to_that_of_their_time(run: Path) -> None:
    log(
        run,
        0,
        said(5, "WARNING", "before any step"),
        said(12, "INFO", "resuming after step 3"),
        said(25, "WARNING", "step 24 was skipped and did not change the weights"),
        said(26, "WARNING", "a tracker failed", by="forge_train.trackers"),
        said(27, "WARNING", "file.py:3: UserWarning: old", by="py.warnings"),
        said(31, "ERROR", "10 of the last 30 steps had a non-finite loss (last: step 30)"),
    )
    assert run_faults(run, read_record(run).history) == [
        RunFault("warning", None, "2026-03-01T08:00:05", "before any step"),
        RunFault("warning", 24, "2026-03-01T08:00:25", "step 24 was skipped and did not change the weights"),
        RunFault("warning", 20, "2026-03-01T08:00:26", "a tracker failed"),
        RunFault("error", 30, "2026-03-01T08:00:31", "10 of the last 30 steps had a non-finite loss (last: step 30)"),
    ]
    assert read_record(run).status.startswith("broken off: 10 of the last 30 steps")


def test_the_lines_are_those_that_a_run_logs(run: Path) -> None:
    import logging

    with logging_of(0, 2) as log:
        log.open(run)
        logging.getLogger("forge_train.run.health").warning("the loss left its band at step %d", 20)
    (fault,) = run_faults(run, read_record(run).history)
    assert (fault.kind, fault.step, fault.text) == ("warning", 20, "the loss left its band at step 20")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", fault.time)


def test_of_a_traceback_its_last_line_is_told(run: Path) -> None:
    trace = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    go()", "ValueError: no such thing"]
    log(run, 0, said(21, "CRITICAL", trace[0], by="forge"), *trace[1:], "", said(22, "INFO", "bye"))
    (fault,) = run_faults(run, read_record(run).history)
    assert (fault.kind, fault.step, fault.text) == ("error", 20, "ValueError: no such thing")
    log(run, 0, said(21, "CRITICAL", trace[0], by="forge"), *trace[1:])
    assert [fault.text for fault in run_faults(run, read_record(run).history)] == ["ValueError: no such thing"]


def test_what_several_ranks_say_is_told_once(run: Path) -> None:
    for rank in range(3):
        log(run, rank, said(21 - rank, "WARNING", "slow", rank), said(25, "WARNING", "slow", rank))
    log(run, 3, said(26, "WARNING", "alone", 3))
    assert [(fault.time[-2:], fault.text) for fault in run_faults(run, read_record(run).history)] == [
        ("19", "rank 2: slow (so do 2 more ranks)"),
        ("25", "slow (so do 2 more ranks)"),
        ("26", "rank 3: alone"),
    ]


def test_long_logs_are_read_from_their_end(run: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "FIRST_LOG", 200)
    log(run, 0, *(said(1, "WARNING", f"old {number}") for number in range(50)), said(2, "WARNING", "the last"))
    told = [fault.text for fault in run_faults(run, read_record(run).history)]
    assert told[-1] == "the last" and 1 <= len(told) <= 3


def test_bytes_that_are_no_text_do_not_matter(run: Path) -> None:
    log(run, 0, "")
    (run / "logs" / "rank-00000.log").write_bytes(b"\xff\xfe\n" + said(5, "WARNING", "said").encode() + b"\n\xff")
    assert [fault.text for fault in run_faults(run, read_record(run).history)] == ["said"]


def test_skipped_steps_and_restarts_come_from_the_metrics(tmp_path: Path) -> None:
    lines = [{"step": 10, "time": time_of(10)}, {"step": 20, "time": time_of(20), "skipped_steps": 1}]
    again = {"rewind": 10, "time": time_of(90)}
    later = [{"step": step, "time": time_of(90 + step), "skipped_steps": count} for step, count in ((20, 2), (30, 2), (40, 5))]
    found = run_faults(tmp_path, History.of([*lines, again, *later]))
    assert [(fault.kind, fault.step) for fault in found] == [("skipped", 20), ("skipped", 40), ("restart", 10)]
    assert found[0].text.startswith("2 steps with a loss") and found[1].text.startswith("3 steps")
    assert found[2] == RunFault(
        "restart", 10, "2026-03-01T08:01:30", "started again after step 10; steps up to 20 were trained again"
    )


def test_the_page_lists_the_newest_faults(run: Path) -> None:
    log(run, 0, *(said(number % 60, "WARNING", f"number {number:03d} <b>") for number in range(60)))
    text = report([run]).read_text()
    assert "number 059 &lt;b&gt;" in text and "number 000" in text and "are not listed" not in text
    log(run, 0, *(said(number // 10, "WARNING", f"number {number:03d}") for number in range(module.MOST_FAULTS + 5)))
    text = report([run]).read_text()
    assert "5 earlier ones are not listed" in text and "number 004" not in text and "number 005" in text


def test_an_error_of_an_earlier_start_does_not_end_the_newest(tmp_path: Path) -> None:
    metrics(tmp_path, {10: {"loss": 1.0}}, seconds=1.0)
    log(tmp_path, 0, said(15, "ERROR", "out of memory"))
    assert read_record(tmp_path).status == "broken off: out of memory"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"rewind": 10, "time": "{time_of(60)}"}}\n')
    assert read_record(tmp_path).status.startswith("going on, or broken off")
