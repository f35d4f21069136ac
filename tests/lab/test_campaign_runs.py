"""Runs of entries: bounded in time, killed with their children, kept, and run again when they should be."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_lab.campaigns import command as bench_command
from forge_lab.campaigns import execution, records
from forge_lab.campaigns.campaign import Campaign
from forge_lab.campaigns.execution import BoundedEnd, LocalRunner, run_bounded
from forge_lab.campaigns.records import locked, read_attempt
from forge_lab.campaigns.results import read_result
from forge_lab.sweep.execution import StopRequests
from forge_train.cli import main
from lab.campaigns import LAYOUTS, FakeProcesses, campaign_of

ONE, TWO, TENSOR = "layout=fsdp_world=1", "layout=fsdp_world=2", "layout=tp_world=2"
ALL = [ONE, TWO, TENSOR]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProcesses:
    """The command in a directory with `layouts.toml`, on a machine without accelerators; its processes are stand-ins."""
    campaign_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = FakeProcesses()
    monkeypatch.setattr(
        bench_command, "_run_here", lambda campaign, entries, say, asked: run(campaign, found, entries, say, asked)
    )
    return found


def run(
    campaign: Campaign,
    begin: Any,
    entries: Any = None,
    say: Any = lambda line: None,
    asked: StopRequests | None = None,
    **more: Any,
) -> dict[str, str]:
    machine: dict[str, Any] = {"accelerators": 0, "memory": 2**40, **more}
    runner = LocalRunner(campaign, say, asked=asked or StopRequests(), begin=begin, **machine)
    runner.run(campaign.entries if entries is None else entries)
    return runner.not_run


def forge(*arguments: str) -> int:
    """The exit code of the command."""
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    return int(end.value.code or 0)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


CHILDREN = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
print("started", flush=True)
time.sleep(float(sys.argv[2]))
"""


def test_the_time_limit_ends_a_command_with_its_children(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", CHILDREN, str(tmp_path / "pids"), "600"]
    ended = run_bounded(command, tmp_path / "log", 1.0, StopRequests())
    assert (ended.code, ended.timed_out, ended.stopped) == (-9, True, False) and 1.0 <= ended.seconds < 10
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    until(lambda: not any(map(alive, pids)))
    assert (tmp_path / "log").read_text() == "started\n"


def test_children_that_a_command_leaves_behind_end_as_well(tmp_path: Path) -> None:
    ended = run_bounded([sys.executable, "-S", "-c", CHILDREN, str(tmp_path / "pids"), "0"], tmp_path / "log", 60, StopRequests())
    assert ended == BoundedEnd(0, ended.seconds)
    until(lambda: not alive(int((tmp_path / "pids").read_text().split()[1])))


def test_a_stop_request_reaches_the_command_which_may_end_by_itself(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nprint('on', flush=True)\ntime.sleep(60)"
    )
    asked = StopRequests()

    def look() -> None:
        if (tmp_path / "log").read_text():
            asked.times = 1

    ended = run_bounded([sys.executable, "-S", "-c", code], tmp_path / "log", 60, asked, look)
    assert (ended.code, ended.stopped, ended.timed_out) == (7, True, False)


@pytest.mark.parametrize("requests", [1, 2])
def test_a_command_that_ignores_stop_requests_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int) -> None:
    """After a while, and at a second request at once."""
    monkeypatch.setattr(execution, "GRACE_SECONDS", 0.3 if requests == 1 else 600.0)
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('on', flush=True)\ntime.sleep(60)"
    asked = StopRequests()

    def look() -> None:
        if (tmp_path / "log").read_text():
            asked.times = requests if asked.times else 1

    ended = run_bounded([sys.executable, "-S", "-c", code], tmp_path / "log", 60, asked, look)
    assert (ended.code, ended.stopped) == (-9, True) and ended.seconds < 30


@pytest.mark.skipif(sys.platform != "linux", reason="needs the death signal of Linux")
def test_a_command_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom forge_lab.campaigns.execution import run_bounded\n"
        "from forge_lab.sweep.execution import StopRequests\n"
        "command = [sys.executable, '-S', '-c', *sys.argv[1:], '600']\n"
        "run_bounded(command, Path(sys.argv[2] + '.log'), 600, StopRequests())"
    )
    outer = subprocess.Popen([sys.executable, "-c", code, CHILDREN, str(tmp_path / "pids")])
    until(lambda: (tmp_path / "pids").is_file() and (tmp_path / "pids").read_text().count(" "))
    outer.kill()
    outer.wait()
    command, child = map(int, (tmp_path / "pids").read_text().split())
    try:
        until(lambda: not alive(command))
    finally:
        os.kill(child, signal.SIGKILL)  # ranks of a run ask for the same signal; this child does not


