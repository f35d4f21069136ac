"""Recipes that ship with the trainer. `forge_train.presets:demo` is the path of `demo.toml` next to this file."""

from pathlib import Path


def __getattr__(name: str) -> Path:
    """The path of the recipe `name`, so that the table of parts can name it like an object: with `_` for each hyphen."""
    path = Path(__file__).parent / f"{name.replace('_', '-')}.toml"
    if name.startswith("_") or not path.is_file():
        raise AttributeError(f"unknown preset {name!r}")
    return path
