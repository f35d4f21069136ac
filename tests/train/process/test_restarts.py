"""`forge-train run --processes --restarts`: ranks that fail are started again, and the run ends with the bits of a clean one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge_train.directory import NO_PROGRESS_FILE
from forge_train.trackers import METRICS, read_metrics
from train import runs
from train.runs import TINY

HOOK = '''
import os
import signal
from dataclasses import dataclass

from forge_core.component import Component
from forge_core.protocols.run import Hook

LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Failing(Hook):
    def before_step(self, run):
        how = os.environ["HOW"]
        if run.topology.rank == 1 and run.state.step == 4 and LIFE == 0 and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if run.state.step == 1 and how == "never gets there":
            raise RuntimeError("a fault that comes again")
        if run.state.step >= 4 and how == "a bad place" and os.environ["FORGE_LOCAL_DEVICE"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    def start(self, run):
        if run.topology.rank == 1 and LIFE == 0 and os.environ["HOW"] == "a faulty machine":
            next(hook for hook in run.hooks if hasattr(hook, "compute")).compute = lambda: "the device is hot"


@dataclass(frozen=True, kw_only=True)
class Fails(Component):
    """Fails."""

    def build(self):
        return Failing()
'''

HOOKS = """
[[hooks]]
name = "machine"
every = 4

[[hooks]]
name = "./mine.py:Fails"

[[hooks]]
name = "log"
every = 1
"""


def train(folder: Path, how: str, restarts: int, *more: str, processes: int = 2) -> tuple[int, str]:
    """Exit code and standard error."""
    (folder / "mine.py").write_text(HOOK)
    (folder / "tiny.toml").write_text(TINY + HOOKS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOW": how}
    options = [f"--processes={processes}", f"--restarts={restarts}"]
    command = [sys.executable, "-m", "forge_train", "run", "tiny.toml", *options, *more]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stderr


def last(folder: Path) -> dict[str, bytes]:
    """Tensor files of the last checkpoint."""
    newest = folder / "runs" / "tiny" / "checkpoints" / (folder / "runs/tiny/checkpoints/latest").read_text().strip()
    return {path.name: path.read_bytes() for path in newest.iterdir() if not path.name.endswith(".json")}


@pytest.mark.slow
def test_fault_33_a_rank_that_is_killed_is_started_again_and_the_bits_are_those_of_a_clean_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    code, said = train(tmp_path / "a", "dies", 2)
    assert code == 0, said
    assert "rank 1 was ended by SIGKILL; restart 1 of 2, from the newest verified checkpoint\n" in said
    code, said = train(tmp_path / "b", "well", 0)
    assert code == 0, said
    assert last(tmp_path / "a") == last(tmp_path / "b")
    assert len(last(tmp_path / "a")) >= 2


@pytest.mark.slow
def test_fault_51_a_machine_that_fails_a_probe_is_named_and_the_run_started_again(tmp_path: Path) -> None:
    code, said = train(tmp_path, "a faulty machine", 1)
    assert code == 0, said
    named = r"rank 1 .*exit code 6: after step 4, the machine of rank 1 on \S+ fails a probe: the device is hot\."
    assert re.search(f"{named}.*; restart 1 of 1", said)
    assert re.search(r"rank 0: .*after step 4, the machine of rank 1 on", said)


@pytest.mark.slow
def test_fault_26_restarts_that_get_nowhere_end_with_93(tmp_path: Path) -> None:
    code, said = train(tmp_path, "never gets there", 9)
    assert code == 93, said
    assert re.findall(r"restart (\d) of 9", said) == ["1", "2", "3", "4"]
    assert "a fault that comes again" in said
    reason = (tmp_path / "runs" / "tiny" / NO_PROGRESS_FILE).read_text()
    assert "restarted 3 times from step 0" in reason
    record = json.loads((tmp_path / "runs" / "tiny" / "restarts.json").read_text())
    assert record == {"step": 0, "restarts": 3}


@pytest.mark.slow
def test_fault_34_a_place_that_fails_again_is_left_out_and_the_losses_are_those_of_one_process(tmp_path: Path) -> None:
    """Four ranks, of which that at place 1 dies in step 5 of every start; three cannot share eight rows, two can."""
    exact = ["--precision.compute=fp64", "--precision.state=fp64"]
    (tmp_path / "a").mkdir()
    code, said = train(tmp_path / "a", "a bad place", 4, *exact, "--min-processes=2", processes=4)
    assert code == 0, said
    assert "the rank at local place 1 failed twice in a row: continuing with 2 of 4 ranks, at local places 0, 2\n" in said
    assert re.findall(r"restart (\d) of 4", said) == ["1", "2"]
    alone = runs.train(recipe_of(tmp_path / "alone.toml"), [f"--job.dir={tmp_path / 'alone'}", *exact])
    lines = read_metrics(tmp_path / "a" / "runs" / "tiny" / METRICS)
    found = {line["step"]: line["loss"] for line in lines if "loss" in line}  # hook `machine` writes lines too
    assert sorted(found) == list(range(1, 9))
    assert [found[step] for step in range(1, 9)] == pytest.approx(alone["losses"], rel=1e-9)


def recipe_of(path: Path) -> Path:
    path.write_text(TINY)
    return path


@pytest.mark.parametrize(
    ("restarts", "more", "says"),
    [
        (1, ["--fresh"], "--fresh with --restarts would start over after a failure"),
        (0, ["--min-processes=1"], "--min-processes has no effect without restarts"),
        (1, ["--min-processes=2"], "--min-processes = 2 is not below --processes = 2"),
        (1, ["--min-processes=1", "--parallel.dp_shard=2"], "with 1: parallel: the world size is 1, but dp_shard 2 = 2"),
        (
            1,
            ["--min-processes=1", "--model.moe.experts=4", "--model.moe.capacity=1.0"],
            "with 1: the effect of model.moe.capacity depends on the number of ranks",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, restarts: int, more: list[str], says: str) -> None:
    code, said = train(tmp_path, "well", restarts, *more)
    assert code == 2
    assert says in " ".join(said.split())
    assert not (tmp_path / "runs").exists()
