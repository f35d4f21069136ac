"""States of runs, each from its evidence: ends, processes of this machine, ages of records of others, marks of stores."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge_train.process import identity
from forge_train.process.identity import ProcessIdentity
from forge_train.runs.overview import RunOverview, overview
from forge_train.starts import read_starts
from train.many_runs.records import BEGIN, EPOCH, append, begin, end, first_start, log, second_start


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    """A process of this machine, and its identity by its own words."""
    code = "import dataclasses, json, sys, time; from forge_train.process.identity import ProcessIdentity as P\n"
    code += "print(json.dumps(dataclasses.asdict(P.of_this()))); sys.stdout.flush(); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    yield process, ProcessIdentity(**json.loads(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()


def of(process: ProcessIdentity) -> dict[str, Any]:
    return {"host": process.host, "boot": process.boot, "pid": process.pid, "process": process.began}


def at(run: Path, seconds: float) -> RunOverview:
    return overview(run, EPOCH + seconds)


def test_a_process_of_this_machine_is_found_until_it_ends(sleeper: tuple[subprocess.Popen[bytes], ProcessIdentity]) -> None:
    """Also if its parent has not taken notice: nobody has waited for it yet."""
    process, named = sleeper
    assert named.pid == process.pid and named.is_alive()
    began = named.began_at()
    assert began is not None and 0 <= time.time() - began < 60
    assert replace(named, began="1").is_alive() is False, "another process has its number now"
    assert replace(named, host="elsewhere").is_alive() is None and replace(named, boot="other").is_alive() is None
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while named.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert named.is_alive() is False and process.returncode is None


def test_systems_without_proc_are_asked_with_ps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ps").write_text('#!/bin/sh\n[ "$6" = "" ] && [ "$4" -lt 10 ] && echo "$STATE  Thu Nov  6 09:20:37 2025"\n')
    (tmp_path / "ps").chmod(0o755)
    monkeypatch.setattr(identity, "_PROC", tmp_path / "proc")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("STATE", "S+")
    identity._boot.cache_clear()
    try:
        named = replace(ProcessIdentity.of_this(), pid=4, began="Thu Nov 6 09:20:37 2025")
        assert named.boot == "" and named.is_alive() and not replace(named, pid=40).is_alive()
        assert named.began_at() == time.mktime((2025, 11, 6, 9, 20, 37, 0, 0, -1))
        monkeypatch.setenv("STATE", "Z+")
        assert not named.is_alive() and not replace(named, began="").is_alive()
    finally:
        identity._boot.cache_clear()
    assert replace(named, began="never").began_at() is None


def test_a_run_is_running_while_its_process_lives(
    tmp_path: Path, sleeper: tuple[subprocess.Popen[bytes], ProcessIdentity]
) -> None:
    """However old its lines are."""
    process, named = sleeper
    begin(tmp_path, "a", 0, 10, **of(named))
    for step in range(1, 9):
        log(tmp_path, step * 5, 10 + step * 10, 4.0 - step)
    run = at(tmp_path, 99_999)
    assert (run.state, run.step, run.max_steps, run.loss, run.lr, run.restarts) == ("running", 40, 100, -4.0, 0.01, 0)
    process.kill()
    process.wait()
    run = at(tmp_path, 99_999)
    assert run.state == "failed" and run.why.startswith("crashed: process") and run.seconds_left is None


def test_the_time_left_follows_the_newest_lines(tmp_path: Path) -> None:
    """Steps of 4 s before and of 2 s now, 60 are left: 120 s, of which 7 have passed since the newest line."""
    begin(tmp_path, "a", 0, 10)
    for number, step in enumerate(range(5, 45, 5), 1):
        log(tmp_path, step, 10 + (4 * step if number < 4 else 60 + 2 * (step - 15)), 1.0, 9.9)
    assert at(tmp_path, 127).seconds_left == pytest.approx(120 - 7)
    assert at(tmp_path, 500).seconds_left == 0.0


def test_with_one_line_the_time_left_follows_its_step(tmp_path: Path) -> None:
    begin(tmp_path, "a", 0, 10)
    log(tmp_path, 1, 12, 1.0, 3.0)
    assert at(tmp_path, 12).seconds_left == pytest.approx(99 * 3)
    begin(tmp_path, "b", 20, 30, 0)
    assert at(tmp_path, 31).seconds_left is None, "the newest start has no line"


@pytest.mark.parametrize(("age", "state"), [(599, "running"), (601, "failed")])
def test_on_another_host_the_age_decides(tmp_path: Path, age: float, state: str) -> None:
    begin(tmp_path, "a", 0, 10)
    log(tmp_path, 1, 20)
    assert at(tmp_path, 20 + age).state == state


@pytest.mark.parametrize(("age", "state"), [(2999, "running"), (3001, "failed")])
def test_slow_lines_may_be_old(tmp_path: Path, age: float, state: str) -> None:
    """300 s between two lines: ten times that."""
    begin(tmp_path, "a", 0, 10)
    log(tmp_path, 1, 20)
    log(tmp_path, 11, 320)
    assert at(tmp_path, 320 + age).state == state


def test_a_start_without_a_line_has_its_own_age(tmp_path: Path) -> None:
    begin(tmp_path, "a", 0, 1000)
    assert at(tmp_path, 1500).state == "running" and at(tmp_path, 1601).state == "failed"
    assert at(tmp_path, 1500).step == 0 and at(tmp_path, 1500).loss is None


@pytest.mark.parametrize(
    ("code", "state"),
    [(0, "finished"), (9, "finished"), (75, "preempted"), (4, "superseded"), (1, "failed"), (3, "failed"), (5, "failed")],
)
def test_a_recorded_end_decides(tmp_path: Path, code: int, state: str) -> None:
    first_start(tmp_path)
    end(tmp_path, "a", 108, 37, code, "this is why")
    run = at(tmp_path, 109)
    assert (run.state, run.why, run.step) == (state, "this is why", 37)
    assert run.newest == EPOCH + 108


def test_an_end_of_an_earlier_start_decides_nothing(tmp_path: Path) -> None:
    first_start(tmp_path)
    begin(tmp_path, "b", 120, 130, 30)
    end(tmp_path, "a", 131, 35)
    run = at(tmp_path, 140)
    assert (run.state, run.step, run.restarts) == ("running", 30, 1)
    assert run.loss == pytest.approx(9 - 30 / 10), "steps 31 to 35 are void"


def test_a_rollback_goes_on_in_its_process(tmp_path: Path) -> None:
    first_start(tmp_path)
    end(tmp_path, "a", 102, 35, None, "rolled back")
    assert at(tmp_path, 103).state == "running" and at(tmp_path, 1000).state == "failed"


def test_another_job_with_the_checkpoints_supersedes(tmp_path: Path) -> None:
    first_start(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    owner = tmp_path / "checkpoints" / "owner"
    for mark, state in (("a", "running"), ("other", "superseded")):
        owner.write_text(json.dumps({"mark": mark, "host": "h", "process": 1}))
        assert at(tmp_path, 102).state == state
    owner.write_text("damaged")
    assert at(tmp_path, 102).state == "running"
    owner.write_text(json.dumps({"mark": "other", "host": "h", "process": 1}))
    end(tmp_path, "a", 103, 37)
    assert at(tmp_path, 104).state == "finished", "it ended before"


def test_restarts_are_counted(tmp_path: Path) -> None:
    first_start(tmp_path)
    second_start(tmp_path)
    second_start(tmp_path, 40, 200, "c")
    run = at(tmp_path, 300)
    assert (run.restarts, run.rollbacks, run.state, run.step, run.loss) == (2, 0, "finished", 40, pytest.approx(5.0))


def test_a_line_that_is_being_written_is_told(tmp_path: Path) -> None:
    first_start(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "ti')
    run = at(tmp_path, 102)
    assert run.step == 35 and run.notes == ["the last line of metrics.jsonl is incomplete"]
    append(tmp_path / "metrics.jsonl", {})
    log(tmp_path, 45, 112)
    run = at(tmp_path, 113)
    assert run.step == 45 and run.notes == ["a line of metrics.jsonl is damaged"]


def test_damage_is_a_note(tmp_path: Path) -> None:
    first_start(tmp_path)
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('[]\n{"start": "x"}\n{"end": "a", "time": 3}\n{"start": ["x"]}\n{"end": {}}\n{"sta')
    run = at(tmp_path, 102)
    assert run.notes == ["6 lines of starts.jsonl cannot be read"] and run.state == "running"
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n" * 500)
    assert len(at(tmp_path, 102).notes) < 30
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    run = at(tmp_path, 102)
    assert run.state == "unknown" and "directory" in run.why


def test_an_older_directory_has_what_it_records(tmp_path: Path) -> None:
    log(tmp_path, 7, 70, 1.25)
    (tmp_path / "config.toml").write_text("[train]\nmax_steps = 12\n")
    run = at(tmp_path, 80)
    assert (run.state, run.step, run.max_steps, run.loss) == ("unknown", 7, 12, 1.25)
    assert run.restarts is None and run.goodput is None and "starts.jsonl" in run.why
    for status, state in (("finished", "finished"), ("asked to stop", "preempted"), ("no better loss", "finished")):
        (tmp_path / "report.json").write_text(json.dumps({"status": status, "ended": BEGIN.isoformat()[:11] + "08:02:00+00:00"}))
        assert (at(tmp_path, 200).state, at(tmp_path, 200).why) == (state, status)
    log(tmp_path, 8, 121, 1.0)
    assert at(tmp_path, 200).state == "unknown", "a later start has written lines"
    for damaged in ("", "[]", '{"status": 3, "ended": "x"}', '{"status": "finished"}'):
        (tmp_path / "report.json").write_text(damaged)
        assert at(tmp_path, 200).state == "unknown"


def test_the_record_of_starts_is_read_in_order(tmp_path: Path) -> None:
    first_start(tmp_path)
    second_start(tmp_path)
    starts, damaged = read_starts(tmp_path / "starts.jsonl")
    assert [start.mark for start in starts] == ["a", "b"] and damaged == 0
    assert starts[0].end is None and starts[1].end is not None
    assert (starts[1].end.step, starts[1].end.code, starts[1].end.pauses) == (40, 0, {"save": 3.0, "evaluate": 4.0})
    assert (starts[1].began, starts[1].time, starts[1].step) == (EPOCH + 150, EPOCH + 155, 30)
    assert read_starts(tmp_path / "nothing") == ([], 0)
