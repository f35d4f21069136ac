"""Whole campaigns, whose entries are processes of `forge-train run`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_train.trackers import METRICS, read_metrics
from lab.campaigns import LAYOUTS, campaign_of

FAULTS = '''
import os
import time
from dataclasses import dataclass

import torch

from forge_core.component import Component
from forge_core.protocols.run import Hook


class Failing(Hook):
    """At step 3 of the last rank."""

    def __init__(self, kind):
        self.kind = kind

    def before_step(self, run):
        if run.state.step < 2 or run.topology.rank < run.topology.size - 1:
            return
        if self.kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.kind == "killed":
            os.kill(os.getpid(), 9)
        if self.kind == "hangs":
            time.sleep(600)
        raise RuntimeError("as meant")


@dataclass(frozen=True, kw_only=True)
class Faults(Component):
    """Fails in its own way."""

    kind: str
    """How."""

    def build(self):
        return Failing(self.kind)
'''
KINDS = ("memory", "killed", "hangs", "error")
CAMPAIGN = """
title = "Faults"
steps = 5
skip = 2
limit_minutes = 1.5

[common]
recipe = "tiny.toml"
world = 2

[sets.layout.fsdp]
[sets.layout.tp]
parallel.tp = 2
"""


def forge(folder: Path, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "forge_train", "bench", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def processes_of(folder: Path) -> list[int]:
    """Processes that have the path of a folder among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.slow
def test_an_entry_on_two_ranks_measures_its_steps(tmp_path: Path) -> None:
    """The losses are those of one rank; the tables come back from the raw records alone."""
    campaign_of(tmp_path)
    forge(tmp_path, "layouts.toml", "--only=*fsdp*")
    found = json.loads((tmp_path / "benches/layouts/results.json").read_text())["entries"]
    assert [(entry["status"], entry["world"], entry["measured"]) for entry in found[:2]] == [
        ("finished", 1, 4),
        ("finished", 2, 4),
    ]
    assert found[2]["status"] == "waiting"
    losses = []
    for entry in found[:2]:
        run = tmp_path / "benches/layouts/entries" / entry["name"] / "run"
        lines = [line for line in read_metrics(run / METRICS) if "loss" in line]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and not list(run.glob("checkpoints/step-*"))
        times = sorted(line["step_seconds"] for line in lines[2:])
        assert entry["step_seconds"]["median"] == pytest.approx((times[1] + times[2]) / 2)
        losses.append([line["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    page = tmp_path / "benches/layouts/table.md"
    before = page.read_bytes()
    page.unlink()
    forge(tmp_path, "--tables", "benches/layouts")
    assert page.read_bytes() == before


@pytest.mark.slow
def test_each_way_to_fail_is_a_result_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    sets = "".join(f'[sets.kind.{kind}]\nhooks = [{{name = "./faults.py:Faults", kind = "{kind}"}}]\n' for kind in KINDS)
    entries = "".join(f'[[entries]]\nkind = "{kind}"\nlayout = "fsdp"\n' for kind in KINDS)
    campaign_of(tmp_path, CAMPAIGN + sets + entries + '[[entries]]\nlayout = "tp"\n')
    forge(tmp_path, "layouts.toml", code=1)
    found = json.loads((tmp_path / "benches/layouts/results.json").read_text())["entries"]
    statuses = [entry["status"] for entry in found]
    # The kernel has killed no process, so a process that something else killed has failed.
    assert statuses == ["out of memory", "failed", "time limit", "failed", "finished"], found
    words = ["Tried to allocate", "SIGKILL", "at step 2 of 5", "as meant", ""]
    assert [word for word, entry in zip(words, found, strict=True) if word not in entry["message"]] == []
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_an_interrupted_campaign_ends_its_processes_and_goes_on(tmp_path: Path) -> None:
    campaign_of(tmp_path, LAYOUTS.replace("steps = 6", "steps = 2000"))
    command = [sys.executable, "-m", "forge_train", "bench", "layouts.toml", "--only=*fsdp_world=2"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )
    run = tmp_path / "benches/layouts/entries/layout=fsdp_world=2/run"
    deadline = time.monotonic() + 120
    while len(read_metrics(run / METRICS)) < 4:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and "stopped by SIGINT" in out and processes_of(run.parent) == []
    assert not (run.parent / "attempt.json").exists()
    (tmp_path / "layouts.toml").write_text(LAYOUTS)
    forge(tmp_path, "layouts.toml", "--only=*fsdp_world=2")
