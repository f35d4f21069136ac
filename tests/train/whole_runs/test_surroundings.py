"""What a run meets around it: clocks that jump, a log on a full disk, another user's directory, secrets of its environment."""

import contextlib
import io
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forge_ckpt.store.local import LocalStore
from forge_core.terminal import size
from forge_parallel.launch.environment import Launch
from forge_train.commands.run import run_recipe
from forge_train.doctor.node import checkpoints
from forge_train.doctor.step import DoctorSettings
from forge_train.process.logs import logging_of
from forge_train.trackers import read_metrics
from train.runs import TINY, train

DAY = 86_400.0
LOGGED = "--hooks=[{name='log', every=1}, {name='save'}]"

FALLS = '''
from dataclasses import dataclass

from forge_core.component import Component
from forge_core.protocols.run import Hook


class Falling(Hook):
    def after_step(self, run, result):
        if run.state.step == 4:
            raise KeyError("a fault of the plugin")


@dataclass(frozen=True, kw_only=True)
class Falls(Component):
    """A hook that raises."""

    def build(self):
        return Falling()
'''


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "falls.py").write_text(FALLS)
    with contextlib.chdir(tmp_path):
        yield tmp_path


def forge(*overrides: str) -> tuple[int, str]:
    """`forge-train run tiny.toml` in this process: exit code, and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), logging_of(0, 1) as log:
        code = run_recipe("tiny.toml", overrides, False, Launch(), log)
    return code, said.getvalue()


@pytest.mark.slow
def test_fault_13_a_run_goes_on_though_the_clock_is_a_day_behind(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another node, whose clock is wrong: its files are older than those of the steps before."""
    expected = train(here / "tiny.toml", ["--job.dir=whole"])["weights"]
    real, offset = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + offset)
    for part, offset in ((3, DAY), (6, -DAY), (8, 0.0)):
        found = train(here / "tiny.toml", ["--job.dir=cut", LOGGED, f"--train.stop_at={part}"])
        assert found["step"] == part
        for path in (here / "cut" / "checkpoints").rglob("*"):
            if f"step-{part:08d}" in str(path):
                os.utime(path, (real() + offset,) * 2)
    assert found["weights"] == expected
    assert [entry["step"] for entry in read_metrics(here / "cut" / "metrics.jsonl")] == list(range(1, 9))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_fault_43_a_log_on_a_full_disk_is_one_warning(here: Path) -> None:
    (here / "full" / "logs").mkdir(parents=True)
    (here / "full" / "logs" / "rank-00000.log").symlink_to("/dev/full")
    code, said = forge("--job.dir=full", LOGGED)
    assert code == 0 and (here / "full" / "checkpoints" / "step-00000008").is_dir(), said
    assert "Traceback" not in said, said
    assert said.count("No space left on device") == 1 and "rank-00000.log cannot be written" in said, said
    assert [entry["step"] for entry in read_metrics(here / "full" / "metrics.jsonl")] == list(range(1, 9))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_fault_15_checkpoints_of_another_user_are_refused_before_anything_is_set_up(here: Path) -> None:
    assert forge("--train.stop_at=3")[0] == 0
    place = here / "runs" / "tiny" / "checkpoints"
    os.chown(place, 4321, -1)
    before = sorted(path.name for path in place.iterdir())
    code, said = forge()
    assert code == 2 and "belongs to user 4321" in said and "allow_foreign_owner" in said and "Traceback" not in said
    assert "model:" not in said, "before the model is built"
    assert sorted(path.name for path in place.iterdir()) == before
    assert forge("--checkpoint.store.allow_foreign_owner=true")[0] == 0


def test_fault_15_a_disk_that_is_too_small_is_said_before_the_first_step(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one checkpoint takes is what one that was written has; three are kept, and a fourth one is written meanwhile."""
    assert forge("--job.dir=before", "--checkpoint.keep=0")[0] == 0
    one = sum(file.stat().st_size for file in (here / "before/checkpoints/step-00000003").glob("rank-*"))
    left = one - 1
    monkeypatch.setattr(LocalStore, "free", lambda self: left)
    code, said = forge("--job.dir=after")
    assert code == 2 and "one checkpoint takes" in said and "--job.dir" in said and "Traceback" not in said
    assert not (here / "after").exists(), "nothing was begun"
    left = 4 * one - 1
    code, said = forge("--job.dir=after", "--train.stop_at=3")
    assert code == 0 and f"up to {size(4 * one)} more: 4 of {size(one)}" in said
    code, said = forge("--job.dir=after")
    assert code == 0 and "more:" not in said, "one of them is there by now"


def test_room_for_checkpoints_of_a_recipe_is_asked_by_doctor(here: Path) -> None:
    """Of those that stay and the one that is written; behind a URL, none is asked for here."""
    settings = DoctorSettings("tiny.toml", directory=str(here))
    whole = checkpoints(settings)
    keeps_one = checkpoints(replace(settings, overrides=("--checkpoint.keep=1",)))
    behind = ("--checkpoint.store.name=remote", "--checkpoint.store.url=memory://elsewhere/runs")
    nothing = checkpoints(replace(settings, overrides=behind))
    assert (whole - nothing) * 2 == (keeps_one - nothing) * 4 > 0


def test_fault_48_what_the_environment_holds_reaches_no_file_of_a_run_that_falls(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "UNSUSPICIOUS"):
        monkeypatch.setenv(name, "sk-hidden-in-the-environment")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(here / "error.json"))
    code, said = forge("--hooks=[{name='log', every=1}, {name='./falls.py:Falls'}, {name='save'}]")
    assert code == 1 and "a fault of the plugin" in said
    files = [path for path in here.rglob("*") if path.is_file()]
    assert {"error.json", "rank-00000.log", "manifest.json", "config.toml"} <= {path.name for path in files}
    assert [path for path in files if b"sk-hidden" in path.read_bytes()] == []
    assert "sk-hidden" not in said
