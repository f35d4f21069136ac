"""Campaigns on a cluster: one job per entry, collected when the command is started again. SLURM's programs are stand-ins."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forge_lab.campaigns import command as bench_command
from forge_train.cli import main
from lab.campaigns import LAYOUTS, campaign_of, lines, write_metrics, write_report
from train.launch.cluster_programs import FakeSlurm, fake_slurm

ONE, TWO, TENSOR = "layout=fsdp_world=1", "layout=fsdp_world=2", "layout=tp_world=2"
CLUSTER = '[slurm]\npartition = "gpu"\ngpus_per_node = 2\ntime = "9:00:00"\nnodes = 7\n'
COMMAND = ("layouts.toml", "--cluster", "cluster.toml")
SBATCH = """#!/bin/bash
number=$(( $(cat "$RECORDS/number" 2>/dev/null || echo 40) + 1 ))
echo $number > "$RECORDS/number"
cat > "$RECORDS/script-$number"
comment=$(sed -n 's/^#SBATCH --comment="\\?\\([^"]*\\)"\\?$/\\1/p' "$RECORDS/script-$number")
echo "$number|PENDING|$comment" >> "$JOBS"
echo $number
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = fake_slurm(tmp_path / "slurm")
    (fake.folder / "bin/sbatch").write_text(SBATCH)
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    campaign_of(Path.cwd())
    Path("cluster.toml").write_text(CLUSTER)
    return fake


def forge(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    return int(end.value.code or 0)


def folder(name: str) -> Path:
    return Path("benches/layouts/entries") / name


def job_of(name: str) -> str:
    return str(json.loads((folder(name) / "job.json").read_text())["job"])


def script_of(slurm: FakeSlurm, name: str) -> str:
    return (slurm.folder / f"script-{job_of(name)}").read_text()


def end(slurm: FakeSlurm, name: str, code: int | None, note: str = "not requeued", text: str = "", queued: bool = False) -> None:
    """What a job leaves: the words of its script, the output of its ranks, and metrics if all went well."""
    job, jobs = job_of(name), slurm.folder / "jobs"
    if not queued:
        jobs.write_text("".join(line for line in jobs.read_text().splitlines(keepends=True) if not line.startswith(f"{job}|")))
    words = f"2026-11-26T10:00:00 job {job}, start 1: 1 x 2 ranks\n"
    words += f"2026-11-26T10:03:00 job {job} ended with code {code}; {note}\n" if code is not None else ""
    (folder(name) / f"{name}-{job}.out").write_text(words)
    ranks = folder(name) / "run/slurm" / job
    ranks.mkdir(parents=True)
    (ranks / "rank-00000.log").write_text(text)
    if code == 0:
        write_metrics(folder(name) / "run", lines([0.5] * 6, device_memory=3e9))
        write_report(folder(name) / "run", "A GPU")


def statuses() -> list[str]:
    return [entry["status"] for entry in json.loads(Path("benches/layouts/results.json").read_text())["entries"]]


def test_each_entry_is_a_job_of_its_own_size_and_time(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert forge(*COMMAND, "--slurm.account=lab") == 75
    out = capsys.readouterr().out
    assert "3 jobs are pending or running" in out and statuses() == ["waiting"] * 3
    found = {name: dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script_of(slurm, name), re.MULTILINE)) for name in (ONE, TWO)}
    shown = ("nodes", "ntasks-per-node", "gpus-per-node", "time", "partition", "account", "job-name")
    assert [found[ONE][key] for key in shown] == ["1", "1", "1", "4", "gpu", "lab", ONE]  # two minutes, and two for the warning
    assert [found[TWO][key] for key in shown[:3]] == ["1", "2", "2"]
    assert str((folder(ONE) / "recipe.toml").absolute()) in script_of(slurm, ONE)
    assert "not requeued again after 0 requeues" in script_of(slurm, ONE)
    entry = json.loads((folder(TWO) / "entry.json").read_text())
    assert entry["ranks_per_node"] == 2


def test_ends_are_collected_and_only_what_is_left_is_submitted(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert forge(*COMMAND) == 75
    end(slurm, ONE, 0)
    end(slurm, TWO, 8, text="error: rank 1 on n2 ran out of memory in step 2\n")
    assert forge(*COMMAND) == 75 and statuses() == ["finished", "out of memory", "waiting"]
    assert "rank 1 on n2 ran out of memory" in Path("benches/layouts/table.md").read_text()
    (row,) = json.loads(Path("benches/layouts/calibration.json").read_text())["rows"]
    assert (row["entry"], row["device"], row["peak_memory_bytes"], row["ranks_per_node"]) == (ONE, "device", 3_000_000_000, 1)
    end(slurm, TENSOR, 75, "not requeued again after 0 requeues (slurm.max_requeues). Submit it again to continue")
    assert forge(*COMMAND) == 0 and statuses()[2] == "time limit"
    assert (slurm.folder / "number").read_text() == "43\n"
    assert forge(*COMMAND, "--retry=oom") == 75 and job_of(TWO) == "44"


def test_a_canceled_job_and_a_lost_one(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """A person canceled the first; nobody knows what became of the second; the third was refused on its node."""
    assert forge(*COMMAND) == 75
    end(slurm, ONE, 75, "SLURM has canceled or requeued this job itself")
    end(slurm, TWO, None)
    end(slurm, TENSOR, 2, text="error: data.sources.0.path: no\n")
    assert forge(*COMMAND) == 75
    assert "job 41 was canceled" in capsys.readouterr().out
    assert statuses() == ["waiting", "failed", "waiting"], "the first and the refused one have new jobs"
    assert (job_of(ONE), job_of(TENSOR)) == ("44", "45")
    assert "job 42 is not in the queue and has recorded no end" in Path("benches/layouts/table.md").read_text()


def test_a_changed_entry_is_not_submitted_beside_its_earlier_job(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert forge(*COMMAND) == 75
    metrics = folder(TWO) / "run/metrics.jsonl"
    metrics.write_text("of the running job")
    assert forge(*COMMAND, "--optimizer.lr=3e-2") == 2
    assert "job 41 still runs" in capsys.readouterr().err and metrics.is_file()
    (slurm.folder / "jobs").write_text("")
    assert forge(*COMMAND, "--optimizer.lr=3e-2") == 75 and job_of(TWO) == "45"


def test_ranks_that_are_no_whole_nodes_are_refused(slurm: FakeSlurm) -> None:
    Path("layouts.toml").write_text(LAYOUTS.replace("world = [1, 2]", "world = [1, 2, 4]"))
    Path("cluster.toml").write_text(CLUSTER.replace("gpus_per_node = 2", "gpus_per_node = 3"))
    assert forge(*COMMAND, "--only=*fsdp*") == 75
    assert statuses()[:3] == ["waiting", "waiting", "refused"]
    assert "4 ranks are not whole nodes of 3" in Path("benches/layouts/table.md").read_text()


def test_waiting_for_jobs(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []

    def sleep(asked: Any) -> None:
        waited.append(asked)
        if len(waited) == 2:
            for name in (ONE, TWO, TENSOR):
                end(slurm, name, 0)

    monkeypatch.setattr(bench_command, "_sleep", sleep)
    assert forge(*COMMAND, "--wait") == 0 and statuses() == ["finished"] * 3 and len(waited) == 2


def test_an_array_and_a_cluster_without_slurm_are_refused(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forge(*COMMAND, "--slurm.array=0-3") == 2 and "one job per entry" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert forge(*COMMAND) == 2 and "squeue" in capsys.readouterr().err
