"""`launch slurm --submit`: what is submitted, when nothing is, and what the user is told. SLURM's programs are stand-ins."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forge_core.errors import ForgeError
from forge_train.cli import main
from forge_train.launch.cluster import CheckedRun, check_run
from forge_train.launch.submission import submit_job
from train.launch.cluster_programs import FakeSlurm, fake_slurm

ARGUMENTS = ["launch", "slurm", "debug", "--nodes=2", "--ranks-per-node=1", "--submit"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = fake_slurm(tmp_path / "slurm")
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return fake


def submitted(*arguments: str) -> int:
    """The exit code of the command."""
    with pytest.raises(SystemExit) as end:
        main([*ARGUMENTS, *arguments])
    return int(end.value.code or 0)


def test_the_script_that_is_printed_is_the_script_that_is_submitted(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert submitted() == 0
    told = capsys.readouterr().out
    assert "submitted job 41: debug on 2 ranks" in told
    first = Path.cwd() / "runs/debug/slurm/41/rank-00000.log"
    assert f"tail -F {first}" in told and "scancel 41" in told and "squeue --jobs=41" in told
    with pytest.raises(SystemExit):
        main([item for item in ARGUMENTS if item != "--submit"])
    printed = capsys.readouterr().out
    assert (slurm.folder / "script").read_text() == printed
    assert (Path.cwd() / "runs/debug/slurm/41.sh").read_text() == printed
    assert slurm.calls("sbatch") == ["--parsable"]


def test_a_program_gets_the_number_of_the_job(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*(item for item in ARGUMENTS if item != "--submit"), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert not end.value.code and printed["job"] is None and slurm.calls("sbatch") == []
    assert submitted("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {**printed, "job": "41"} and document["script"] == (slurm.folder / "script").read_text()
    assert (document["name"], document["ranks"]) == ("debug", 2) and document["directories"] == [str(Path.cwd() / "runs/debug")]


def test_a_script_is_printed_without_slurm_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as end:
        main([item for item in ARGUMENTS if item != "--submit"])
    assert not end.value.code and capsys.readouterr().out.startswith("#!/bin/bash\n")
    assert list(tmp_path.iterdir()) == []


def test_a_refused_recipe_is_not_submitted(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """The world size is that of the job: 16 ranks have no whole micro-batch of the eight sequences."""
    assert submitted("--slurm.gpus_per_node=8", "--optimizer.lrr=1") == 2
    assert "optimizer.lrr" in capsys.readouterr().err
    main_arguments = ["launch", "slurm", "debug", "--nodes=2", "--ranks-per-node=8", "--submit"]
    with pytest.raises(SystemExit) as end:
        main(main_arguments)
    assert end.value.code == 2 and "train." in capsys.readouterr().err
    assert slurm.calls("sbatch") == [] and not Path("runs").exists()


def test_a_task_of_an_array_with_a_refused_recipe_is_found(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """Task 3 would have micro-batches of three sequences, which do not divide its four."""
    keys = ["--array=1-4", "--job.name=m-{task}", "--train.micro_batch={task}"]
    assert submitted(*keys) == 2
    assert "train.micro_batch" in capsys.readouterr().err and slurm.calls("sbatch") == []
    assert submitted("--array=1,2,4", *keys[1:]) == 0
    assert [(Path("runs") / f"m-{task}/slurm/41.sh").is_file() for task in (1, 2, 3, 4)] == [True, True, False, True]


@pytest.mark.parametrize("missing", ["sbatch", "squeue"])
def test_without_slurm_the_command_says_where_to_run_it(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    (slurm.folder / "bin" / missing).unlink()
    monkeypatch.setenv("PATH", str(slurm.folder / "bin"))
    assert submitted() == 2
    error = capsys.readouterr().err
    assert f"{missing} was not found on PATH" in error and "login node" in error
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            "--partition) to one of the cluster's partitions: gpu, long",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            "sacctmgr show",
        ),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "sinfo --format="),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            "slurm.time",
        ),
        ("sbatch: error: something else", "see the options of sbatch"),
    ],
)
def test_the_error_of_sbatch_is_passed_on_with_what_to_do(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], message: str, remedy: str
) -> None:
    monkeypatch.setenv("SBATCH_ERROR", message)
    assert submitted() == 2
    error = capsys.readouterr().err
    assert message in error and remedy in error
    assert list(Path("runs").rglob("*.sh")) == []


def run_here(*overrides: str) -> CheckedRun:
    return check_run("debug", overrides, 1)


def test_a_controller_that_does_not_answer_is_named_and_a_job_may_exist(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEPS", "30")
    with pytest.raises(ForgeError, match=r"did not answer sbatch within 1 s; it may have accepted the job") as refusal:
        submit_job(run_here(), "#!/bin/bash\n", seconds=1.0)
    assert "scontrol ping" in str(refusal.value)


def test_without_an_answer_of_squeue_nothing_is_submitted(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE", "1")
    with pytest.raises(ForgeError, match="nothing was submitted"):
        submit_job(run_here(), "#!/bin/bash\n")
    (slurm.folder / "bin/squeue").write_text("#!/bin/bash\nexec sleep 30\n")
    with pytest.raises(ForgeError, match="did not answer squeue within 1 s, and nothing was submitted"):
        submit_job(run_here(), "#!/bin/bash\n", seconds=1.0)
    assert slurm.calls("sbatch") == []


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUE_HOLD"])
@pytest.mark.parametrize("known", ["comment", "copy", "task of an array"])
def test_a_run_with_a_job_is_not_submitted_again(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], state: str, known: str
) -> None:
    here = Path.cwd()
    number, comment = "7", f"forge-train run in {here}/runs/debug"
    if known == "copy":
        comment = "(null)"
        (here / "runs/debug/slurm").mkdir(parents=True)
        (here / "runs/debug/slurm/7.sh").touch()
    if known == "task of an array":
        number, comment = "7_[0-3%2]", f"forge-train run in {here}/runs/seed-{{task}}"
    (slurm.folder / "jobs").write_text(f"5|RUNNING|(null)\n6|RUNNING|forge-train run in /another\n{number}|{state}|{comment}\n")
    assert submitted(*(["--job.name=seed-3"] if known == "task of an array" else [])) == 2
    error = capsys.readouterr().err
    assert f"job {number} ({state})" in error and "scancel 7" in error
    assert slurm.calls("sbatch") == []


def test_jobs_of_other_runs_do_not_count(slurm: FakeSlurm) -> None:
    here = Path.cwd()
    lines = ["5|RUNNING|(null)", f"6|RUNNING|forge-train run in {here}/runs/debug-2", f"7|RUNNING|{here}/runs/debug"]
    (slurm.folder / "jobs").write_text("\n".join(lines))
    assert submitted() == 0


def test_two_submissions_at_once_yield_one_job(slurm: FakeSlurm) -> None:
    """The second one asks for jobs only when the first one has submitted."""
    (slurm.folder / "bin/sbatch").write_text(
        '#!/bin/bash\nsleep 0.5\necho called >> "$RECORDS/sbatch"\n'
        f'echo "41|PENDING|forge-train run in {Path.cwd()}/runs/debug" >> "$JOBS"\necho 41\n'
    )
    results: list[str] = []

    def attempt() -> None:
        try:
            results.append(submit_job(run_here(), "#!/bin/bash\n"))
        except ForgeError as refusal:
            results.append(str(refusal))

    threads = [threading.Thread(target=attempt) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slurm.calls("sbatch") == ["called"]
    assert sorted(result.split()[0] for result in results) == ["41", "job"]


def test_a_job_does_not_inherit_the_variables_of_the_job_that_submits_it(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM_RESTART_COUNT of the outer job would make the first start an automatic restart."""
    (slurm.folder / "bin/sbatch").write_text('#!/bin/bash\nenv > "$RECORDS/environment"\necho 41\n')
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    monkeypatch.setenv("SLURM_CONF", "/etc/one.conf")
    assert submitted() == 0
    environment = (slurm.folder / "environment").read_text()
    assert "SLURM_RESTART_COUNT" not in environment and "SLURM_CONF=/etc/one.conf" in environment


def test_the_commands_import_no_torch(slurm: FakeSlurm) -> None:
    code = "import sys\nfrom forge_train.cli import main\n"
    code += (
        f"try:\n    main({ARGUMENTS!r})\nexcept SystemExit as end:\n    assert not end.code\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
