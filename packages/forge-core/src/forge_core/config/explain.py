"""What a key of a recipe means: its type and range, default, docstring, value and where that came from."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forge_core.config.leaf import written
from forge_core.config.shape import shape_of
from forge_core.config.tree import UNSET, Array, Leaf, Node, Table, join, leaves, plain
from forge_core.config.validate import Outcome
from forge_core.config.words import describe_shape
from forge_core.errors import ConfigError, Fault, PluginError, did_you_mean
from forge_core.registry import Registry


@dataclass(frozen=True)
class Explanation:
    """One key. `default` is None for a key that must be given; `names` are what a component may be called; `key_class` is what a
    resume does with another value (`forge_core.component.KeyClass`)."""

    key: str
    expected: str
    default: Any
    doc: str
    value: Any
    origin: str
    names: tuple[str, ...] = ()
    key_class: str = ""


def explain(outcome: Outcome, registry: Registry, key: str = "") -> list[Explanation]:
    """Explains a key, or every key of a section, or the whole recipe.

    Raises:
        ConfigError: the recipe does not have this key.
    """
    known = list(outcome.fields)
    found = [_one(outcome, registry, at) for at in known if not key or at == key or at.startswith(f"{key}.")]
    if not found:
        shown = key.removesuffix(".name")
        if shown != key and shown in outcome.fields:
            return [_one(outcome, registry, shown)]
        raise ConfigError([Fault(key, "unknown key in this recipe", hint=did_you_mean(key, known))])
    return found


def origins(outcome: Outcome) -> Iterator[tuple[str, Any, str]]:
    """(key, value, origin) of every value of a resolved recipe."""
    yield from leaves(outcome.tree)


def _one(outcome: Outcome, registry: Registry, key: str) -> Explanation:
    info = outcome.fields[key]
    shape = shape_of(info.type)
    node = _at(outcome.tree, key)
    default: Any = None
    names: tuple[str, ...] = ()
    doc = info.doc
    slot = shape.slot or (shape.inner.slot if shape.inner is not None else None)
    if slot is not None:
        names = tuple(registry.names(slot.group))
    if shape.kind == "leaf" and not info.required:
        default = UNSET if info.default is None else written(info.default, shape.type)
    elif shape.kind == "component" and slot is not None:
        default = slot.default
        doc = " ".join(text for text in (doc, _chosen(node, slot.group, registry)) if text)
    return Explanation(
        key, describe_shape(shape), default, doc, _value(node), node.origin if node else "", names, info.key_class.value
    )


def _chosen(node: Node | None, group: str, registry: Registry) -> str:
    """The first line of the docstring of the component that a table names."""
    name = node.items.get("name") if isinstance(node, Table) else None
    if not isinstance(name, Leaf):
        return ""
    try:
        doc = inspect.getdoc(registry.load(group, name.value)) or ""
    except PluginError:
        return ""
    return f"{name.value}: {doc.splitlines()[0]}" if doc else ""


def _value(node: Node | None) -> Any:
    return None if node is None else plain(node)


def _at(node: Node, key: str, path: str = "") -> Node | None:
    if path == key:
        return node
    below: list[tuple[str, Node]] = []
    if isinstance(node, Table):
        below = list(node.items.items())
    elif isinstance(node, Array):
        below = [(str(index), item) for index, item in enumerate(node.items)]
    for part, item in below:
        at = join(path, part)
        if key == at or key.startswith(f"{at}."):
            return _at(item, key, at)
    return None
