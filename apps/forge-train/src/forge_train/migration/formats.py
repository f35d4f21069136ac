"""Recognizes the framework of a configuration file, and reads the file."""

import ast
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forge_core.config.toml import key_lines, shown_path
from forge_core.config.tree import Keys
from forge_core.errors import ForgeError
from forge_train.migration import kempnerforge, megatron, nanogpt, torchtitan, torchtitan_python, trainer
from forge_train.migration.engine import Framework, Source, SourceSetting, Unread
from forge_train.migration.literals import assignments
from forge_train.migration.shell import FLAG, read_arguments, scalar
from forge_train.recipe.schema import Job

FRAMEWORKS: Mapping[str, Framework] = {
    framework.name: framework
    for framework in (
        kempnerforge.KEMPNERFORGE,
        torchtitan.TORCHTITAN,
        megatron.MEGATRON,
        nanogpt.NANOGPT,
        trainer.TRAINER,
    )
}
"""The frameworks by the value of `--from`."""

LARGEST = 4_000_000
"""Maximum number of bytes of a configuration."""

Settings = tuple[dict[str, SourceSetting], list[Unread]]


@dataclass(frozen=True)
class _File:
    """A configuration file; `function` is the one that returns the configuration, if it was named."""

    text: str
    path: Path
    function: str | None


def read_source(path: Path, framework: str | None = None, function: str | None = None) -> tuple[Framework, Source]:
    """Reads a configuration file without running any code.

    Args:
        path: TOML, Python, a shell script or an argument file, YAML, or JSON.
        framework: name in `FRAMEWORKS`; by default, the framework whose keys the file has.
        function: the function of a torchtitan Python file that returns the configuration; needed if the file has several.

    Raises:
        ForgeError: the file cannot be read, is not a configuration, or is one of no known framework.
    """
    if framework is not None and framework not in FRAMEWORKS:
        raise ForgeError(f"--from {framework}: choose one of {', '.join(FRAMEWORKS)}")
    text, shown = _text(path), shown_path(path)
    chosen = [FRAMEWORKS[framework]] if framework else list(FRAMEWORKS.values())
    found: list[tuple[int, Framework, Settings]] = []
    failures: list[str] = []
    for candidate in chosen:
        try:
            read = _READERS[candidate.name](_File(text, path, function))
        except ForgeError as error:
            failures.append(str(error))
            continue
        if read is not None:
            known = sum(name in candidate.table for name in read[0])
            found.append((known, candidate, read))
    found.sort(key=lambda item: -item[0])
    if _is_forge_recipe(text, found[0][0] if found else 0):
        raise ForgeError(f"{shown} is a recipe of Forge already; check it with `forge-train check {shown}`")
    if not found or found[0][0] == 0:
        raise _unrecognized(shown, FRAMEWORKS[framework] if framework else None, failures)
    if framework is None and len(found) > 1 and found[0][0] == found[1][0]:
        names = " and ".join(item[1].title for item in found if item[0] == found[0][0])
        raise ForgeError(f"{shown} may be a configuration of {names}; name the framework with --from")
    _, winner, (settings, rest) = found[0]
    if function is not None and (winner is not torchtitan.TORCHTITAN or path.suffix == ".toml"):
        raise ForgeError(f"--function {function} names a function of a torchtitan Python file, which {shown} is not; remove it")
    return winner, Source(settings, tuple(rest), _run_name(path, function))


def _text(path: Path) -> str:
    shown = shown_path(path)
    if path.is_dir():
        raise ForgeError(f"{shown} is a directory; name the configuration file in it")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ForgeError(f"{shown} cannot be read: {error.strerror}; check the path") from error
    if len(content) > LARGEST:
        raise ForgeError(f"{shown} has {len(content):,} bytes, too many for a configuration; name the configuration file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ForgeError(
            f"{shown} is not a text file (byte {error.start} is not UTF-8); name the configuration, not weights or data"
        ) from error
    if "\x00" in text:
        raise ForgeError(f"{shown} is not a text file (it has zero bytes); name the configuration, not weights or data")
    if not text.strip():
        raise ForgeError(f"{shown} is empty; name a file with settings")
    return text


def _unrecognized(shown: str, framework: Framework | None, failures: list[str]) -> ForgeError:
    if framework is not None:
        why = f": {failures[0]}" if failures else ", or has no key that is known"
        return ForgeError(f"{shown} is not a configuration of {framework.title}{why}; {framework.title} has {framework.files}")
    known = "\n".join(f"  {item.title} (--from {item.name}): {item.files}" for item in FRAMEWORKS.values())
    why = "".join(f"\n  {failure}" for failure in dict.fromkeys(failures))
    return ForgeError(f"{shown} is not a configuration of a known framework{why and ':'}{why}\nKnown are\n{known}")


