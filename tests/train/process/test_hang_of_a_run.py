"""A run that hangs by itself, with no other rank that could notice."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from train.runs import TINY

HOOK = '''
import time
from dataclasses import dataclass

from forge_core.component import Component
from forge_core.protocols.run import Hook


class Hanging(Hook):
    def before_step(self, run):
        if run.state.step == 20:
            time.sleep(1000)


@dataclass(frozen=True, kw_only=True)
class Hangs(Component):
    """Hangs."""

    def build(self):
        return Hanging()
'''


@pytest.mark.slow
def test_fault_35_a_run_that_hangs_alone_writes_its_stacks_and_ends(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HOOK)
    (tmp_path / "tiny.toml").write_text(TINY + '\n[[hooks]]\nname = "./mine.py:Hangs"\n')
    command = [sys.executable, "-m", "forge_train", "run", "tiny.toml", "--train.max_steps=30"]
    limits = ["--parallel.least_timeout=3", "--parallel.patience=1"]
    done = subprocess.run([*command, *limits], cwd=tmp_path, capture_output=True, text=True, timeout=100, env={**os.environ})
    assert done.returncode == 5, done.stderr
    place = r"rank 0 \(process \d+ on \S+; step 21, mine\.py:\d+ \(before_step\), \d+ s\)"
    report = (tmp_path / "runs" / "tiny" / "logs" / "hang.txt").read_text()
    assert re.search(rf"(?m)^{place} did not come within [\d.]+ s$", report)
    assert re.search(r'File ".*/mine\.py", line \d+, in before_step', report)
    assert "the stacks of all ranks are in runs/tiny/logs/hang.txt" in done.stderr
