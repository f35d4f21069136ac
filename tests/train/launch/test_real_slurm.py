"""`launch slurm --submit` on a real SLURM: two ranks on two nodes, a preemption, one requeue, and the end of the run."""

import sys
from pathlib import Path

import pytest

from forge_train.trackers import read_metrics
from train.launch.real_slurm import real_slurm, wait_until, why_not
from train.runs import TINY

STEPS = 60
HOOKS = """
[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "./slow.py:Waits"
"""
SLOW = '''
import time
from dataclasses import dataclass

from forge_core.component import Component
from forge_core.protocols.run import Hook


class Waiting(Hook):
    def before_step(self, run):
        time.sleep(0.2)


@dataclass(frozen=True, kw_only=True)
class Waits(Component):
    """Makes steps slow enough to be interrupted."""

    def build(self):
        return Waiting()
'''


@pytest.mark.slurm
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_preempted_job_saves_is_requeued_once_and_finishes(tmp_path: Path) -> None:
    run, keys = tmp_path / "runs/tiny", ["--nodes=2", "--ranks-per-node=1", f"--train.max_steps={STEPS}"]
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "tiny.toml").write_text(TINY + HOOKS)

    def steps() -> list[int]:
        path = run / "metrics.jsonl"
        return [row["step"] for row in read_metrics(path) if "loss" in row] if path.exists() else []

    with real_slurm(tmp_path / "slurm") as slurm:
        launch = [sys.executable, "-m", "forge_train", "launch", "slurm", "tiny.toml", "--submit", *keys]
        unknown = slurm.run(*launch, "--partition=lo", folder=tmp_path)
        assert unknown.returncode == 2 and "one of the cluster's partitions: low, high" in unknown.stderr
        job = slurm.submit(tmp_path, "tiny.toml", "--partition=low", *keys)
        second = slurm.run(*launch, "--partition=low", folder=tmp_path)
        assert second.returncode == 2 and f"job {job} (" in second.stderr

        wait_until(lambda: len(steps()) > 2, 120, "the run trains")
        assert (
            slurm.run("sbatch", "--partition=high", "--exclusive", "--nodes=2", "--wrap=sleep 1", folder=tmp_path).returncode == 0
        )
        slurm.wait_for(job, "PENDING", seconds=90)
        output = tmp_path / f"tiny-{job}.out"
        wait_until(lambda: f"job {job} ended with code 75" in output.read_text(), 60, "the script ends")
        assert "DUE TO PREEMPTION" in output.read_text()
        assert list((run / "checkpoints").glob("step-*")), "the stopped run has a checkpoint"

        assert slurm.wait_for(job, "COMPLETED", seconds=120)["Restarts"] == "1"
        said = output.read_text()
        assert said.count(", start ") == 2 and f"job {job}, start 2:" in said
        assert said.rstrip().endswith(f"job {job} ended with code 0; not requeued")
        assert steps() == list(range(1, STEPS + 1)), "no step is written twice"
        first = (run / f"slurm/{job}/rank-00000.log").read_text()
        assert first.count("resuming after step") == 1 and "layout dp2" in first
        assert (run / f"slurm/{job}/rank-00001.log").is_file()
