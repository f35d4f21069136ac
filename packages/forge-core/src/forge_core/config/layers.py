"""Reads a recipe's layers, lowest first, and merges them: `base` files, the recipe, the command line."""

import codecs
import os
import re
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from forge_core.config.merge import merge
from forge_core.config.overrides import parse_overrides
from forge_core.config.scan import key_lines, repeated_key
from forge_core.config.tree import DEFAULT, TOO_DEEP, Leaf, Table, build, is_too_deep, plugin_files
from forge_core.errors import ConfigError, Fault, PluginError
from forge_core.lines import lines_of
from forge_core.registry import Registry
from forge_core.trust import trust_file

PRESETS = "forge.presets"


class Layered(NamedTuple):
    """A merged recipe: `faults` are those of merging; typing may find more.

    Attributes:
        tree: what the layers say; keys that none of them gives are absent.
        files: every file that was read, the recipe last.
    """

    tree: Table
    faults: tuple[Fault, ...]
    files: tuple[Path, ...]


def load_layers(
    recipe: str | Path | Table, overrides: Sequence[str], schema: type, registry: Registry, folder: Path | None = None
) -> Layered:
    """Merges the recipe (a TOML file or a preset's name) with its bases and the command line.

    Args:
        recipe: path of a TOML file that the user gave, or name of a preset: Python files that it names may run. Or a tree that
            was read from elsewhere, such as a checkpoint or the recipe in a run's directory (`read`), which grants nothing.
        overrides: arguments `--section.key=value`; Python files that they name may run.
        schema: dataclass of the whole recipe; tells which tables hold components.
        registry: finds presets and components.
        folder: what plugin files named in overrides are relative to; the working directory by default.

    Raises:
        ConfigError: a file is missing, is not TOML, or the bases form a cycle.
    """
    layers = {} if isinstance(recipe, Table) else _files(str(recipe), registry)
    lowest = [(recipe, "")] if isinstance(recipe, Table) else []
    tree, faults = Table({}, DEFAULT), []
    extra, wrong = parse_overrides(overrides, folder or Path.cwd())
    for layer, _ in (*layers.values(), (extra, "")):
        for file in plugin_files(layer):
            trust_file(file)
    for layer, owner in [*lowest, *reversed(layers.values()), (extra, "")]:
        tree, found = merge(tree, layer, schema, registry, owner)
        faults += found
    return Layered(tree, (*wrong, *faults), tuple(reversed(layers)))


def _files(recipe: str, registry: Registry) -> dict[Path, tuple[Table, str]]:
    """The recipe's file and its bases, each with what it says and the distribution whose preset it is, the recipe first."""
    layers: dict[Path, tuple[Table, str]] = {}
    following, owner = _found(recipe, registry, "RECIPE", "command line", Path())
    while following is not None:
        if following in layers:
            chain = list(layers)
            circle = " -> ".join(_shown(file) for file in [*chain[chain.index(following) :], following])
            raise ConfigError([Fault("base", f"the bases form a cycle: {circle}", _shown(chain[-1]))])
        layers[following] = read(following), owner
        following, owner = _base(layers[following][0], following, registry, owner)
    return layers


def read(path: Path) -> Table:
    """One TOML file as a tree whose origins are its lines.

    Raises:
        ConfigError: it cannot be read or is not TOML.
    """
    shown = _shown(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError([Fault(shown, f"cannot be read: {error.strerror}")]) from error
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode()  # some editors write a byte order mark, which means nothing here
    except UnicodeDecodeError as error:
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ConfigError([Fault(shown, "is UTF-16 text", hint="save it as UTF-8")]) from error
        raise ConfigError([Fault(shown, f"is not UTF-8 text (byte {error.start})", hint="save it as UTF-8")]) from error
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_syntax(shown, text, error)]) from error
    except RecursionError:
        raise ConfigError([Fault(shown, TOO_DEEP)]) from None
    if is_too_deep(parsed):
        raise ConfigError([Fault(shown, TOO_DEEP)])
    lines = key_lines(text)

    def origin(at: tuple[str | int, ...]) -> str:
        return f"{shown}:{lines[at]}" if at in lines else shown

    table = build(parsed, (), origin, path.parent)
    assert isinstance(table, Table)
    return table


