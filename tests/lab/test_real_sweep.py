"""Whole sweeps, whose runs are processes of `forge-train run`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forge_lab.sweep.files import outcome_of
from forge_train.process.stop import REQUEUE
from forge_train.trackers import METRICS, read_metrics
from train.runs import TINY, train

HELD_OUT = """
[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "evaluate"
every = 100

[[hooks]]
name = "save"

[data.evaluation.held_out]
name = "random"
vocab_size = 61
tokens = 400
document = 23
"""
METRIC = "evaluation/held_out/loss"
FAILS = '''
from dataclasses import dataclass

from forge_core.component import Component
from forge_core.protocols.run import Hook


class Failing(Hook):
    def before_step(self, run):
        if run.job.job.seed == 2:
            raise RuntimeError("as meant")


@dataclass(frozen=True, kw_only=True)
class Fails(Component):
    """Fails in one of the runs."""

    def build(self):
        return Failing()
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY.replace('[[hooks]]\nname = "save"\n', HELD_OUT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "forge_train", *arguments]


def forge(*arguments: str, code: int = 0) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def values(path: Path) -> dict[str, Any]:
    return {line["point"]: line[METRIC] for line in map(json.loads, (path / "results.jsonl").read_text().splitlines())}


def logged(folder: Path, name: str) -> list[float]:
    return [entry[name] for entry in read_metrics(folder / METRICS) if name in entry]


def test_a_grid_trains_what_single_runs_train(here: Path) -> None:
    """Against the recipe that is trained in this process."""
    (here / "lr.toml").write_text('recipe = "tiny.toml"\nvary.optimizer.lr = [1e-3, 1e-2]\n')
    out = forge("sweep", "lr.toml", "--jobs", "2")
    assert "report: sweeps/lr/index.html" in out
    for rate in ("0.001", "0.01"):
        train(here / "tiny.toml", [f"--optimizer.lr={rate}", f"--job.dir=alone-{rate}"])
        alone = [(entry["step"], entry["loss"]) for entry in read_metrics(here / f"alone-{rate}" / METRICS) if "loss" in entry]
        mine = [
            (entry["step"], entry["loss"])
            for entry in read_metrics(here / f"sweeps/lr/points/lr={rate}" / METRICS)
            if "loss" in entry
        ]
        assert mine == alone and len(mine) == 8
        last = [entry[METRIC] for entry in read_metrics(here / f"alone-{rate}" / METRICS) if METRIC in entry][-1]
        assert values(here / "sweeps/lr")[f"lr={rate}"] == last


@pytest.mark.slow
def test_a_signal_saves_every_run_and_the_sweep_goes_on_afterwards(here: Path) -> None:
    (here / "lr.toml").write_text('recipe = "tiny.toml"\nvary.optimizer.lr = [1e-3, 3e-3, 1e-2]\n')
    long = ["--train.max_steps=400"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command("sweep", "lr.toml", "--jobs", "2", *long), env=environment)
    first, second, third = (here / f"sweeps/lr/points/lr={rate}" for rate in ("0.001", "0.003", "0.01"))
    deadline = time.monotonic() + 120
    while not all(len(read_metrics(folder / METRICS)) > 3 for folder in (first, second)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == REQUEUE
    assert [outcome_of(folder).status for folder in (first, second, third)] == ["stopped", "stopped", "waiting"]
    assert 0 < outcome_of(first).step < 400 and list((first / "checkpoints").glob("step-*"))
    forge("sweep", "lr.toml", "--jobs", "2", *long)
    assert {outcome_of(folder).status for folder in (first, second, third)} == {"finished"}
    assert [outcome_of(folder).starts for folder in (first, second, third)] == [2, 2, 1]
    train(here / "tiny.toml", ["--optimizer.lr=1e-3", "--job.dir=alone", *long])
    assert (
        values(here / "sweeps/lr")["lr=0.001"]
        == [entry[METRIC] for entry in read_metrics(here / "alone" / METRICS) if METRIC in entry][-1]
    )


@pytest.mark.slow
def test_halving_ends_with_what_a_whole_run_gives(here: Path) -> None:
    (here / "h.toml").write_text(
        'recipe = "tiny.toml"\nvary.optimizer.lr = [1e-4, 3e-3, 1e-2]\n[search]\nkind = "halving"\nrungs = [3]\nkeep = 0.3333\n'
    )
    forge("sweep", "h.toml", "--jobs", "2")
    found = {folder.name: outcome_of(folder) for folder in (here / "sweeps/h/points").iterdir()}
    (best,) = (name for name, one in found.items() if one.status == "finished")
    assert sorted(one.step for one in found.values()) == [3, 3, 8]
    assert found[best].rungs["3"] == min(one.rungs["3"] for one in found.values())  # type: ignore[type-var]
    train(here / "tiny.toml", [f"--optimizer.{best}", "--job.dir=alone"])
    assert found[best].value == logged(here / "alone", METRIC)[-1]


@pytest.mark.slow
def test_runs_of_two_processes_and_points_of_an_array(here: Path) -> None:
    """Two ranks give the loss of one, up to rounding; each task trains its point and the last one compares all."""
    (here / "one.toml").write_text('recipe = "tiny.toml"\nvary.optimizer.lr = [1e-3, 1e-2]\n')
    (here / "two.toml").write_text('recipe = "tiny.toml"\nprocesses = 2\nvary.optimizer.lr = [1e-3, 1e-2]\n')
    script = forge("sweep", "one.toml", "--slurm")
    (output,) = (line.partition("=")[2] for line in script.splitlines() if line.startswith("#SBATCH --output"))
    assert script.startswith("#!/bin/bash\n") and Path(output).parent.is_dir()
    for point in ("0", "1"):
        forge("sweep", "one.toml", "--point", point)
    forge("sweep", "one.toml", "--results")
    forge("sweep", "two.toml")
    one, two = values(here / "sweeps/one"), values(here / "sweeps/two")
    assert two == pytest.approx(one, rel=1e-5) and len(one) == 2
    assert "layout" in (here / "sweeps/two/points/lr=0.001/report.html").read_text()
    forge("sweep", "one.toml", "--point", "2", code=2)


@pytest.mark.slow
def test_a_failed_point_is_listed_and_the_code_says_so(here: Path) -> None:
    """A hook of the recipe that fails for one of the points."""
    (here / "fails.py").write_text(FAILS)
    hooks = "--hooks=[{name = './fails.py:Fails'}, {name = 'evaluate'}, {name = 'save'}]"
    (here / "seeds.toml").write_text('recipe = "tiny.toml"\nvary.job.seed = [1, 2]\n')
    out = forge("sweep", "seeds.toml", hooks, code=1)
    assert "seed=2: failed" in out and "RuntimeError: as meant" in out and "will be restarted" in out
    assert "RuntimeError: as meant" in (here / "sweeps/seeds/index.html").read_text()
    assert outcome_of(here / "sweeps/seeds/points/seed=1").status == "finished"


@pytest.mark.slow
def test_a_task_whose_run_lost_a_rank_in_all_its_starts_says_so_to_its_scheduler(here: Path) -> None:
    (here / "fails.py").write_text(FAILS.replace('raise RuntimeError("as meant")', "__import__('os')._exit(5)"))
    hooks = "--hooks=[{name = './fails.py:Fails'}, {name = 'evaluate'}, {name = 'save'}]"
    (here / "seeds.toml").write_text('recipe = "tiny.toml"\nvary.job.seed = [1, 2]\n')
    out = forge("sweep", "seeds.toml", hooks, "--point", "1", code=5)
    assert out.count("will be restarted") == 4
    forge("sweep", "seeds.toml", hooks, "--point", "0")


def test_a_start_with_a_fault_leaves_nothing(here: Path) -> None:
    (here / "lr.toml").write_text('recipe = "tiny.toml"\nvary.optimizer.lrr = [1e-3, 1e-2]\n')
    forge("sweep", "lr.toml", code=2)
    assert not (here / "sweeps").exists()
