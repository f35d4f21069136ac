"""`forge-train runs`, `runs diff`, `runs log`: what they print, and what they refuse."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from forge_train.cli import main
from forge_train.recipe.load import load_recipe
from train.many_runs.records import begin, end, first_start, log, second_start

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Exit code, output and errors of `forge-train runs ...` in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["runs", *arguments])
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return run


def table(text: str) -> dict[str, dict[str, str]]:
    columns, *rows = (line.split("\t") for line in text.splitlines())
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}


@pytest.fixture
def some(tmp_path: Path) -> Path:
    """Two runs in `runs`, one deeper, and folders that are none."""
    first_start(tmp_path / "runs" / "good")
    second_start(tmp_path / "runs" / "good")
    first_start(tmp_path / "runs" / "sweep" / "points" / "lr=1")
    log(tmp_path / "runs" / "old", 3, 9)
    for name in ("empty", ".hidden", "good/previous-1", "old/deeper"):
        (tmp_path / "runs" / name).mkdir(parents=True, exist_ok=True)
    log(tmp_path / "runs" / ".hidden", 1, 1)
    log(tmp_path / "runs" / "good" / "previous-1", 1, 1)
    return tmp_path / "runs"


def test_runs_are_listed(say: Say, some: Path) -> None:
    code, said, _ = say()
    rows = table(said)
    assert code == 0 and list(rows) == ["good", "old", "sweep/points/lr=1"]
    good = rows["good"]
    assert (good["state"], good["step"], good["loss"], good["lr"], good["left"]) == ("finished", "40/100", "5.0000", "0.01", "")
    assert (good["restarts"], good["goodput"]) == ("1", f"{80 / 186:.1%}")
    shares = {"down": 49, "start-up": 27, "checkpoints": 12, "repeated steps": 10, "evaluation": 8}
    assert good["lost to"] == ", ".join(f"{cause} {seconds / 186:.1%}" for cause, seconds in shares.items())
    assert [rows["old"][name] for name in ("state", "step", "restarts", "goodput")] == ["unknown", "3/?", "?", "?"]
    lost = rows["sweep/points/lr=1"]
    assert lost["state"] == "failed" and lost["remarks"].startswith("crashed: process 7 on elsewhere has written nothing for ")
    assert say("list", "runs")[1] == said and list(table(say("runs/good")[1])) == ["good"]
    assert list(table(say("runs/sweep")[1])) == ["points/lr=1"]


def test_the_list_for_programs(say: Say, some: Path) -> None:
    code, said, _ = say("--json")
    good, old, _ = json.loads(said)
    assert code == 0 and good["run"] == "runs/good" and good["state"] == good["why"] == "finished"
    assert (good["step"], good["max_steps"], good["restarts"], good["rollbacks"]) == (40, 100, 1, 0)
    assert good["goodput"] == pytest.approx(80 / 186) and good["wall_seconds"] == 186.0
    assert good["lost_seconds"] == {
        "start-up": 27.0, "repeated steps": 10.0, "checkpoints": 12.0, "evaluation": 8.0, "other hooks": 0.0, "down": 49.0
    }  # fmt: skip
    assert old["goodput"] is old["wall_seconds"] is old["lost_seconds"] is old["restarts"] is old["process"] is None
    assert set(good) == set(old)


def test_a_loss_that_is_not_finite_is_text_for_programs(say: Say, tmp_path: Path) -> None:
    begin(tmp_path / "runs" / "x", "a", 0, 1)
    log(tmp_path / "runs" / "x", 1, 2, "nan")  # type: ignore[arg-type]
    assert json.loads(say("--json")[1])[0]["loss"] == "nan" and table(say()[1])["x"]["loss"] == "nan"


def test_links_to_runs_are_followed_but_no_circles(say: Say, some: Path, tmp_path: Path) -> None:
    first_start(tmp_path / "scratch" / "far")
    (some / "linked").symlink_to(tmp_path / "scratch" / "far")
    (some / "empty" / "up").symlink_to(some)
    (some / "broken").symlink_to(tmp_path / "nowhere")
    assert list(table(say()[1])) == ["good", "linked", "old", "sweep/points/lr=1"]


def test_what_has_no_runs_is_refused(say: Say, tmp_path: Path) -> None:
    code, _, said = say()
    assert code == 2 and "runs is not a directory: give a folder of runs" in said
    (tmp_path / "runs").mkdir()
    code, _, said = say()
    assert code == 2 and "runs has no run: no directory in it has metrics.jsonl" in said
    (tmp_path / "file").write_text("")
    code, said, _ = say("file", "--json")
    assert code == 2 and json.loads(said)["ok"] is False
    assert say("list", "--watch", "--json")[0] == 2 and say("--interval", "0")[0] == 2
    assert say("runs", "more")[0] == 2


def test_a_run_that_vanishes_meanwhile_is_a_row(some: Path, tmp_path: Path) -> None:
    from forge_train.runs.overview import overview, run_directories

    found = run_directories(some)
    shutil.rmtree(some / "good")
    assert overview(found[0], 0.0).state == "unknown" and found[0].name == "good"


def recipe(run: Path, *overrides: str) -> Path:
    run.mkdir(parents=True)
    (run / "config.toml").write_text(load_recipe("debug", overrides).as_toml())
    return run


def test_two_runs_are_compared(say: Say, tmp_path: Path) -> None:
    one, other = recipe(tmp_path / "one"), recipe(tmp_path / "other", "--optimizer.lr=0.5")
    log(one, 10, 1, 2.0)
    log(one, 20, 2, 1.5)
    log(other, 10, 1, 7.25, save=1.0)
    log(other, 20, 2, 9.0)
    with (other / "metrics.jsonl").open("a") as file:
        file.write(
            '{"rewind": 12, "time": "2026-03-01T08:00:09+00:00"}\n{"step": 11, "time": "2026-03-01T08:00:10+00:00", "x": 1}\n'
        )
    code, said, _ = say("diff", "one", "other")
    assert code == 1 and said.startswith("1 key differs\nkey\tone\tother\noptimizer.lr\t0.003\t0.5\n\n")
    assert "loss\t1.5 (step 20)\t7.25 (step 10)\n" in said and "x\t?\t1 (step 11)\n" in said
    code, said, _ = say("diff", "one", "other", "--json")
    found = json.loads(said)
    assert [change["key"] for change in found["recipe"]] == ["optimizer.lr"] and code == 1
    assert found["metrics"]["loss"] == {"one": {"step": 20, "value": 1.5}, "other": {"step": 10, "value": 7.25}}
    assert found["metrics"]["x"] == {"one": None, "other": {"step": 11, "value": 1.0}}
    assert "time" not in found["metrics"] and "step" not in found["metrics"]


def test_equal_recipes_are_no_difference(say: Say, tmp_path: Path) -> None:
    recipe(tmp_path / "one")
    recipe(tmp_path / "other")
    code, said, _ = say("diff", "one", "other")
    assert code == 0 and said.startswith("no key differs\n")


def test_one_run_is_not_compared(say: Say, tmp_path: Path) -> None:
    recipe(tmp_path / "one")
    (tmp_path / "link").symlink_to("one")
    for other in ("one", "./one", "link"):
        code, _, said = say("diff", "one", other)
        assert code == 2 and f"{Path('one')} and {Path(other)} are the same run; give two different ones" in said
    code, _, said = say("diff", "one", "nowhere")
    assert code == 2 and "nowhere has no config.toml, so it is not a run's directory" in said
    recipe(tmp_path / "old")
    (tmp_path / "old" / "config.toml").write_text("[train]\nsteps = 3\n")
    code, _, said = say("diff", "one", "old")
    assert code == 2 and "cannot be compared by this version of Forge" in said and "train.steps" in said


def test_logs_are_merged(say: Say, tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    for rank, second in ((0, 2), (11, 1)):
        text = f"2026-03-01T08:00:0{second}.000Z rank {rank}/12 INFO forge: x\nmore\n"
        (tmp_path / "run" / "logs" / f"rank-{rank:05d}.log").write_text(text)
    code, said, _ = say("log", "run")
    first, second = "2026-03-01T08:00:01.000Z rank 11/12 INFO forge: x", "2026-03-01T08:00:02.000Z rank 0/12 INFO forge: x"
    assert code == 0 and said.splitlines() == [f"11 | {first}", "11 | more", f" 0 | {second}", " 0 | more"]
    assert say("log", "run", "--tail", "1")[1] == " 0 | more\n"
    assert say("log", "run", "--rank", "11", "--rank=0", "--tail=3")[1].splitlines()[0] == "11 | more"
    assert say("log", "run", "--rank=0")[1].splitlines() == [f"0 | {second}", "0 | more"]
    code, _, said = say("log", "run", "--rank=3")
    assert code == 2 and "has no log of rank 3; it has those of ranks 0, 11" in said
    assert say("log", "nowhere")[0] == 2 and say("log", "run", "--tail=0")[0] == 2


def test_no_torch(some: Path) -> None:
    """Neither the list nor the logs import it: only a process without it can tell."""
    code = "import sys; sys.argv[1:] = {!r}\nfrom forge_train.cli import main\ntry:\n main()\nexcept SystemExit as end:\n"
    code += " assert not end.code, end.code\nassert 'torch' not in sys.modules, 'imported'"
    (some / "good" / "logs").mkdir()
    (some / "good" / "logs" / "rank-00000.log").write_text("x\n")
    for arguments in (["runs", str(some)], ["runs", "log", str(some / "good")], ["runs", "--help"]):
        done = subprocess.run([sys.executable, "-c", code.format(arguments)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def watching(some: Path, terminal: bool) -> str:
    """What `--watch` draws until Ctrl-C, with code 0, while a run goes on."""
    command = [sys.executable, "-m", "forge_train", "runs", str(some), "--watch", "--interval=0.2"]
    here, there = pty.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        command, stdout=there, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "200", "TERM": "xterm"}
    )
    os.close(there)
    os.set_blocking(here, False)
    said, deadline, logged = "", time.monotonic() + 60, False
    while time.monotonic() < deadline and "77/100" not in said:
        time.sleep(0.05)
        with suppress(BlockingIOError):
            said += os.read(here, 2**16).decode()
        if "35/100" in said and not logged:
            begin(some / "sweep" / "points" / "lr=1", "b", 500, 510, 76)
            end(some / "sweep" / "points" / "lr=1", "b", 600, 77, 75, "asked to stop")
            logged = True
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    os.close(here)
    assert process.returncode == 0 and errors == b"", errors
    return said


@pytest.mark.parametrize("terminal", [True, False])
def test_watching_refreshes_and_ends_with_control_c(some: Path, terminal: bool) -> None:
    said = watching(some, terminal)
    assert "35/100" in said and "77/100" in said and "preempted" in said
