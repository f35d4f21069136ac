"""Two recipes key by key: files, presets, what runs were started with, or what checkpoints were made with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_core.config.tree import build as tree_of
from forge_core.config.tree import leaves
from forge_core.redact import HIDDEN, redacted
from forge_train.directory import RECIPE
from forge_train.recipe import load

ABSENT = "(absent)"
"""Stands for the value of a key that one side does not have."""


@dataclass(frozen=True)
class Difference:
    """One key, and its value on both sides; secrets are hidden."""

    key: str
    one: Any
    other: Any


def differences(one: str, other: str, overrides: Sequence[str] = ()) -> list[Difference]:
    """Every key whose value differs, defaults included, in the order of the first side.

    Args:
        one, other: a TOML file, the name of a preset, a run's directory, a checkpoint, or a directory of checkpoints.
        overrides: `--section.key=value`, laid over the second side, which is a recipe then.

    Raises:
        ForgeError: a side is none of these, or a recipe has faults.
    """
    left, right = _values(one, ()), _values(other, overrides)
    return [
        Difference(key, _shown(left.get(key, ABSENT), key), _shown(right.get(key, ABSENT), key))
        for key in [*left, *(key for key in right if key not in left)]
        if _differ(left.get(key, ABSENT), right.get(key, ABSENT))
    ]


def _values(given: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Dotted key -> value of everything that a recipe says."""
    path = Path(given)
    if path.is_dir() and (path / RECIPE).is_file():
        given = str(path / RECIPE)
    elif path.is_dir() and not overrides and not any(path.glob("*.toml")):
        return _flat(_recorded(path))
    return _flat(load(given, overrides).as_json())


def _recorded(path: Path) -> Mapping[str, Any]:
    """The recipe that a checkpoint carries."""
    from forge_ckpt.locate import locate
    from forge_ckpt.store import LocalStore
    from forge_ckpt.verify import open_manifest

    place = locate(path)
    return open_manifest(LocalStore(place.store), place.name)[0].meta.get("config", {})


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value, _ in leaves(tree_of(dict(recipe), (), lambda _: "", Path()))}


def _differ(one: Any, other: Any) -> bool:
    """A checkpoint keeps no secrets, so a hidden value says nothing about a difference."""
    return one != other and HIDDEN not in (one, other)


def _shown(value: Any, key: str) -> Any:
    return redacted(value, key.rpartition(".")[2])
