"""`--json`: every command has it; `run` prints one document, however it ends, and everything else on standard error."""

import json
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from forge_core.registry import Registry
from forge_train.cli import GROUP, command
from harness import commands

FAILING = """
from dataclasses import dataclass
from forge_core import Component


@dataclass(frozen=True, kw_only=True)
class Failing(Component):
    def build(self, steps):
        print("said by a plugin")

        def factor(step):
            if step > 1:
                raise ValueError("the plugin's own fault")
            return 1.0

        return factor
"""


def leaves(found: Any, name: str) -> Iterator[tuple[str, Any]]:
    below = getattr(found, "commands", {})
    for part, item in below.items():
        yield from leaves(item, f"{name} {part}")
    if not below:
        yield name, found


def test_every_command_has_a_document_for_programs() -> None:
    registry = Registry()
    found = dict(leaf for name in registry.names(GROUP) for leaf in leaves(command(registry.find(GROUP, name), registry), name))
    without = {name for name, item in found.items() if not any("--json" in option.opts for option in item.params)}
    assert len(found) > 40 and without == {"ckpt convert"}  # passes its options on to `convert`


def run(folder: Path, *words: str) -> tuple[CompletedProcess[str], Any]:
    done = commands.run("-m", "forge_train", *words, "--json", cwd=folder)
    return done, json.loads(done.stdout)


def test_a_finished_run_is_the_document_of_runs_with_its_end(tmp_path: Path) -> None:
    done, told = run(tmp_path, "run", "debug", "--train.max_steps=3", "--schedule.warmup=1")
    assert done.returncode == 0 and (told["exit_code"], told["message"]) == (0, None)
    assert (told["state"], told["step"], told["max_steps"]) == ("finished", 3, 3)
    assert Path(tmp_path, told["report"]).is_file() and "report:" in done.stderr
    listed = json.loads(commands.run("-m", "forge_train", "runs", "--json", cwd=tmp_path).stdout)[0]
    assert {key: value for key, value in told.items() if key in listed and key != "run"} == {
        key: value for key, value in listed.items() if key != "run"
    }


def test_a_refused_run_is_the_document_of_an_error(tmp_path: Path) -> None:
    done, told = run(tmp_path, "run", "debug", "--train.max_stepz=3")
    assert done.returncode == 2 and told["ok"] is False and told["faults"][0]["key"] == "train.max_stepz"
    done, told = run(tmp_path, "run", "debug", "--processes", "2", "--min-processes", "1")
    assert done.returncode == 2 and "--min-processes has no effect without restarts" in told["message"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["run", "debug"], id="alone"),
        pytest.param(["launch", "local", "debug", "--processes", "2"], id="ranks", marks=pytest.mark.slow),
    ],
)
def test_a_failure_is_told_with_its_cause(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    done, told = run(tmp_path, *words, "--train.max_steps=3", '--schedule={name = "./failing.py:Failing"}')
    assert (done.returncode, told["exit_code"], told["state"]) == (1, 1, "failed")
    assert "the plugin's own fault" in told["message"] and told["report"] is None
    assert "said by a plugin" in done.stderr


RANKS = """
import sys
from forge_train.process.restarts import run_local_ranks

command = [sys.executable, "-m", "forge_train", "run", "debug", "--schedule.warmup=1", "--json", *sys.argv[1:]]
sys.exit(run_local_ranks(command, [0, 1], grace=60).code)
"""


@pytest.mark.parametrize(
    ("key", "code"),
    [
        pytest.param("--train.max_steps=2", 0, id="runs", marks=pytest.mark.slow),
        pytest.param("--train.max_stepz=2", 2, id="refused"),
    ],
)
def test_ranks_of_another_launcher_print_one_document_and_are_refused_together(tmp_path: Path, key: str, code: int) -> None:
    """None of them waits for a rank that has refused by itself: it would wait for a minute."""
    done = commands.run("-c", RANKS, key, cwd=tmp_path, timeout=40)
    told = json.loads(done.stdout)
    assert done.returncode == code
    assert told["faults"][0]["key"] == "train.max_stepz" if code else (told["state"], told["exit_code"]) == ("finished", 0)