def find_recipe(recipe: str, registry: Registry, key: str, origin: str, folder: Path) -> Path:
    """The absolute path of a TOML file (relative to `folder`) or of a preset.

    Raises:
        ConfigError: there is neither.
    """
    return _found(recipe, registry, key, origin, folder)[0]


def _found(recipe: str, registry: Registry, key: str, origin: str, folder: Path, owner: str = "") -> tuple[Path, str]:
    """As `find_recipe`, and the distribution that the file belongs to, "" for a user's: that of a preset, and for a file the
    `owner` of what names it.

    Raises:
        ConfigError: there is neither.
    """
    if recipe.endswith(".toml") or "/" in recipe:
        path = (folder / recipe).resolve()
        if path.is_dir():
            raise ConfigError([_directory(recipe, path, key, origin)])
        if not path.is_file():
            near = {file.stem: file.name for file in path.parent.glob("*.toml")} if path.parent.is_dir() else {}
            close = get_close_matches(path.stem, near, n=1)
            hint = f"did you mean {near[close[0]]!r}?" if close else ""
            raise ConfigError([Fault(key, f"file {recipe} does not exist", origin, hint)])
        return path, owner
    if recipe.startswith("-"):
        raise ConfigError([Fault(key, f"expected a recipe before {recipe!r}", origin, "overrides come after the recipe")])
    try:
        entry = registry.find(PRESETS, recipe, owner)
        found = registry.load_entry(entry)
    except PluginError as error:
        if recipe and (folder / recipe).is_dir():
            raise ConfigError([_directory(recipe, folder / recipe, key, origin)]) from error
        hint = "a recipe is a .toml file or the name of a preset"
        raise ConfigError([Fault(key, str(error), origin, hint)]) from error
    path = Path(str(found() if callable(found) else found))
    if not path.is_file():
        raise ConfigError([Fault(key, f"preset {recipe!r} points at {path}, which is not a file", origin)])
    return path.resolve(), "" if entry.is_forge else entry.distribution


def _base(table: Table, path: Path, registry: Registry, owner: str) -> tuple[Path | None, str]:
    """The layer below; takes `base` out of the table. A preset that has the name of its base does not mean itself."""
    base: Any = table.items.pop("base", None)
    if base is None:
        return None, ""
    if not isinstance(base, Leaf) or not isinstance(base.value, str):
        raise ConfigError([Fault("base", "expected the path of a TOML file or the name of a preset", base.origin)])
    found = _found(base.value, registry, "base", base.origin, path.parent, owner)
    return _found(base.value, registry, "base", base.origin, path.parent) if owner and found[0] == path else found


def _directory(recipe: str, path: Path, key: str, origin: str) -> Fault:
    inside = sorted(str(Path(recipe) / file.name) for file in path.glob("*.toml") if file.is_file())
    hint = f"give the file in it: {' or '.join(inside[:5])}" if inside else "give the path of a TOML file"
    return Fault(key, f"{recipe} is a directory", origin, hint)


def _syntax(shown: str, text: str, error: tomllib.TOMLDecodeError) -> Fault:
    at = re.search(r"\(at line (\d+), column (\d+)\)|\(at end of document\)", str(error))
    line = int(at[1]) if at and at[1] else max(len(lines_of(text)), 1)
    if str(error).startswith(_TWICE):
        return _twice(shown, "\n".join(text.replace("\r\n", "\n").split("\n")[:line]))
    written = lines_of(text)[line - 1].strip() if line <= len(lines_of(text)) else ""
    hint = "text needs quotes; booleans are true and false" if "Invalid value" in str(error) else ""
    message = f"is not valid TOML: {str(error).split(' (at ')[0]}" + (f" in `{written}`" if written else "")
    return Fault(shown, message, f"{shown}:{line}", hint)


_TWICE = ("Cannot declare", "Cannot overwrite", "Cannot mutate", "Cannot redefine")
"""How tomllib's messages about a key or table that is given a second time begin."""


def _twice(shown: str, text: str) -> Fault:
    """The fault of a text whose last key or header stood before."""
    path, line, first = repeated_key(text)
    name = ".".join(map(str, path))
    if text.split("\n")[line - 1].lstrip().startswith("["):
        name = f"[{name}]"
    return Fault(shown, f"{name} is given twice" + (f", first on line {first}" if first else ""), f"{shown}:{line}")


def _shown(path: Path) -> str:
    """The path as a user knows it: relative when it lies below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
