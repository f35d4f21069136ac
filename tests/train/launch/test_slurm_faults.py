"""Jobs of a real SLURM that are disturbed: each time one complete checkpoint and one requeue, and the bits of a clean run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_ckpt.format.names import committed
from forge_lab.sweep.files import outcome_of
from forge_train.trackers import read_metrics
from train.launch.real_slurm import Slurm, real_slurm, wait_until, why_not
from train.runs import TINY
from train.storm.storm import End, differences, end_of

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(why_not()), reason=why_not())]

STEPS = 12
HOOKS = """
[[hooks]]
name = "log"
every = 1
"""


ONE = ["--nodes=1", "--ranks-per-node=1"]
HOLD = '\n[[hooks]]\nname = "./moments.py:Holds"\n'


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with real_slurm(tmp_path_factory.mktemp("cluster") / "slurm") as running:
        yield running


def with_moments(folder: Path) -> Path:
    shutil.copy(Path(__file__).parent / "moments.py", folder)
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return with_moments(tmp_path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> End:
    """The end of a run of one rank that nobody disturbs."""
    folder = tmp_path_factory.mktemp("reference")
    return alone(folder, recipe(folder, "undisturbed"), 1)


@pytest.fixture(scope="module")
def warned(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A job that SLURM warns before its time limit, after about a minute, while other tests run; and its folder."""
    folder = with_moments(tmp_path_factory.mktemp("warned"))
    keys = [f"--environment.MOMENTS={folder}", "--time=2", "--slurm.warn_seconds=50"]
    return slurm.submit(folder, recipe(folder, "warned", HOLD), *ONE, *keys), folder


def recipe(folder: Path, name: str, more: str = "") -> str:
    """Writes a recipe that takes twelve steps and saves after every six."""
    text = TINY.replace("max_steps = 8", f"max_steps = {STEPS}").replace("every = 3", "every = 6").replace('"tiny"', f'"{name}"')
    (folder / f"{name}.toml").write_text(text + HOOKS + more)
    return f"{name}.toml"


