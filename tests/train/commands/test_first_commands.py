"""M3: what a user asks first: which version, what differs, what the shell can complete."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from forge_core.component import Slot, fields_of
from forge_train.cli import main
from forge_train.commands.options import recipe_keys
from forge_train.recipe.load import load_recipe
from forge_train.recipe.schema import Job

Say = Callable[..., tuple[int, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Exit code and output of a command, run in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return int(ended.value.code or 0), capsys.readouterr().out

    return run


def test_m3_version_is_one_line(say: Say) -> None:
    code, said = say("--version")
    assert code == 0
    assert said.startswith(f"forge-train {version('forge-train')} (torch {version('torch')}") and said.count("\n") == 1


def test_m3_recipes_are_compared_key_by_key(say: Say, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "debug"\n[optimizer]\nlr = 0.5\n[model]\nmlp = {name = "geglu"}\n')
    code, said = say("config", "diff", "debug", "mine.toml", "--json")
    found = {item["key"]: item for item in json.loads(said)}
    assert code == 1 and set(found) == {"optimizer.lr", "model.mlp.name"}
    assert (found["optimizer.lr"]["was"], found["optimizer.lr"]["now"]) == (0.003, 0.5)
    assert (found["model.mlp.name"]["was"]["name"], found["model.mlp.name"]["now"]["name"]) == ("swiglu", "geglu")
    assert (found["optimizer.lr"]["key_class"], found["model.mlp.name"]["key_class"]) == ("free", "identity")
    assert "optimizer.lr was 0.003, is 0.5  [free]" in say("config", "diff", "debug", "mine.toml")[1]
    code, said = say("config", "diff", "debug", "mine.toml", "--optimizer.lr=3e-3", "--model.mlp.name=swiglu")
    assert (code, said.strip()) == (0, "no difference")


def test_m3_a_run_and_its_checkpoint_are_sides_too(say: Say, tmp_path: Path) -> None:
    import torch

    from forge_ckpt.checkpoint.save import save
    from forge_ckpt.store.local import LocalStore
    from forge_ckpt.world import SingleProcessWorld
    from forge_core.protocols.checkpoint import Piece

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(load_recipe("debug", ["--optimizer.lr=0.25"]).as_toml())
    piece = Piece("x", (2,), (0,), torch.zeros(2), True)
    save(
        LocalStore(tmp_path / "run" / "checkpoints"), [piece], {"config": load_recipe("debug").as_json()}, 3, SingleProcessWorld()
    )
    assert say("config", "diff", "debug", "run")[0] == 1
    for side in ("run/checkpoints", "run/checkpoints/step-00000003"):
        assert say("config", "diff", "debug", side) == (0, "no difference\n")
        code, said = say("config", "diff", "run", side)
        assert code == 1 and "optimizer.lr was 0.25, is 0.003" in said


def test_secrets_are_compared_but_not_shown(say: Say, tmp_path: Path) -> None:
    tracker = 'base = "debug"\n[[trackers]]\nname = "./mine.py:Mine"\napi_key = "{}"\n'
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Any\nfrom forge_core.component import Component\n\n\n"
        '@dataclass(frozen=True, kw_only=True)\nclass Mine(Component):\n    """A."""\n\n    api_key: str = ""\n    """A."""\n\n'
        "    def build(self, run: Any) -> Any:\n        return None\n"
    )
    (tmp_path / "a.toml").write_text(tracker.format("s3cret-one"))
    (tmp_path / "b.toml").write_text(tracker.format("s3cret-two"))
    code, said = say("config", "diff", "a.toml", "b.toml")
    assert code == 1 and "trackers.0.api_key" in said and "s3cret" not in said


@pytest.mark.parametrize("sides", [("debug", "nowhere.toml"), ("nowhere", "debug"), ("debug", "empty")])
def test_what_is_no_side_is_refused(say: Say, tmp_path: Path, sides: tuple[str, str]) -> None:
    (tmp_path / "empty").mkdir()
    assert say("config", "diff", *sides)[0] == 2


def completed(words: str, at: int | None = None) -> list[str]:
    """What bash is offered for the last word."""
    parts = words.split(" ")
    environment = {"_FORGE_TRAIN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at or len(parts) - 1)}
    probe = (
        "import sys, atexit\nfrom forge_train.cli import main\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\nmain()"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stderr.strip() == "False", "completion imported torch"
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("forge-train pl", ["plan", "plugins"]),
        ("forge-train config d", ["diff"]),
        ("forge-train run --fr", ["--fresh"]),
        ("forge-train check debug-", ["debug-cross", "debug-joint", "debug-moe", "debug-moma", "debug-mot"]),
        ("forge-train run debug --train.gr", ["--train.grad_clip="]),
        ("forge-train config show debug --optimizer.na", ["--optimizer.name="]),
        ("forge-train run debug --schedule.name = w", ["wsd"]),
    ],
)
def test_m3_the_shell_completes_the_whole_command(words: str, offered: list[str]) -> None:
    assert completed(words) == offered


def test_every_key_of_a_recipe_is_offered(tmp_path: Path) -> None:
    offered = set(recipe_keys("debug"))
    for info in fields_of(Job):
        slot = any(isinstance(item, Slot) for item in getattr(info.type, "__metadata__", ()))
        assert any(key.startswith(f"{info.name}.") or key == info.name for key in offered) or not slot, info.name
    assert load_recipe("debug", [f"--{key}={value}" for key, value in {"train.max_steps": 3, "optimizer.name": "adamw"}.items()])
    assert {"train.max_steps", "optimizer.name", "model.attention.name", "checkpoint.every"} <= offered


def test_a_recipe_with_faults_still_completes_keys(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[train\n")
    assert "train.max_steps" in set(recipe_keys(str(tmp_path / "broken.toml")))


def test_the_script_for_a_shell_names_the_command() -> None:
    command = [sys.executable, "-m", "forge_train"]
    environment = {**os.environ, "_FORGE_TRAIN_COMPLETE": "source_bash"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "_FORGE_TRAIN_COMPLETE=complete_bash" in result.stdout and " forge-train" in result.stdout
