"""Keys of what a recipe does not ask for are refused by name; with it they are taken."""

from dataclasses import fields
from pathlib import Path

import pytest

from forge_core.errors import ConfigError
from forge_core.registry import Registry
from forge_train.recipe.checks import SWITCHES
from forge_train.recipe.load import load_recipe
from train.runs import TINY

ON = {
    "checkpoint": ["--checkpoint.mode=async"],
    "train": ["--train.rollback_after=3"],
    "start": ["--start.weights=there"],
    "data": ["--data.packing=best_fit"],
}
IDLE = (
    "checkpoint.saver=thread",
    "checkpoint.busy=skip",
    "train.max_rollbacks=1",
    "train.rollback_lr=0.5",
    "start.section=ema",
    "start.include=['blocks.*']",
    "start.exclude=['norm*']",
    "start.rename=['a=b']",
    "start.draw=['norm*']",
    "data.items_per_row=3",
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize("given", IDLE)
def test_a_key_without_effect_is_refused(recipe: Path, given: str) -> None:
    key = given.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{key}: has no effect without [\s\S]*remove this key"):
        load_recipe(recipe, [f"--{given}"], 1, Registry())
    load_recipe(recipe, [f"--{given}", *ON[key.partition(".")[0]]], 1, Registry())


def test_defaults_are_never_refused(recipe: Path) -> None:
    load_recipe(recipe, ["--checkpoint.saver=process", "--train.max_rollbacks=3", "--start.section=model"], 1, Registry())


def test_every_key_of_a_switch_is_tried(recipe: Path) -> None:
    job = load_recipe(recipe, [], 1, Registry()).job
    keys = set()
    for switch in SWITCHES:
        names = switch.keys or tuple(field.name for field in fields(getattr(job, switch.section)))
        keys |= {f"{switch.section}.{name}" for name in names} - {switch.key}
    assert keys == {given.partition("=")[0] for given in IDLE}