def alone(folder: Path, recipe: str, processes: int) -> End:
    """The end of the same run outside SLURM."""
    command = [sys.executable, "-m", "forge_train", "launch", "local", recipe, f"--processes={processes}", "--job.dir=alone"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return end_of(folder / "alone/checkpoints")


def checkpoints(run: Path) -> list[int]:
    """Steps of the committed checkpoints, oldest first. Nothing else is there that looks like a checkpoint."""
    names = [path.name for path in (run / "checkpoints").iterdir()] if (run / "checkpoints").exists() else []
    assert not [name for name in names if name.startswith(("damaged-", "superseded-"))]
    return sorted(entry.step for entry in committed(names))


def test_fault_28_sigterm_at_any_moment_leads_to_one_complete_checkpoint_and_one_requeue(
    slurm: Slurm, work: Path, warned: tuple[str, Path]
) -> None:
    file = recipe(
        work, "moments", '\n[[hooks]]\nname = "./moments.py:Moments"\n[checkpoint.store]\nname = "./moments.py:Probing"\n'
    )
    run = work / "runs/moments"
    job = slurm.submit(work, file, "--nodes=2", "--ranks-per-node=1")
    log, output = run / f"slurm/{job}/rank-00000.log", work / f"moments-{job}.out"
    wait_until(log.exists, 60, "the ranks start")
    assert slurm.run("scancel", "--signal=TERM", job).returncode == 0  # 1. while they start
    seen: list[tuple[int, list[int]]] = []

    def note() -> bool:
        """Notes the checkpoints that each start left, and lets the next one begin."""
        about = slurm.hurry(job)
        if about["JobState"] == "PENDING" and (not seen or seen[-1][0] != int(about["Restarts"])):
            seen.append((int(about["Restarts"]), checkpoints(run)))
        return about["JobState"] in ("COMPLETED", "FAILED")

    wait_until(note, 300, "the run finishes")
    assert slurm.job(job)["JobState"] == "COMPLETED", output.read_text()
    assert [start for start, _ in seen] == [1, 2, 3, 4], "each signal led to one requeue"
    after = [steps for _, steps in seen]
    assert after[0] == [] and after[1] == [3], "2. in a step: that step is finished and saved"
    assert after[2] in ([3, 6], [3, 6, 7]), "3. in a save: it is finished, and at most one step more"
    assert after[3] == after[2], "4. a second signal in the last save: it leaves nothing behind"
    assert checkpoints(run)[-1] == STEPS
    said = output.read_text()
    assert said.count("; requeued") == 4 and said.rstrip().endswith(f"job {job} ended with code 0; not requeued")
    assert differences(end_of(run / "checkpoints"), alone(work, file, 2)) == []


def test_fault_31_only_what_can_go_on_is_requeued(slurm: Slurm, work: Path, warned: tuple[str, Path], reference: End) -> None:
    """A warning before the time limit: once. An invalid recipe, scancel, and the end of a run: never."""
    one = [*ONE, f"--environment.MOMENTS={work}"]
    wrong = slurm.submit(work, recipe(work, "wrong"), *one, '--slurm.options={hold=""}')
    (work / "wrong.toml").write_text((work / "wrong.toml").read_text().replace("max_steps", "most_steps"))
    assert slurm.run("scontrol", "release", wrong).returncode == 0
    about = slurm.wait_for(wrong, "FAILED")
    assert (about["ExitCode"], about["Restarts"]) == ("2:0", "0")
    assert f"job {wrong} ended with code 2; not requeued" in (work / f"wrong-{wrong}.out").read_text()

    canceled = slurm.submit(work, recipe(work, "canceled", HOLD), *one)
    wait_until((work / "held").exists, 60, "the run trains")
    assert slurm.run("scancel", canceled).returncode == 0
    about = slurm.wait_for(canceled, "CANCELLED")
    said = work / f"canceled-{canceled}.out"
    wait_until(lambda: "SLURM has canceled or requeued this job itself" in said.read_text(), 60, "the script ends")
    assert about["Restarts"] == "0" and checkpoints(work / "runs/canceled") == [5], "it saved within KillWait"

    job, folder = warned
    about = slurm.wait_for(job, "COMPLETED", seconds=200)
    output = (folder / f"warned-{job}.out").read_text()
    assert about["Restarts"] == "1" and output.count("; requeued") == 1 and "ended with code 75; requeued" in output
    assert output.rstrip().endswith("ended with code 0; not requeued")
    assert checkpoints(folder / "runs/warned") == [5, 6, STEPS], "the warning came while it waited before step 5"
    assert differences(end_of(folder / "runs/warned/checkpoints"), reference) == []


def test_an_array_of_a_sweep_restarts_only_unfinished_members(slurm: Slurm, work: Path) -> None:
    recipe(work, "member", '\n[[hooks]]\nname = "./moments.py:Members"\n')
    (work / "grid.toml").write_text('recipe = "member.toml"\n[vary]\njob.seed = [0, 1, 2]\n[search]\nmetric = "loss"\n')
    script = slurm.run(sys.executable, "-m", "forge_train", "sweep", "grid.toml", "--slurm", folder=work)
    assert script.returncode == 0, script.stderr
    (work / "job.sh").write_text(script.stdout)
    points = [work / f"sweeps/grid/points/seed={seed}" for seed in range(3)]

    def submitted(*options: str) -> str:
        return slurm.run("sbatch", "--parsable", *options, "job.sh", folder=work).stdout.strip()

    array = submitted()
    over = [slurm.wait_for(f"{array}_{task}", "COMPLETED", "FAILED", seconds=150) for task in range(3)]
    assert [task["Restarts"] for task in over] == ["0", "1", "0"], "only the one that was asked to stop"
    outcomes = [outcome_of(point) for point in points]
    assert [outcome.starts for outcome in outcomes] == [1, 2, 2], "the sweep has tried the killed one once more"
    assert [outcome.status == "finished" for outcome in outcomes] == [True, True, False]
    before = [read_metrics(point / "metrics.jsonl") for point in points]

    again = submitted("--export=ALL,MOMENTS_OVER=1")
    for task in range(3):
        assert slurm.wait_for(f"{again}_{task}", "COMPLETED", "FAILED", seconds=150)["JobState"] == "COMPLETED"
    assert [outcome_of(point).status for point in points] == ["finished"] * 3
    assert [outcome_of(point).starts for point in points] == [1, 2, 3], "the killed one went on"
    after = [read_metrics(point / "metrics.jsonl") for point in points]
    assert after[:2] == before[:2] and max(row["step"] for row in after[2]) == STEPS
    assert (work / "sweeps/grid/logs/seed=2.log").read_text().count("resuming after step 6") == 2


def test_fault_14_a_node_that_is_lost_but_computes_cannot_write_to_the_run_that_went_on(
    slurm: Slurm, work: Path, reference: End
) -> None:
    file = recipe(work, "lost", HOLD + "step = 7\n")
    run = work / "runs/lost"
    job = slurm.submit(work, file, *ONE, f"--environment.MOMENTS={work}")
    wait_until((work / "held").exists, 60, "the first start is in its eighth step")
    node = (work / "held").read_text()
    assert checkpoints(run) == [6]
    slurm.lose(node)
    about = slurm.wait_for(job, "COMPLETED", seconds=150)
    assert about["Restarts"] == "1" and about["BatchHost"] != node
    log = run / f"slurm/{job}/rank-00000.log"
    assert log.read_text().count("resuming after step 6") == 1

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted((run / "checkpoints").rglob("*")) if path.is_file()}

    before, rows = files(), read_metrics(run / "metrics.jsonl")
    (work / "go").touch()  # the task on the lost node still computes
    wait_until(lambda: "has taken over the run's directory" in log.read_text(), 60, "the old task ends")
    assert log.read_text().count("ERROR: another job, process ") == 1
    slurm.start(node)
    slurm.wait_until_idle()  # also of the old task
    assert files() == before and read_metrics(run / "metrics.jsonl") == rows, "it has written nothing"
    assert slurm.job(job)["Restarts"] == "1", "and has not requeued the job"
    assert differences(end_of(run / "checkpoints"), reference) == []