def test_entries_run_one_after_the_other_with_their_recipes(tmp_path: Path) -> None:
    campaign, fake = campaign_of(tmp_path), FakeProcesses()
    records.write_campaign(campaign)
    assert run(campaign, fake) == {} and fake.started == ALL
    assert fake.commands[0] == [
        sys.executable,
        "-m",
        "forge_train",
        "run",
        str(campaign.folder(campaign.entries[0]) / "recipe.toml"),
    ]
    assert fake.commands[1][-1] == "--processes=2"
    for entry in campaign.entries:
        attempt = read_attempt(campaign.folder(entry))
        assert attempt is not None and (attempt.code, attempt.limit_seconds, attempt.timed_out) == (0, 120.0, False)
        assert attempt.oom_kills in (0, None) and read_result(campaign.folder(entry), 2).status == "finished"
        assert (campaign.folder(entry) / "run/data").resolve() == campaign.directory / "data"


def test_the_kernels_count_of_kills_is_that_of_the_time_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter is read before and after."""
    counter = iter([7, 9])
    monkeypatch.setattr(execution, "oom_kills", lambda: next(counter))
    campaign, fake = campaign_of(tmp_path), FakeProcesses(codes={ONE: (-9, "")})
    run(campaign, fake, campaign.entries[:1])
    result = read_result(campaign.folder(campaign.entries[0]), 2)
    assert result.status == "out of memory" and "killed 2" in result.message


def test_a_refused_entry_starts_nothing(tmp_path: Path) -> None:
    campaign, fake = campaign_of(tmp_path, LAYOUTS.replace("world = [1, 2]", "world = [1, 3]")), FakeProcesses()
    run(campaign, fake)
    assert fake.started == [ONE]
    result = read_result(campaign.folder(campaign.entries[1]), 2)
    assert result.status == "refused" and result.message == campaign.entries[1].refusal


def test_a_machine_that_is_too_small_is_no_result(tmp_path: Path) -> None:
    campaign, fake = campaign_of(tmp_path), FakeProcesses()
    why = run(campaign, fake, accelerators=1)
    assert fake.started == [ONE] and why == dict.fromkeys((TWO, TENSOR), "it needs 2 accelerators, and this machine has 1")
    assert not campaign.folder(campaign.entries[1]).exists()
    why = run(campaign, fake, memory=1000)
    assert fake.started == [ONE] and set(why) == set(ALL) and "weights and gradients take" in why[ONE]
    parameters = 61 * 16 * 2 + 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24 + 2 * 16) + 16  # of TINY
    assert run(campaign, fake, memory=8 * parameters - 1).keys() == set(ALL) and run(campaign, fake, memory=8 * parameters) == {}


def test_the_command_keeps_results_and_runs_what_has_changed(fake: FakeProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    assert forge("layouts.toml") == 0 and fake.started == ALL
    out = capsys.readouterr().out
    assert "tables: benches/layouts/table.md" in out and out.count("finished") == 3
    assert forge("layouts.toml") == 0 and fake.started == ALL
    assert "3 of 3 entries already have a result" in capsys.readouterr().out
    assert forge("layouts.toml", "--retry=finished", "--only=*tp*") == 0 and fake.started == [*ALL, TENSOR]
    Path("layouts.toml").write_text(LAYOUTS.replace("parallel.tp = 2", "parallel.tp = 2\nmodel.ffn_dim = 32"))
    assert forge("layouts.toml") == 0 and fake.started == [*ALL, TENSOR, TENSOR]
    assert forge("layouts.toml", "--optimizer.lr=3e-2") == 0 and fake.started == [*ALL, TENSOR, TENSOR, *ALL]
    Path("layouts.toml").write_text(
        LAYOUTS.replace("skip = 2", "skip = 4").replace("parallel.tp = 2", "parallel.tp = 2\nmodel.ffn_dim = 32")
    )
    assert forge("layouts.toml", "--optimizer.lr=3e-2") == 0 and len(fake.started) == 8
    entries = json.loads(Path("benches/layouts/results.json").read_text())["entries"]
    assert [entry["measured"] for entry in entries] == [2, 2, 2]


def test_results_that_are_tried_again(fake: FakeProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    fake.codes |= {ONE: (1, "Traceback\nRuntimeError: as meant"), TWO: (8, "a rank ran out of memory"), TENSOR: (-15, "")}
    assert forge("layouts.toml") == 1
    said = capsys.readouterr()
    assert "1 entries failed" in said.err and "RuntimeError: as meant" in said.out
    assert [word for word in ("out of memory", "time limit", "failed") if word not in said.out] == []
    assert forge("layouts.toml") == 1 and len(fake.started) == 3, "an entry that failed is still one that failed"
    fake.codes.clear()
    for status, name in (("oom", TWO), ("time-limit", TENSOR), ("failed", ONE)):
        assert forge("layouts.toml", f"--retry={status}") == (0 if status == "failed" else 1) and fake.started[-1] == name
    assert len(fake.started) == 6
    assert forge("layouts.toml", "--retry=oops") == 2 and "--retry oops" in capsys.readouterr().err
    assert forge("layouts.toml", "--retry=all") == 0 and len(fake.started) == 9


def test_a_longer_limit_gives_an_entry_another_try(fake: FakeProcesses) -> None:
    fake.codes[TWO] = (-15, "")
    assert forge("layouts.toml") == 0
    Path("layouts.toml").write_text(LAYOUTS.replace("limit_minutes = 2", "limit_minutes = 1"))
    assert forge("layouts.toml") == 0 and len(fake.started) == 3
    Path("layouts.toml").write_text(LAYOUTS.replace("limit_minutes = 2", "limit_minutes = 3"))
    assert forge("layouts.toml") == 0 and fake.started[3:] == [TWO]


def test_an_interruption_keeps_results_and_the_entry_runs_again(fake: FakeProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    fake.during = lambda name: os.kill(os.getpid(), signal.SIGINT) if name == TWO else None
    assert forge("layouts.toml") == 75
    assert "stopped by SIGINT" in capsys.readouterr().out and fake.started == [ONE, TWO]
    assert "2 waiting" in Path("benches/layouts/table.md").read_text()
    fake.during = lambda name: None
    assert forge("layouts.toml") == 0 and fake.started == [ONE, TWO, TWO, TENSOR]


def test_a_campaign_that_was_killed_leaves_no_result_behind(fake: FakeProcesses) -> None:
    """Its entry was prepared, and had written metrics."""

    class Killed(BaseException):
        pass

    def die(name: str) -> None:
        if name == TWO:
            (Path("benches/layouts/entries") / TWO / "run/metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
            raise Killed

    fake.during = die
    with pytest.raises(Killed):
        main(["bench", "layouts.toml"])
    fake.during = lambda name: None
    assert forge("layouts.toml") == 0 and fake.started == [ONE, TWO, TWO, TENSOR]
    metrics = (Path("benches/layouts/entries") / TWO / "run/metrics.jsonl").read_text()
    assert metrics.count('"step": 1,') == 1 and "step_seconds" in metrics.split("\n")[0]


def test_the_directory_of_another_campaign_and_foreign_files_are_refused(
    fake: FakeProcesses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forge("layouts.toml") == 0
    Path("other.toml").write_text(LAYOUTS)
    assert forge("other.toml", "--dir=benches/layouts") == 2
    assert "results of the campaign 'layouts', not of 'other'" in capsys.readouterr().err
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    assert forge("layouts.toml", "--dir=mine") == 2 and "thesis.txt" in capsys.readouterr().err
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.txt"] and len(fake.started) == 3
    assert forge("layouts.toml", "--dir=mine/thesis.txt") == 2 and "not a directory" in capsys.readouterr().err


def test_another_campaign_of_the_same_name_is_refused(fake: FakeProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    assert forge("layouts.toml") == 0
    Path("layouts.toml").write_text(
        LAYOUTS.replace("world = [1, 2]", "world = [1, 4]").replace('["fsdp", "tp"]', '["tp"]').partition("[[ex")[0]
    )
    Path("layouts.toml").write_text(Path("layouts.toml").read_text().replace("world = [1, 4]", "world = [4]"))
    assert forge("layouts.toml") == 2 and "without any entry of this one" in capsys.readouterr().err
    assert len(fake.started) == 3


def test_earlier_results_are_kept_aside(fake: FakeProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    """A forgotten option would otherwise cost what was measured."""
    out = Path("benches/layouts")
    assert forge("layouts.toml") == 0
    before = (out / "entries" / TWO / "entry.json").read_text()
    assert forge("layouts.toml", "--optimizer.lr=3e-2") == 0
    assert "3 entries with a result run again" in capsys.readouterr().out
    assert forge("layouts.toml", "--optimizer.lr=4e-2", "--only=*fsdp*") == 0
    assert sorted(path.name for path in (out / "earlier").iterdir()) == [
        f"{ONE}.1",
        f"{ONE}.2",
        f"{TWO}.1",
        f"{TWO}.2",
        f"{TENSOR}.1",
    ]
    assert (out / "earlier" / f"{TWO}.1/entry.json").read_text() == before
    assert (out / "earlier" / f"{TWO}.1/attempt.json").is_file() and (out / "earlier" / f"{TWO}.1/run/metrics.jsonl").is_file()


def test_a_damaged_record_is_written_again_and_results_are_kept(fake: FakeProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    assert forge("layouts.toml") == 0
    Path("benches/layouts/campaign.json").write_text('{"campaign": "lay')
    assert forge("--tables=benches/layouts") == 2 and "run the campaign's command again" in capsys.readouterr().err
    assert forge("layouts.toml") == 0 and len(fake.started) == 3
    assert forge("--tables=benches/layouts") == 0


def test_two_campaigns_in_one_directory_are_refused(fake: FakeProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(Path("benches/layouts")):
        assert forge("layouts.toml") == 2
    assert f"process {os.getpid()} on " in capsys.readouterr().err and fake.started == []
    assert forge("layouts.toml") == 0
    with locked(Path("benches/layouts")):
        assert forge("--tables=benches/layouts") == 2


def test_a_directory_that_cannot_be_written(fake: FakeProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert forge("layouts.toml", "--dir=file/below") == 2
    assert "--dir" in capsys.readouterr().err and fake.started == []


def test_a_full_disk_keeps_what_was_written(
    fake: FakeProcesses, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = records.replace_file

    def full(path: Path, content: bytes) -> None:
        if path.name == "attempt.json" and path.parent.name == TWO:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content)

    monkeypatch.setattr(records, "replace_file", full)
    assert forge("layouts.toml") == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error and "are kept" in error
    monkeypatch.setattr(records, "replace_file", real)
    assert forge("layouts.toml") == 0 and fake.started == [ONE, TWO, TWO, TENSOR]


def test_lists_and_json(fake: FakeProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    fake.codes[TWO] = (1, "x")
    assert forge("layouts.toml", "--only=*fsdp*", "--json") == 1
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert [entry["status"] for entry in document["entries"]] == [
        "finished",
        "failed",
        "waiting",
    ] and "started on 1 rank" in said.err
    assert forge("layouts.toml", "--list") == 0
    assert [line.split("\t")[-1] for line in capsys.readouterr().out.split("\n")[1:4]] == ["finished", "failed", "waiting"]
    assert forge("layouts.toml", "--list", "--json") == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert [(entry["ranks"], entry["layout"], entry["status"]) for entry in entries] == [
        (1, "1", "finished"),
        (2, "dp2", "failed"),
        (2, "tp2", "waiting"),
    ]
    assert forge("--list-campaigns", "--json") == 0
    assert {item["name"] for item in json.loads(capsys.readouterr().out)} >= {"mfu_scaling", "weak_scaling"}
    assert forge("layouts.toml", "--only=none") == 2 and "--only none" in capsys.readouterr().err
    for wrong, words in (
        (["--list", "--dry-run"], "exclude each other"),
        (["--wait"], "--cluster"),
        (["--slurm.time=3"], "--cluster"),
        (["--device", "h200"], "add --dry-run, or remove"),
        (["--list", "--retry", "failed"], "--list starts nothing, so --retry would have no effect"),
        (["--dry-run", "--retry", "failed", "--cluster", "c.toml"], "so --retry and --cluster would have no effect"),
    ):
        assert forge("layouts.toml", *wrong) == 2 and words in capsys.readouterr().err
    assert forge() == 2 and "CAMPAIGN is missing" in capsys.readouterr().err
    assert len(fake.started) == 2


def test_a_dry_run_has_the_memory_of_the_plan_and_the_refusals(
    fake: FakeProcesses, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("layouts.toml").write_text(LAYOUTS.replace("world = [1, 2]", "world = [1, 3]"))
    assert forge("layouts.toml", "--dry-run", "--json") == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    with pytest.raises(SystemExit):
        main(["plan", "tiny.toml", "--json"])
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert [entry["peak"] for entry in entries] == [rank["peak"]["bytes"], None, None]
    assert entries[0]["refusal"] is None and "train.global_batch" in entries[1]["refusal"]
    assert fake.started == [] and not Path("benches").exists()


def test_records_have_no_secrets_and_files_with_one_are_private(tmp_path: Path) -> None:
    secret = "https://user:hunter2secret@host/weights"
    campaign = campaign_of(tmp_path, LAYOUTS.replace("[sets.layout.fsdp]", f'start.weights = "{secret}"\n[sets.layout.fsdp]'))
    records.write_campaign(campaign)
    run(campaign, FakeProcesses(), campaign.entries[:1])
    folder = campaign.folder(campaign.entries[0])
    assert "hunter2secret" not in (folder / "entry.json").read_text() and "host/weights" in (folder / "entry.json").read_text()
    for path in (folder / "recipe.toml", campaign.directory / "campaign.toml"):
        assert "hunter2secret" in path.read_text() and path.stat().st_mode & 0o077 == 0
