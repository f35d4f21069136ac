"""`launch slurm --submit` on a real SLURM: two ranks on two nodes, a preemption, one requeue, and the end of the run."""

import subprocess
import sys
from pathlib import Path

import pytest

from forge_train.trackers import read_metrics
from train.launch.real_slurm import real_slurm, wait_until, why_not

STEPS = 120


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_preempted_job_saves_is_requeued_once_and_finishes(tmp_path: Path) -> None:
    with real_slurm(tmp_path / "slurm") as environment:
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        run, work = tmp_path / "work/runs/debug", tmp_path / "work"
        work.mkdir()

        def ran(*command: str) -> "subprocess.CompletedProcess[str]":
            return subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=120, check=False)

        def launched(*arguments: str) -> "subprocess.CompletedProcess[str]":
            keys = ["--nodes=2", "--ranks-per-node=1", f"--train.max_steps={STEPS}", *arguments]
            return ran(sys.executable, "-m", "forge_train", "launch", "slurm", "debug", *keys, "--submit")

        def steps() -> list[int]:
            path = run / "metrics.jsonl"
            return [row["step"] for row in read_metrics(path) if "loss" in row] if path.exists() else []

        def state(job: str) -> str:
            return ran("squeue", "--noheader", f"--jobs={job}", "--format=%T").stdout.strip()

        unknown = launched("--partition=lo")
        assert unknown.returncode == 2 and "one of the cluster's partitions: low, high" in unknown.stderr
        submitted = launched("--partition=low")
        assert submitted.returncode == 0, submitted.stderr
        job = submitted.stdout.split()[2].rstrip(":")
        second = launched("--partition=low")
        assert second.returncode == 2 and f"job {job} (" in second.stderr

        wait_until(lambda: bool(steps()), 240, "the run trains")
        assert ran("sbatch", "--partition=high", "--exclusive", "--nodes=2", "--wrap=sleep 1").returncode == 0
        wait_until(lambda: state(job) == "PENDING", 90, "the job is preempted and requeued")
        output = (work / f"debug-{job}.out").read_text()
        assert "DUE TO PREEMPTION" in output and f"job {job} ended with code 75" in output
        saved = sorted(path.name for path in (run / "checkpoints").iterdir() if any(letter.isdigit() for letter in path.name))
        assert saved, "the stopped run has a checkpoint"

        ran("scontrol", "update", f"job={job}", "StartTime=now")  # SLURM waits for two minutes
        wait_until(lambda: state(job) == "", 400, "the run finishes")
        output = (work / f"debug-{job}.out").read_text()
        assert output.count(", start ") == 2 and f"job {job}, start 2:" in output
        assert output.rstrip().endswith(f"job {job} ended with code 0; not requeued")
        assert steps()[-1] == STEPS and len(steps()) == len(set(steps())), "no step is written twice"
        first = (run / f"slurm/{job}/rank-00000.log").read_text()
        assert first.count("resuming after step") == 1 and "layout dp2" in first
        assert (run / f"slurm/{job}/rank-00001.log").is_file()
