"""A real run that is killed, resumed and finished: what it records of itself, against times that this test takes from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_train.runs.overview import RunOverview, overview
from forge_train.starts import read_starts
from train.runs import TINY

SLOW = '''
import time
from dataclasses import dataclass

from forge_core.protocols.run import Hook


@dataclass(kw_only=True)
class Slow(Hook):
    """Steps take half a second; after step 2 training waits for a second."""

    def before_step(self, run):
        time.sleep(0.5)

    def after_step(self, run, result):
        if run.state.step == 2:
            time.sleep(1.0)
            run.clock.paused += 1.0
'''
HOOKS = """
[[hooks]]
name = "./slow.py:Slow"

[[hooks]]
name = "log"
every = 1
"""


def started(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "forge_train", "run", "tiny.toml"]
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=output)


def seen(folder: Path) -> RunOverview:
    return overview(folder / "runs" / "tiny", time.time())


def until_step(folder: Path, step: int, process: subprocess.Popen[bytes]) -> RunOverview:
    deadline = time.monotonic() + 300
    while (run := seen(folder)).step is None or run.step < step:
        assert process.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.02)
    return run


def test_a_run_that_is_killed_resumed_and_finished(tmp_path: Path) -> None:
    """The checkpoint of step 3 is the newest one when it is killed after step 5, so steps 4 and 5 are trained twice."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "tiny.toml").write_text(TINY + HOOKS)
    begun = time.time()
    first = started(tmp_path)
    run = until_step(tmp_path, 5, first)
    assert (run.state, run.max_steps, run.restarts) == ("running", 8, 0) and run.process is not None
    assert run.process.startswith(f"{first.pid} on ")
    assert run.seconds_left is not None and 0.5 < run.seconds_left < 60
    first.kill()
    killed = time.time()
    first.wait()
    run = seen(tmp_path)
    assert run.state == "failed" and "crashed" in run.why and run.step == 5
    time.sleep(2.0)
    again = time.time()
    second = started(tmp_path)
    assert second.wait(timeout=300) == 0, (tmp_path / "output").read_text()
    done = time.time()
    run = seen(tmp_path)
    assert (run.state, run.why, run.step, run.restarts, run.rollbacks, run.notes) == ("finished", "finished", 8, 1, 0, [])
    spent = run.goodput
    assert spent is not None and spent.steps + sum(spent.lost.values()) == pytest.approx(spent.wall)
    assert spent.wall < done - begun + 0.1, "it began later and ended earlier than this test"
    assert spent.lost["down"] > again - killed - 0.1
    assert spent.lost["repeated steps"] >= 1.0 - 0.01, "two steps of half a second"
    assert spent.steps >= 4.0 - 0.01, "eight steps of half a second"
    assert 1.0 <= spent.lost["other hooks"] < 1.2
    assert spent.lost["checkpoints"] > 0.0 and spent.lost["start-up"] > 0.0
    assert spent.lost["down"] + spent.lost["repeated steps"] + spent.steps < done - begun
    starts, damaged = read_starts(tmp_path / "runs" / "tiny" / "starts.jsonl")
    assert [start.step for start in starts] == [0, 3] and damaged == 0
    assert starts[0].end is None and starts[1].end is not None and starts[1].end.code == 0
    assert json.loads((tmp_path / "runs/tiny/checkpoints/owner").read_text())["mark"] == starts[1].mark


@pytest.mark.slow
def test_a_run_that_a_signal_ends_is_preempted(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "tiny.toml").write_text(TINY + HOOKS)
    process = started(tmp_path)
    until_step(tmp_path, 1, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 75
    run = seen(tmp_path)
    assert (run.state, run.why) == ("preempted", "asked to stop")
    assert run.step is not None and 1 <= run.step < 8 and run.goodput is not None and run.goodput.lost["repeated steps"] == 0
