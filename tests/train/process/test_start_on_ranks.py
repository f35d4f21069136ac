"""M1, H6: what several ranks refuse is said once, by rank 0, and all end with the same code; a rank of its own fault is named."""

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from forge_core.config.tree import leaves
from forge_core.registry import Registry
from forge_parallel.launch.environment import read_launcher
from forge_train.commands.run import run_recipe
from forge_train.process.logs import logging_of
from forge_train.process.ranks import OWN_KEYS, content_of
from forge_train.recipe.load import load_recipe
from harness.pool import World
from train.runs import TINY

HOOK = '''
import os
from dataclasses import dataclass

from forge_core.component import Component
from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook


class Failing(Hook):
    def __init__(self, rank, fault):
        self.rank, self.fault = rank, fault

    def check(self, run):
        if run.topology.rank >= self.rank:
            raise KeyError("a bug") if self.fault else ForgeError(f"not on node {run.topology.rank}")


@dataclass(frozen=True, kw_only=True)
class Fails(Component):
    """Refuses, or falls over, from one rank on."""

    rank: int = 1
    fault: bool = False
    api_key: str = ""

    def build(self):
        return Failing(self.rank, self.fault)
'''


def _started(
    folder: Path, arguments: list[str], lacking: int | None = None, own: Sequence[list[str]] = ([],) * 9, steps: str = ""
) -> tuple[int, str]:
    """Exit code of a rank and what it said; rank `lacking` stands in another directory, without the recipe's files.

    Each rank has its `own` overrides besides. With `steps`, ranks come by twos, as tasks of that many steps of one SLURM job.
    """
    where = read_launcher(os.environ)
    arguments = [*arguments, *own[where.rank]]
    if steps:
        step, rank = divmod(where.rank, 2)
        where = replace(where, rank=rank, size=2, local_rank=rank, local_size=2, identity=f"{steps}{step}")
    os.chdir(folder / "elsewhere" if where.rank == lacking else folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), logging_of(where.rank, where.size) as log:
        code = run_recipe(str(folder / "tiny.toml"), arguments, "--fresh" in arguments, where, log)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code, said.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "mine.py").write_text(HOOK)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.npy").write_bytes(b"")
    return tmp_path


def on_ranks(world: World, *arguments: Any, size: int = 2) -> list[tuple[int, str]]:
    return world.run(_started, size, *arguments, group=False)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--train.max_stepz=3"], "train.max_stepz: unknown key"),
        (["--train.micro_batch=3"], "which micro-batches of 3 do not divide"),
        (["--job.dir=/proc/forge"], "the run's directory /proc/forge cannot be written"),
        (["--data.sources.0.tokens=9"], "fewer than the 17 tokens of one sample"),
        (["--checkpoint.resume=require"], "checkpoint.resume = 'require', but no checkpoint was ever saved here"),
        (["--hooks=[{name='sample',max_tokens=4}]"], "needs a tokenizer"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_m1_h6_rank_0_says_it_and_all_end_alike(world: World, folder: Path, arguments: list[str], named: str) -> None:
    (code, said), *others = on_ranks(world, folder, arguments)
    assert code == 2 and said.count(named) == 1 and "Traceback" not in said and "rank 1" not in said
    assert others == [(2, "")]
    assert not (folder / "runs").exists()


def test_m1_the_first_rank_that_refuses_is_named(world: World, folder: Path) -> None:
    hook = f"--hooks=[{{name='{folder / 'mine.py'}:Fails', rank=1}}]"
    outcomes = on_ranks(world, folder, [hook], size=4)
    assert [code for code, _ in outcomes] == [2, 2, 2, 2]
    assert "rank 1: not on node 1" in outcomes[0][1] and [said for _, said in outcomes[1:]] == ["", "", ""]


def test_m1_a_node_that_lacks_a_file_is_named(world: World, folder: Path) -> None:
    relative = "--hooks=[{name='./mine.py:Fails', rank=9}]"
    (code, said), other = on_ranks(world, folder, [relative, f"--job.dir={folder / 'run'}"], 1)
    assert code == 2 and "rank 1: " in said and "does not exist" in said and str(folder / "elsewhere") in said
    assert other == (2, "")


def test_m1_a_fault_of_a_plugin_on_one_rank_ends_all_and_its_traceback_is_kept(world: World, folder: Path) -> None:
    hook = f"--hooks=[{{name='{folder / 'mine.py'}:Fails', rank=1, fault=true}}]"
    (code, said), (other, traceback) = on_ranks(world, folder, [hook])
    assert (code, other) == (1, 1)
    assert "rank 1: KeyError: 'a bug'" in said and "Traceback" not in said
    assert "Traceback" in traceback and "KeyError: 'a bug'" in traceback


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("optimizer.lr", ("0.001", "0.05")),
        ("train.max_steps", ("4", "8")),
        ("train.global_batch", ("8", "16")),
    ],
)
def test_trials_f1_ranks_with_other_recipes_do_not_begin(
    world: World, folder: Path, override: str, values: tuple[str, str]
) -> None:
    own = [[f"--{override}={value}"] for value in values]
    (code, said), other = on_ranks(world, folder, ["--train.micro_batch=4"], None, own)
    assert code == 2 and f"{override} is {values[1]}, and {values[0]} on rank 0" in said and "rank 1 (process " in said
    assert said.count("differ") == 1 and other == (2, "")
    assert not (folder / "runs").exists()


