"""A start is a transaction (W1, W3, W4): whatever refuses it changes no byte of a run's directory and disturbs no job in it."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError, ForgeError
from forge_core.registry import Registry
from forge_parallel.launch.environment import Launch
from forge_train import directory
from forge_train.commands.run import run_recipe
from forge_train.directory import OWNED, RECIPE, STARTS, move_aside, previous
from forge_train.directory import RESTARTS_FILE as PROGRESS
from forge_train.process.logs import logging_of
from forge_train.process.ranks import JobRanks
from forge_train.recipe.load import load_recipe
from forge_train.run import saves
from forge_train.run.loop import fit
from forge_train.run.run import Run
from forge_train.run.start import start_run
from forge_train.trackers import read_metrics
from train.runs import TINY, digest, prepared, train

HOOKS = "--hooks=[{name='save'}, {name='log', every=1}]"

PLUGINS = '''
from dataclasses import dataclass

from forge_core.component import Component
from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook


@dataclass(frozen=True, kw_only=True)
class Refuses(Component):
    """A hook, or a tracker, that refuses when it is built."""

    def build(self, run=None):
        raise ForgeError("not with me")


class Forgetful(Hook):
    def state(self):
        return {"seen": 1}

    def load_state(self, state):
        raise ForgeError("that state is not mine")


@dataclass(frozen=True, kw_only=True)
class Forgets(Component):
    """A hook that refuses its own state."""

    def build(self):
        return Forgetful()


@dataclass(frozen=True, kw_only=True)
class Falls(Component):
    """A hook with a fault."""

    def build(self):
        raise KeyError("a fault of the plugin")
'''


def content(directory: Path) -> dict[str, str]:
    """Every file and directory below, by content."""
    return {
        str(path.relative_to(directory)): sha256(path.read_bytes()).hexdigest() if path.is_file() else "-"
        for path in sorted(directory.rglob("*"))
    }


def forge(*arguments: str) -> tuple[int, str]:
    """`forge-train run` in this process: exit code, and what it said."""
    recipe, *rest = arguments
    fresh = "--fresh" in rest
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), logging_of(0, 1) as log:
        code = run_recipe(recipe, [item for item in rest if item != "--fresh"], fresh, Launch(), log)
    return code, said.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and a directory that is full: a run with everything that a run leaves."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.toml").write_text(TINY)
    (folder / "plugins.py").write_text(PLUGINS)
    (folder / "corpus.txt").write_text("to be or not to be, that is the question " * 40)
    with contextlib.chdir(folder):
        code, said = forge("tiny.toml", f"{HOOKS[:-1]}, {{name='./plugins.py:Forgets'}}]", "--trackers=[{name='tensorboard'}]")
    assert code == 0, said
    (folder / "runs" / "tiny" / "samples.json").write_text("[]")
    return folder


@pytest.fixture
def here(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it, and the working directory."""
    shutil.copytree(finished, tmp_path / "here")
    with contextlib.chdir(tmp_path / "here"):
        yield tmp_path / "here"


TEXT = ["--data.tokenizer.name=bytes", "--model.vocab_size=257", "--data.sources=[{name='text', path='corpus.txt'}]"]

