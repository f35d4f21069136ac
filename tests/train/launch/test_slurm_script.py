"""The script of a SLURM job, run by bash with stand-ins for SLURM's programs: which endings requeue the job, and which do not."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_core.errors import ConfigError
from forge_train.launch.cluster import check_run, load_cluster
from forge_train.launch.slurm import slurm_script
from train.launch.cluster_programs import FakeSlurm, fake_slurm

RECIPE = 'base = "debug"\n[job]\nname = "a run"\n'


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return fake_slurm(tmp_path / "slurm")


def script_of(tmp_path: Path, *keys: str, overrides: tuple[str, ...] = (), recipe: str = RECIPE) -> str:
    """The script of a job on two nodes with one rank each."""
    folder = tmp_path / "my work"
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text(recipe)
    ranks = [] if any("ranks_per_node" in key for key in keys) else ["--slurm.ranks_per_node=1"]
    cluster = load_cluster(None, ["--slurm.nodes=2", *ranks, *keys])
    run = check_run(str(folder / "recipe.toml"), overrides, 2 * cluster.slurm.ranks, cluster.slurm.array, folder)
    return slurm_script(run, cluster)


def written(tmp_path: Path, *keys: str, **options: object) -> Path:
    path = tmp_path / "job.sh"
    path.write_text(script_of(tmp_path, *keys, **options))  # type: ignore[arg-type]
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    return path


def ended(tmp_path: Path, slurm: FakeSlurm, *keys: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """The batch shell after ranks that end by themselves."""
    job, environment = written(tmp_path, *keys), slurm.environment | variables
    return subprocess.run(["bash", str(job)], env=environment, capture_output=True, text=True, timeout=60, check=False)


def signaled(tmp_path: Path, slurm: FakeSlurm, number: int, *keys: str, **variables: str) -> tuple[int, str]:
    """Code and output of the batch shell after a signal to it while ranks train."""
    environment = slurm.environment | {"WAITS": "1"} | variables
    job = subprocess.Popen(
        ["bash", str(written(tmp_path, *keys))], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while not (slurm.folder / "ready").exists():
        time.sleep(0.02)
    job.send_signal(number)
    output, _ = job.communicate(timeout=60)
    return job.returncode, output


def directives(script: str) -> list[str]:
    """What sbatch reads: the directives before the first command."""
    lines = script.splitlines()
    head = lines[: next(index for index, line in enumerate(lines) if line and not line.startswith("#"))]
    return [line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH ")]


def test_the_directives_say_what_the_cluster_file_says(tmp_path: Path) -> None:
    keys = ["gpus_per_node=8", "gpu_type=h100", "ranks_per_node=4", "cpus_per_rank=12", 'memory="0"', 'time="2-12:00:00"']
    keys += ["partition=gpu,long", "account=lab", "qos=high", 'constraint="h100&ib"', 'exclude="gpu[03,07]"', "warn_seconds=300"]
    own = [f"--slurm.{key}" for key in (*keys, 'options={mail-type = "FAIL", exclusive = ""}')]
    found = directives(script_of(tmp_path, *own, overrides=("--train.micro_batch=1",)))
    expected = [
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=h100:8",
        "--cpus-per-task=12",
        "--mem=0",
        "--time=2-12:00:00",
    ]
    expected += ["--partition=gpu,long", "--account=lab", "--qos=high", '--constraint="h100&ib"', "--exclude=gpu[03,07]"]
    expected += ["--signal=B:USR1@300", "--requeue", "--open-mode=append", "--mail-type=FAIL", "--exclusive"]
    assert set(expected) <= set(found)
    assert '--job-name="a run"' in found
    assert f'--output="{tmp_path}/my work/a-run-%j.out"' in found
    assert f'--comment="forge-train run in {tmp_path}/my work/runs/a run"' in found


def test_what_is_not_set_is_not_asked_for(tmp_path: Path) -> None:
    names = {line.partition("=")[0] for line in directives(script_of(tmp_path))}
    shared = {"--job-name", "--comment", "--nodes", "--ntasks-per-node", "--output", "--open-mode", "--signal", "--requeue"}
    assert names == shared


def test_srun_starts_the_trainer_with_one_log_per_rank_and_without_variables_of_another_launcher(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    job = written(tmp_path, "--slurm.cpus_per_rank=3", "--environment.GREETING=it's 5 $", overrides=("--job.seed=5",))
    stale = {"MASTER_PORT": "1", "WORLD_SIZE": "9", "RANK": "4"}
    subprocess.run(["bash", str(job)], env=slurm.environment | stale, cwd=tmp_path, check=True, timeout=60)
    (call,) = map(json.loads, slurm.calls("srun"))
    assert call["environment"] == {"MASTER_PORT": None, "WORLD_SIZE": None, "RANK": None, "GREETING": "it's 5 $"}
    assert call["folder"] == f"{tmp_path}/my work"
    assert "--output=runs/a run/slurm/41/rank-%5t.log" in call["arguments"] and "--open-mode=append" in call["arguments"]
    assert {"--kill-on-bad-exit=0", "--cpus-per-task=3"} <= set(call["arguments"])
    trainer = [sys.executable, "-m", "forge_train", "run", f"{tmp_path}/my work/recipe.toml", "--job.seed=5"]
    assert call["arguments"][-6:] == trainer
    assert (tmp_path / "my work/runs/a run/slurm/41").is_dir()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 7, 9, 93, 127])
def test_fault_31_a_run_that_another_start_would_not_help_is_not_requeued(tmp_path: Path, slurm: FakeSlurm, code: int) -> None:
    """0 finished; 2 an invalid recipe; 93 no progress; 127 a program that does not exist."""
    job = ended(tmp_path, slurm, CODE=str(code))
    assert job.returncode == code and f"ended with code {code}; not requeued" in job.stdout
    assert slurm.calls("scontrol") == []


@pytest.mark.parametrize("code", [75, 5, 6, 8, 134, 137, 139])
def test_fault_31_a_stopped_run_and_a_lost_rank_are_requeued_once(tmp_path: Path, slurm: FakeSlurm, code: int) -> None:
    """Above 128, a rank was ended by a signal: by the kernel without memory, or with its node."""
    job = ended(tmp_path, slurm, CODE=str(code))
    assert job.returncode == code
    assert slurm.calls("scontrol") == ["requeue 41"]
    assert slurm.calls("squeue") == ["--noheader --jobs=41 --Format=RestartCnt:12", "--noheader --jobs=41 --format=%T"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_fault_31_and_32_a_warning_reaches_the_ranks_and_the_job_is_requeued_once(
    tmp_path: Path, slurm: FakeSlurm, number: int
) -> None:
    """The shell waits until the ranks have saved. SIGTERM is passed on as another signal, because srun kills the ranks on it."""
    code, output = signaled(tmp_path, slurm, number)
    assert code == 75, output
    assert (slurm.folder / "heard").read_text() == "SIGUSR1"
    assert slurm.calls("scontrol") == ["requeue 41"]


def test_fault_32_the_signal_is_not_that_of_the_profiler(tmp_path: Path, slurm: FakeSlurm) -> None:
    recipe = RECIPE + '[[hooks]]\nname = "profile"\nsignal = "SIGUSR1"\n'
    assert "--signal=B:USR2@120" in directives(script_of(tmp_path, recipe=recipe))
    job = written(tmp_path, recipe=recipe)
    text = job.read_text()
    assert "kill -USR2" in text and "USR1" not in text


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED"])
def test_fault_31_a_canceled_job_saves_and_is_not_requeued(tmp_path: Path, slurm: FakeSlurm, state: str) -> None:
    """A preempted job is completing as well: SLURM has requeued it itself."""
    code, output = signaled(tmp_path, slurm, signal.SIGTERM, STATE=state)
    assert code == 75 and "canceled or requeued this job itself" in output
    assert slurm.calls("scontrol") == []


def test_fault_31_if_the_controller_does_not_answer_the_job_is_requeued(tmp_path: Path, slurm: FakeSlurm) -> None:
    assert ended(tmp_path, slurm, CODE="75", STATE="", SQUEUE="1").returncode == 75
    assert slurm.calls("scontrol") == ["requeue 41"]


def test_fault_31_a_run_that_finishes_in_spite_of_a_warning_is_not_requeued(tmp_path: Path, slurm: FakeSlurm) -> None:
    assert signaled(tmp_path, slurm, signal.SIGUSR1, WARNED="0")[0] == 0
    assert slurm.calls("scontrol") == []


@pytest.mark.parametrize(("own", "known", "requeued"), [("", "0", True), ("2", "2", True), ("", "1", False), ("2", "3", False)])
def test_a_script_on_a_lost_node_does_not_requeue_the_job_that_started_elsewhere(
    tmp_path: Path, slurm: FakeSlurm, own: str, known: str, requeued: bool
) -> None:
    """SLURM pads the number of requeues with spaces."""
    starts = {"SLURM_RESTART_COUNT": own} if own else {}
    job = ended(tmp_path, slurm, CODE="137", RESTARTS=f"{known}           ", STATE="RUNNING", **starts)
    assert job.returncode == 137 and (slurm.calls("scontrol") == ["requeue 41"]) is requeued
    assert ("SLURM has canceled or requeued this job itself" in job.stdout) is not requeued


@pytest.mark.parametrize(("count", "requeued"), [("", True), ("1", True), ("2", False), ("7", False)])
def test_requeues_have_a_limit(tmp_path: Path, slurm: FakeSlurm, count: str, requeued: bool) -> None:
    job = ended(tmp_path, slurm, "--slurm.max_requeues=2", CODE="5", **({"SLURM_RESTART_COUNT": count} if count else {}))
    assert (slurm.calls("scontrol") == ["requeue 41"]) is requeued
    assert ("slurm.max_requeues" in job.stderr) is not requeued
    assert job.returncode == 5


def test_a_job_that_cannot_be_requeued_says_so(tmp_path: Path, slurm: FakeSlurm) -> None:
    job = ended(tmp_path, slurm, CODE="75", SCONTROL="1")
    assert job.returncode == 75 and "it cannot be requeued" in job.stderr


def test_a_task_of_an_array_has_its_own_run_and_is_requeued_alone(tmp_path: Path, slurm: FakeSlurm) -> None:
    overrides = ("--job.name=seed-{task}", "--job.seed={task}")
    job = written(tmp_path, '--slurm.array="0-3%2"', overrides=overrides)
    found = directives(job.read_text())
    assert "--array=0-3%2" in found and f'--output="{tmp_path}/my work/seed-%A_%a.out"' in found
    task = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "2", "CODE": "75"}
    subprocess.run(["bash", str(job)], env=slurm.environment | task, check=False, timeout=60)
    (call,) = map(json.loads, slurm.calls("srun"))
    assert call["arguments"][-2:] == ["--job.name=seed-2", "--job.seed=2"]
    assert "--output=runs/seed-2/slurm/40_2/rank-%5t.log" in call["arguments"]
    assert slurm.calls("scontrol") == ["requeue 40_2"]
    assert slurm.calls("squeue")[-1] == "--noheader --jobs=40_2 --format=%T"


def test_pyxis_starts_ranks_in_a_container_that_sees_the_run(tmp_path: Path, slurm: FakeSlurm) -> None:
    job = written(tmp_path, "--container.runtime=pyxis", "--container.image=lab/forge:2", '--container.mounts=["/data:/data"]')
    subprocess.run(["bash", str(job)], env=slurm.environment, check=True, timeout=60)
    (call,) = map(json.loads, slurm.calls("srun"))
    folder = f"{tmp_path}/my work"
    assert {"--container-image=lab/forge:2", f"--container-mounts={folder}:{folder},/data:/data"} <= set(call["arguments"])
    assert f"--container-workdir={folder}" in call["arguments"]
    assert call["arguments"][-3:] == ["forge-train", "run", f"{folder}/recipe.toml"]


def test_apptainer_starts_each_rank_in_a_container(tmp_path: Path, slurm: FakeSlurm) -> None:
    keys = ["--container.runtime=apptainer", "--container.image=forge.sif", "--slurm.gpus_per_node=1"]
    job = written(tmp_path, *keys, '--container.command="/opt/venv/bin/forge-train"', '--container.mounts=["/data"]')
    subprocess.run(["bash", str(job)], env=slurm.environment, check=True, timeout=60)
    (call,) = map(json.loads, slurm.calls("srun"))
    folder = f"{tmp_path}/my work"
    start = call["arguments"].index("apptainer")
    expected = ["apptainer", "exec", "--nv", f"--bind={folder}:{folder}", "--bind=/data:/data", f"--pwd={folder}", "forge.sif"]
    assert call["arguments"][start:] == [*expected, "/opt/venv/bin/forge-train", "run", f"{folder}/recipe.toml"]


def test_a_container_that_does_not_see_the_run_is_refused(tmp_path: Path) -> None:
    keys = ["--container.runtime=pyxis", "--container.image=i"]
    with pytest.raises(
        ConfigError, match=r"container\.mounts: the container does not see the run's directory, /elsewhere/run; add '/else"
    ):
        script_of(tmp_path, *keys, overrides=("--job.dir=/elsewhere/run",))
    with pytest.raises(ConfigError, match="does not see the run's directory"):  # under another name, it is another path
        script_of(tmp_path, *keys, '--container.mounts=["/elsewhere:/runs"]', overrides=("--job.dir=/elsewhere/run",))
    assert "/elsewhere/run" in script_of(
        tmp_path, *keys, '--container.mounts=["/elsewhere"]', overrides=("--job.dir=/elsewhere/run",)
    )


def test_lines_of_setup_run_before_the_ranks(tmp_path: Path, slurm: FakeSlurm) -> None:
    job = written(tmp_path, '--slurm.setup=["export GREETING=hello", "echo set up"]')
    done = subprocess.run(["bash", str(job)], env=slurm.environment, check=True, timeout=60, capture_output=True, text=True)
    (call,) = map(json.loads, slurm.calls("srun"))
    assert call["environment"]["GREETING"] == "hello" and re.search(r"^set up$", done.stdout, re.MULTILINE)