def _is_forge_recipe(text: str, known: int) -> bool:
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return False
    ours = {item.name: item.type for item in fields(Job)}
    typical = sum(
        1
        for name, keys in _FORGE.items()
        for key in keys
        if isinstance(table := tree.get(name), dict) and key in table  # pyright: ignore[reportUnknownVariableType]
    )
    return (
        (isinstance(tree.get("base"), str) and set(tree) <= {"base", "plugins", *ours})
        or 0 < known <= 2 * typical
        or typical > known
    )


_FORGE: Mapping[str, tuple[str, ...]] = {
    "job": ("name", "dir", "seed"),
    "model": ("layers", "heads", "kv_heads", "max_length", "moe", "rope", "attention"),
    "data": ("sequence_length", "sources", "tokenizer", "evaluation"),
    "train": ("global_batch", "micro_batch", "grad_clip"),
    "parallel": ("dp_shard", "tp", "pp", "cp", "ep"),
    "precision": ("compute", "state"),
    "schedule": ("name", "warmup"),
    "checkpoint": ("every", "keep"),
}
"""Keys by which a recipe of Forge is recognized."""


def _run_name(path: Path, function: str | None) -> str:
    stem = function or path.name.partition(".")[0]
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem).strip("-_")
    return name or "migrated"


def flattened(tree: Mapping[str, Any], lines: Mapping[Keys, int], whole: frozenset[str]) -> dict[str, SourceSetting]:
    """Returns dotted keys; tables named in `whole` are values."""
    settings: dict[str, SourceSetting] = {}

    def walk(table: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for name, value in table.items():
            here = (*path, str(name))
            dotted = ".".join(here)
            if isinstance(value, dict) and dotted not in whole:
                walk(value, here)  # pyright: ignore[reportUnknownArgumentType]
            else:
                settings[dotted] = SourceSetting(value, lines.get(here))

    walk(tree, ())
    return settings


def read_toml_settings(text: str, whole: frozenset[str] = frozenset()) -> dict[str, SourceSetting] | None:
    """Reads TOML as dotted keys; returns None if the text is not TOML."""
    try:
        tree = tomllib.loads(text)
        lines = key_lines(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    return flattened(tree, lines, whole) if any(isinstance(value, dict) for value in tree.values()) else None


def _kempnerforge(file: _File) -> Settings | None:
    settings = read_toml_settings(file.text, kempnerforge.TABLES)
    return None if settings is None else (settings, [])


def _torchtitan(file: _File) -> Settings | None:
    settings = read_toml_settings(file.text)
    if settings is not None:
        return settings, []
    module = _python(file.text, file.path)
    return None if module is None else torchtitan_python.read_python(module, file.path, file.function)


def _nanogpt(file: _File) -> Settings | None:
    module = _python(file.text, file.path)
    return None if module is None else assignments(module)


def _megatron(file: _File) -> Settings | None:
    if file.path.suffix in (".py", ".toml", ".json"):
        return None
    if file.path.suffix in (".yaml", ".yml"):
        tree = _yaml(file.text)
        if not isinstance(tree, dict):
            return None
        return megatron.read_yaml(tree)
    if not any(FLAG.match(word) for word in file.text.replace("(", " ").replace('"', " ").replace("'", " ").split()):
        return None
    return read_arguments(file.text)


def _trainer(file: _File) -> Settings | None:
    if (module := _python(file.text, file.path)) is not None:
        return trainer.read_python(module)
    tree: Any
    if file.text.lstrip().startswith(("{", "[")):
        try:
            tree = json.loads(file.text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ForgeError(f"is not valid JSON: {error}") from error
    elif file.path.suffix in (".yaml", ".yml"):
        tree = _yaml(file.text)
    else:
        return None
    if not isinstance(tree, dict):
        raise ForgeError(f"holds a {type(tree).__name__}, but a configuration is a table of keys")
    nested = {**tree, **(tree.get("training_args") or {})} if isinstance(tree.get("training_args"), dict) else tree
    nested = {name: value for name, value in nested.items() if name != "training_args"}
    return {str(name): SourceSetting(scalar(value) if isinstance(value, str) else value) for name, value in nested.items()}, []


def _python(text: str, path: Path) -> ast.Module | None:
    """Parses Python; returns None if the text is not Python, or is a file of another kind."""
    if path.suffix in (".toml", ".json", ".yaml", ".yml", ".sh"):
        return None
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if path.suffix == ".py":
            raise ForgeError(f"is not valid Python: {error}") from error
        return None


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ForgeError(f"is not valid YAML: {error}") from error


_READERS: Mapping[str, Callable[[_File], Settings | None]] = {
    "kempnerforge": _kempnerforge,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "nanogpt": _nanogpt,
    "trainer": _trainer,
}