REFUSALS: dict[str, tuple[list[str], str]] = {
    "no recipe": (["absent.toml"], "absent.toml"),
    "unknown key": (["tiny.toml", "--train.max_stepz=3"], "max_stepz"),
    "bad value": (["tiny.toml", "--train.max_steps=2.7"], "2.7"),
    "a bare argument": (["tiny.toml", "bare"], "bare"),
    "a plugin that is missing": (["tiny.toml", "--optimizer.name=lion"], "lion"),
    "a file that is missing": (["tiny.toml", "--hooks=[{name='./absent.py:Hook'}]"], "absent.py"),
    "a layout that does not fit": (["tiny.toml", "--parallel.tp=2"], "parallel"),
    "a rule across sections": (["tiny.toml", "--schedule.warmup=99"], "schedule.warmup"),
    "missing data": (["tiny.toml", *TEXT[:2], "--data.sources=[{name='text', path='/no/such'}]"], "/no/such"),
    "no data": (["tiny.toml", "--data.sources=[]"], "there is nothing to train on"),
    "data that do not fit the model": (["tiny.toml", "--data.sources.0.tokens=9"], "fewer than the 17 tokens of one sample"),
    "an evaluation set that is missing": (["tiny.toml", "--data.evaluation.x={name='store', path='/no/such'}"], "/no/such"),
    "other seed (W3)": (["tiny.toml", "--job.seed=7"], "seed was 3, is 7"),
    "other data seed (W3)": (["tiny.toml", "--data.seed=7"], "seed was 3, is 7"),
    "other batch": (["tiny.toml", "--train.global_batch=16"], "train.global_batch was 8, is 16"),
    "other length": (["tiny.toml", "--data.sequence_length=8"], "data.sequence_length was 16, is 8"),
    "other data": (["tiny.toml", "--data.sources.0.tokens=5000"], "fingerprint"),
    "other text": (["tiny.toml", *TEXT], "data position"),
    "other size of the model": (["tiny.toml", "--model.dim=32"], "model.dim was 16, is 32"),
    "other function (W2)": (["tiny.toml", "--model.mlp.name=geglu"], "swiglu"),
    "other shapes, allowed by name": (
        ["tiny.toml", "--model.ffn_dim=32", "--checkpoint.allow=model.ffn_dim"],
        "does not match the model",
    ),
    "other tensors, allowed by name": (
        ["tiny.toml", "--model.tied_embeddings=true", "--checkpoint.allow=model.tied_embeddings"],
        "not in the model",
    ),
    "an allowed key that is none": (["tiny.toml", "--checkpoint.allow=model.thetta"], "model.thetta"),
    "a hook that refuses": (["tiny.toml", "--hooks=[{name='./plugins.py:Refuses'}]"], "not with me"),
    "a hook that needs what is missing": (["tiny.toml", "--hooks=[{name='sample',max_tokens=4}]"], "tokenizer"),
    "a hook that refuses its state": (["tiny.toml", "--hooks=[{name='./plugins.py:Forgets'}]"], "that state is not mine"),
    "a tracker that refuses": (["tiny.toml", "--trackers=[{name='./plugins.py:Refuses'}]"], "not with me"),
    "fresh with missing data (W1)": (
        ["tiny.toml", "--fresh", *TEXT[:2], "--data.sources=[{name='text', path='/no/such'}]"],
        "/no/such",
    ),
    "fresh with an unknown key (W1)": (["tiny.toml", "--fresh", "--train.max_stepz=3"], "max_stepz"),
    "fresh with a hook that refuses (W1)": (["tiny.toml", "--fresh", "--hooks=[{name='./plugins.py:Refuses'}]"], "not with me"),
    "fresh, where a checkpoint is required": (["tiny.toml", "--fresh", "--checkpoint.resume=require"], "conflicts"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_w1_w3_w4_a_refused_start_changes_no_byte_and_ends_no_job(here: Path, refusal: str) -> None:
    """Against a full directory in which a job still runs: as far as a newcomer can disturb it, that is its mark."""
    arguments, named = REFUSALS[refusal]
    fence = Fence.take(LocalStore(here / "runs" / "tiny" / "checkpoints"), SingleProcessWorld())
    before = content(here / "runs" / "tiny")
    code, said = forge(*arguments)
    assert (code, "Traceback" in said) == (2, False), said
    assert named in said
    after = content(here / "runs" / "tiny")
    assert {path: found for path, found in after.items() if not path.startswith("data")} == before
    fence.check()


def test_a_start_that_falls_over_changes_no_byte_either(here: Path) -> None:
    before = content(here / "runs")
    code, said = forge("tiny.toml", "--hooks=[{name='./plugins.py:Falls'}]")
    assert code == 1 and "Traceback" in said and "a fault of the plugin" in said
    assert content(here / "runs") == before


@pytest.mark.parametrize("damage", [("step-00000008",), ("step-00000003", "step-00000006", "step-00000008")], ids=len)
def test_a_refused_start_does_not_even_set_damaged_checkpoints_aside(here: Path, damage: tuple[str, ...]) -> None:
    for name in damage:
        shard = here / "runs" / "tiny" / "checkpoints" / name / "rank-00000.bin"
        shard.write_bytes(b"\0" * shard.stat().st_size)
    before = content(here / "runs")
    code, said = forge("tiny.toml", "--job.seed=7")
    assert code == 2 and "damaged" in said
    assert content(here / "runs") == before
    code, said = forge("tiny.toml", HOOKS)
    renamed = (here / "runs" / "tiny" / "checkpoints" / "damaged-step-00000008").is_dir()
    assert (code, renamed) == ((0, True) if len(damage) == 1 else (2, False)), said


def test_fault_15_h6_a_directory_that_cannot_be_written_is_one_message(here: Path) -> None:
    (here / "file").write_text("")
    for place in ("/proc/forge", "file", "file/below"):
        code, said = forge("tiny.toml", f"--job.dir={place}")
        assert (code, said.count("error:")) == (2, 1) and f"{place} cannot be written" in said and "--job.dir" in said


def test_a_refused_first_start_leaves_nothing_behind(here: Path) -> None:
    for arguments in (["--job.name=new", "--data.sources.0.tokens=9"], ["--job.name=new", "--checkpoint.resume=require"]):
        code, said = forge("tiny.toml", *arguments)
        assert code == 2, said
        assert not (here / "runs" / "new").exists()


def test_a_checkpoint_directory_of_somebody_else_is_refused_before_anything_is_written(here: Path) -> None:
    (here / "mine" / "checkpoints").mkdir(parents=True)
    (here / "mine" / "checkpoints" / "thesis.txt").write_text("years of work")
    for more in ([], ["--fresh"]):
        code, said = forge("tiny.toml", "--job.dir=mine", *more)
        assert code == 2, said
        assert content(here / "mine") == {"checkpoints": "-", "checkpoints/thesis.txt": sha256(b"years of work").hexdigest()}


def test_w1_fresh_moves_the_old_run_aside_until_the_new_one_has_saved(here: Path) -> None:
    run = here / "runs" / "tiny"
    before = content(run)
    seen: list[dict[str, str]] = []
    resumed, _ = prepared(here / "tiny.toml", ["--job.dir=runs/tiny", HOOKS])
    fresh = begun(here, HOOKS)
    fresh.hooks[:] = [*fresh.hooks[1:], Looking(lambda: seen.append(content(run / "previous-1")), fresh.hooks[0])]
    assert fit(fresh) == "finished"
    with pytest.raises(ForgeError, match="another job, process"):
        resumed.stop.check()
    assert len(seen) == 3 and seen[0].keys() == before.keys(), "all there until the first save has ended"
    changed = {path for path in before if seen[0][path] != before[path]}
    assert changed == {"checkpoints/owner", "metrics.jsonl", RECIPE, PROGRESS, STARTS}, (
        "by the job that resumed, and by the mark that ended it"
    )
    assert not previous(run)
    assert [entry["step"] for entry in read_metrics(run / "metrics.jsonl")] == list(range(1, 9))
    assert digest(fresh) == train(here / "tiny.toml", [f"--job.dir={here / 'clean'}"])["weights"]


def test_w1_fresh_ends_a_live_job_before_its_files_move(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would log and save into the new run in the moment between."""
    live, _ = prepared(here / "tiny.toml", ["--job.dir=runs/tiny", HOOKS])
    seen = []

    def noted(directory: Path) -> Path | None:
        seen.append(live.stop.superseded())
        return move_aside(directory)

    monkeypatch.setattr(directory, "move_aside", noted)
    begun(here)
    assert seen == [True]


def test_w1_a_save_that_fails_keeps_the_run_before(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = begun(here)

    def full(*_: object) -> str:
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(saves, "write", full)
        fresh.save()
        assert "the disk is full" in fresh.health.remarks[-1]
        with pytest.raises(CheckpointError):
            fresh.saves.finish()
    assert previous(here / "runs" / "tiny")
    fresh.save()
    assert not previous(here / "runs" / "tiny")


class Looking:
    """A save hook of which one looks before each save."""

    def __init__(self, look: Callable[[], None], hook: object) -> None:
        self.look, self.hook = look, hook

    def __getattr__(self, name: str) -> object:
        if name == "after_step":
            return self.after_step
        return getattr(self.hook, name)

    def after_step(self, run: object, result: object) -> None:
        if run.state.step in (3, 6, 8):  # type: ignore[attr-defined]
            self.look()
        self.hook.after_step(run, result)  # type: ignore[attr-defined]


def begun(here: Path, *overrides: str) -> Run:
    """A run that has taken its directory over with --fresh, and not trained yet."""
    registry = Registry()
    resolved = load_recipe(here / "tiny.toml", list(overrides), 1, registry)
    return start_run(resolved, JobRanks(), fresh=True)


def test_w1_a_fresh_start_that_dies_leaves_the_old_run_and_says_how_to_go_on_with_it(here: Path) -> None:
    run = here / "runs" / "tiny"
    old = (run / "metrics.jsonl").read_bytes()
    begun(here)  # and dies
    begun(here)  # again, as a scheduler does
    assert [path.name for path in previous(run)] == ["previous-1", "previous-2"]
    assert (run / "previous-1" / "metrics.jsonl").read_bytes() == old
    code, said = forge("tiny.toml", "--job.dir=runs/tiny/previous-1", HOOKS)
    assert code == 0 and "resuming after step 8" in said, "it is a run's directory itself"
    code, said = forge("tiny.toml", "--checkpoint.resume=require")
    assert code == 2 and previous(run)
    code, said = forge("tiny.toml", HOOKS, "--train.max_steps=4")
    assert code == 0 and "previous-1" in said and "resuming" not in said
    assert not previous(run), "the new run has saved"
    code, said = forge("tiny.toml", HOOKS, "--train.max_steps=4")
    assert code == 0 and "previous" not in said and "resuming after step 4" in said


def test_fresh_names_where_the_old_run_is(here: Path) -> None:
    code, said = forge("tiny.toml", "--fresh", "--hooks=[{name='log'}]")
    assert code == 0 and "runs/tiny/previous-1" in said and "--job.dir=runs/tiny/previous-1" in said
    assert (here / "runs" / "tiny" / "previous-1" / "checkpoints" / "step-00000008").is_dir(), "nothing was saved"
    code, said = forge("tiny.toml", "--fresh", "--job.name=first", HOOKS)
    assert code == 0 and "previous" not in said, "nothing to move"


def test_everything_that_a_run_writes_is_moved(here: Path) -> None:
    """Only prepared data stays; a later file of the trainer has to be named in OWNED."""
    left = {path.name for path in (here / "runs" / "tiny").iterdir()}
    assert left - {"data", RECIPE} <= set(OWNED) and {"logs", "report.html", "tensorboard", "checkpoints"} <= left


def test_messages_from_before_the_take_over_are_in_the_log(here: Path) -> None:
    code, _ = forge("tiny.toml", "--optimizer.lr=2e-2", "--train.max_steps=9")
    log = (here / "runs" / "tiny" / "logs" / "rank-00000.log").read_text()
    assert code == 0 and "model: " in log and "optimizer.lr was 0.01, is 0.02" in log


SLOW = '''
import time
from dataclasses import dataclass
from pathlib import Path

from forge_core.component import Component
from forge_core.protocols.run import Hook


class Waiting(Hook):
    def before_step(self, run):
        while run.state.step == 4 and not Path("go").exists():
            time.sleep(0.01)


@dataclass(frozen=True, kw_only=True)
class Waits(Component):
    """Stands still in step 4, so that others can come."""

    def build(self):
        return Waiting()
'''


def test_w1_w3_a_live_job_goes_on_through_every_refusal_and_finishes_as_if_alone(here: Path) -> None:
    """One real process; the refused starts are in this one."""
    (here / "slow.py").write_text(SLOW)
    slow = "--hooks=[{name='save'}, {name='log', every=1}, {name='./slow.py:Waits'}]"
    command = [sys.executable, "-m", "forge_train", "run", "tiny.toml", "--job.name=live", slow]
    said, metrics = here / "said", here / "runs" / "live" / "metrics.jsonl"
    with said.open("w") as out:
        live = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 120
        while len(read_metrics(metrics)) < 4:
            assert live.poll() is None and time.monotonic() < deadline, said.read_text()
            time.sleep(0.02)
        before = content(here / "runs" / "live")
        for name in ("unknown key", "missing data", "other seed (W3)", "other function (W2)", "fresh with missing data (W1)"):
            arguments, named = REFUSALS[name]
            code, heard = forge(*arguments, "--job.name=live")
            assert code == 2 and named in heard
        assert content(here / "runs" / "live") == before
        (here / "go").write_text("")
        assert live.wait(timeout=120) == 0, said.read_text()
    finally:
        live.kill()
        live.wait()
    alone = train(here / "tiny.toml", ["--job.dir=alone"])
    assert [line["loss"] for line in read_metrics(metrics)] == alone["losses"]
    assert "seed = 3" in (here / "runs" / "live" / RECIPE).read_text(), "W4"