def test_trials_f1_what_counts_of_a_recipe(folder: Path) -> None:
    """Enumerates the keys: each one but `OWN_KEYS` counts. A plugin file counts by its content, a secret by its digest."""
    (folder / "copy").mkdir()
    (folder / "copy" / "mine.py").write_text(HOOK)
    registry = Registry()

    def content(*overrides: str) -> dict[str, str]:
        return content_of(load_recipe(str(folder / "tiny.toml"), overrides, 2, registry), registry)

    first = content(f"--hooks=[{{name='{folder / 'mine.py'}:Fails'}}]")
    resolved = load_recipe(str(folder / "tiny.toml"), [f"--hooks=[{{name='{folder / 'mine.py'}:Fails'}}]"], 2, registry)
    keys = {key for key, _, _ in leaves(resolved.tree)}
    assert keys - OWN_KEYS == keys & first.keys() and keys >= OWN_KEYS
    assert content(f"--hooks=[{{name='{folder / 'copy' / 'mine.py'}:Fails'}}]") == first, "the same file in another place"
    (folder / "copy" / "mine.py").write_text(HOOK + "\n# changed\n")
    changed = content(f"--hooks=[{{name='{folder / 'copy' / 'mine.py'}:Fails'}}]")
    assert {key for key in changed if changed[key] != first.get(key)} == {"hooks mine.py:Fails"}
    assert first["code of forge_core"].startswith("sha256:")
    mine = folder / "mine.py"
    one, two = (content(f"--hooks=[{{name='{mine}:Fails', api_key='sk-{key}'}}]") for key in "ab")
    assert {key for key in one if one[key] != two[key]} == {"hooks.0.api_key"} and "sk-" not in str(one)


def test_trials_f2_ranks_of_two_steps_at_one_address_never_train_together(world: World, folder: Path) -> None:
    """The second step's rank 0 finds the address taken; its rank 1 is refused by the first step, which trains."""
    own = [["--job.name=a"], ["--job.name=a"], ["--job.name=b"], ["--job.name=b"]]
    outcomes = on_ranks(world, folder, ["--train.max_steps=4"], None, own, "SLURM job 7, step ", size=4)
    codes = [code for code, _ in outcomes]
    assert sorted((codes[:2], codes[2:])) == [[0, 0], [2, 2]], outcomes
    refused = outcomes[2:] if codes[0] == 0 else outcomes[:2]
    assert all("SLURM job 7, step 0" in said or "listens at this address" in said for _, said in refused), refused
    assert any("step 0" in said and "step 1" in said for _, said in refused), refused


def test_ranks_that_agree_train_and_resume(world: World, folder: Path) -> None:
    for steps, words in ((4, ""), (8, "train.max_steps was 4, is 8")):
        outcomes = on_ranks(world, folder, [f"--train.max_steps={steps}"])
        assert [code for code, _ in outcomes] == [0, 0], outcomes
        assert words in outcomes[0][1]
    assert sorted(path.name for path in (folder / "runs" / "tiny" / "logs").iterdir()) == ["rank-00000.log", "rank-00001.log"]
    (code, said), other = on_ranks(world, folder, ["--model.rope.theta=10"])
    assert code == 2 and said.count("model.rope.theta was 10000.0, is 10") == 1 and other == (2, "")
