"""Writes a migrated recipe as TOML, with the origin of each value as a comment, and keys to fill in."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from forge_core.config.toml import value_text
from forge_train.migration.engine import Blank, Migration
from forge_train.recipe.schema import Job

WIDTH = 132
"""Maximum length of a line with its comment; a longer comment stands above the key."""


def recipe_text(migration: Migration, origin: str) -> str:
    """Returns the recipe as TOML.

    Args:
        migration: a finished translation.
        origin: the file that was read, for the head of the recipe.
    """
    title = migration.framework.title
    lines = [f"# Migrated from {title}: {origin}. A comment behind a value names the key that it comes from."]
    if migration.blanks:
        lines.append('# Lines with "FILL IN" need a value that the file does not define.')
    order = {item.name: index for index, item in enumerate(fields(Job))}
    blanks = {blank.path: blank for blank in migration.blanks if not blank.active}
    tree: dict[str, Any] = dict(migration.recipe)
    for path in blanks:  # a commented key needs the header of its table
        tree.setdefault(path.split(".")[0], {})
    for section in sorted(tree, key=lambda name: order.get(name, len(order))):
        lines += _table(tree[section], (section,), section, migration.comments, blanks)
    return "\n".join(lines) + "\n"


def _table(value: Any, path: tuple[str, ...], at: str, comments: Mapping[str, str], blanks: dict[str, Blank]) -> Iterator[str]:
    title = ".".join(path)
    if isinstance(value, list):
        for index, item in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from ("", f"[[{title}]]")
            yield from _keys(item, path, f"{at}.{index}", comments, blanks)
        return
    below = {f"{at}.{name}" for name in value if _is_section(value[name])}
    here = [blank for name, blank in blanks.items() if name.rpartition(".")[0] == at]
    if here or len(below) < len(value) or not value:
        yield from ("", f"[{title}]")
    yield from _keys(value, path, at, comments, blanks)


def _keys(
    table: Mapping[str, Any], path: tuple[str, ...], at: str, comments: Mapping[str, str], blanks: dict[str, Blank]
) -> Iterator[str]:
    for name, value in sorted(table.items(), key=lambda item: item[0] != "name"):  # a component begins with its name
        if not _is_section(value):
            line, comment = f"{name} = {value_text(value)}", comments.get(f"{at}.{name}", "")
            if comment and len(line) + len(comment) + 4 > WIDTH:
                yield f"# {comment}"
                yield line
            else:
                yield f"{line}  # {comment}" if comment else line
    for blank in [blank for key, blank in blanks.items() if key.rpartition(".")[0] == at]:
        yield f"# {blank.path.rpartition('.')[2]} = {value_text(blank.example)}  # FILL IN: {blank.what}"
        del blanks[blank.path]
    for name, value in table.items():
        if _is_section(value):
            yield from _table(value, (*path, name), f"{at}.{name}", comments, blanks)


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))
