"""Presets are found by name, and every one is a valid recipe of the size that it states."""

import tomllib
from pathlib import Path

import pytest

import forge_train.presets
from forge_core.registry import Registry

NAMES = sorted(path.stem for path in Path(forge_train.presets.__file__).parent.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_the_registry_gives_the_path(name: str) -> None:
    path = Registry().load("forge.presets", name)
    assert isinstance(path, Path)
    assert tomllib.loads(path.read_text())["job"]["name"] == name


def test_every_registered_preset_of_the_trainer_is_a_file() -> None:
    registered = {entry.name for entry in Registry().of("forge.presets") if entry.distribution == "forge-train"}
    assert registered == set(NAMES) >= {"debug", "demo"}


def test_an_unknown_preset_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        forge_train.presets.__getattr__("nothing")


def test_the_components_that_presets_name_exist() -> None:
    registry = Registry()
    for name in NAMES:
        recipe = tomllib.loads(registry.load("forge.presets", name).read_text())
        if "base" in recipe:  # which has them
            continue
        for hook in recipe["hooks"]:
            fields = set(registry.load("forge.hooks", hook["name"]).__dataclass_fields__)
            assert set(hook) - {"name"} <= fields
        schedule = {key: value for key, value in recipe["schedule"].items() if key != "name"}
        built = registry.load("forge.schedules", recipe["schedule"]["name"])(**schedule)
        assert built.faults(recipe["train"]["max_steps"]) == []
