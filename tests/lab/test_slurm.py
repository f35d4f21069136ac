"""The script of a job array: bash runs it with what SLURM sets, and each task trains its point."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_core.errors import ForgeError
from forge_lab.sweep.processes import script
from lab.fake_runs import sweep_of

GRID = """
recipe = "debug"
slurm = {partition = "gpu", time = "2:00:00", gpus-per-task = 1}
[vary]
optimizer.lr = [1e-3, 3e-3, 1e-2]
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a task, with commands that say how they were called."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/scontrol\n')
    squeue = 'if [[ "$*" == *RestartCnt* ]]; then echo "${RESTARTS-}"; else echo "$STATE"; fi'
    (bin_folder / "squeue").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/squeue\n{squeue}\n')
    (bin_folder / "forge-train").write_text(
        f'#!{sys.executable}\nimport os, signal, sys, time\nopen("{tmp_path}/called", "a").write(repr(sys.argv[1:]) + "\\n")\n'
        "asked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        f'open("{tmp_path}/ready", "w").close()\n'
        "while os.environ.get('WAITS') and not asked:\n    time.sleep(0.02)\n"
        "time.sleep(0.2 if asked else 0)\nsys.exit(int(os.environ.get('CODE', 75 if asked else 0)))\n"
    )
    for file in bin_folder.iterdir():
        file.chmod(0o755)
    task = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "41", "STATE": "RUNNING"}
    return {**os.environ, **task, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}


def written(tmp_path: Path, *arguments: str) -> Path:
    path = tmp_path / "job.sh"
    path.write_text(script(sweep_of(tmp_path, GRID), list(arguments), 4))
    return path


def test_one_array_over_all_points_with_the_users_options(tmp_path: Path) -> None:
    text = written(tmp_path).read_text()
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --array=0-2%4" in lines and "#SBATCH --partition=gpu" in lines and "#SBATCH --gpus-per-task=1" in lines
    assert "#SBATCH --requeue" in lines and "#SBATCH --open-mode=append" in lines and "#SBATCH --signal=B:USR1@120" in lines
    assert f"#SBATCH --output={tmp_path}/sweep/logs/%A_%a.out" in lines
    assert "#SBATCH --array=0-2" in script(sweep_of(tmp_path, GRID), [], None).splitlines()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 7, 93])
def test_fault_31_and_32_a_task_trains_its_point_and_its_code_is_that_of_the_run(
    tmp_path: Path, cluster: dict[str, str], code: int
) -> None:
    job = written(tmp_path, "--dir", str(tmp_path / "a b"), "--train.max_steps=5")
    done = subprocess.run(["bash", str(job)], env={**cluster, "CODE": str(code)}, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == code
    expected = ["sweep", str(tmp_path / "grid.toml"), "--dir", str(tmp_path / "a b"), "--train.max_steps=5", "--point", "2"]
    assert (tmp_path / "called").read_text() == f"{expected!r}\n"
    assert not (tmp_path / "scontrol").exists()


def signaled(tmp_path: Path, cluster: dict[str, str], number: int) -> int:
    """The code of a task whose shell gets a signal while its run goes on."""
    job = subprocess.Popen(["bash", str(written(tmp_path))], env={**cluster, "WAITS": "1"}, cwd=tmp_path)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    job.send_signal(number)
    return job.wait(60)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_fault_31_and_32_a_warning_lets_the_run_save_and_queues_the_task_again_once(
    tmp_path: Path, cluster: dict[str, str], number: int
) -> None:
    """Bash runs a trap only once the command that it waits for has ended: the command is in the background for that."""
    assert signaled(tmp_path, cluster, number) == 75
    assert (tmp_path / "scontrol").read_text() == "requeue 41_2\n"
    asked = ["--noheader --jobs=41_2 --Format=RestartCnt:12", "--noheader --jobs=41_2 --format=%T"]
    assert (tmp_path / "squeue").read_text().splitlines() == asked


@pytest.mark.parametrize("code", [5, 6, 8])
def test_fault_31_a_lost_rank_and_too_little_memory_queue_the_task_again(
    tmp_path: Path, cluster: dict[str, str], code: int
) -> None:
    done = subprocess.run(
        ["bash", str(written(tmp_path))], env={**cluster, "CODE": str(code)}, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == code
    assert (tmp_path / "scontrol").read_text() == "requeue 41_2\n"


def test_a_task_on_a_lost_node_does_not_requeue_the_one_that_started_elsewhere(tmp_path: Path, cluster: dict[str, str]) -> None:
    task = {**cluster, "CODE": "5", "RESTARTS": "1           "}
    done = subprocess.run(["bash", str(written(tmp_path))], env=task, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 5 and not (tmp_path / "scontrol").exists()


def test_fault_31_where_the_state_is_not_known_the_task_is_queued_again(tmp_path: Path, cluster: dict[str, str]) -> None:
    assert signaled(tmp_path, {**cluster, "STATE": ""}, signal.SIGUSR1) == 75
    assert (tmp_path / "scontrol").read_text() == "requeue 41_2\n"


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED"])
def test_fault_31_a_canceled_task_saves_and_is_not_queued_again(tmp_path: Path, cluster: dict[str, str], state: str) -> None:
    assert signaled(tmp_path, {**cluster, "STATE": state}, signal.SIGTERM) == 75
    assert not (tmp_path / "scontrol").exists()


def test_fault_31_a_run_that_reaches_its_end_in_spite_of_a_warning_is_not_queued_again(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    assert signaled(tmp_path, {**cluster, "CODE": "0"}, signal.SIGUSR1) == 0
    assert not (tmp_path / "scontrol").exists()


def test_what_an_array_cannot_do_is_refused(tmp_path: Path) -> None:
    halving = GRID + '[search]\nkind = "halving"\nrungs = [10]\n'
    with pytest.raises(ForgeError, match=r"search\.kind = 'halving'"):
        script(sweep_of(tmp_path, halving), [], None)
    with pytest.raises(ForgeError, match=r"slurm\.array is set by the sweep"):
        script(sweep_of(tmp_path, GRID.replace("partition", "array")), [], None)
