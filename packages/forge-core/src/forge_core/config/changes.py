"""Two resolved recipes, key by key, with the class of each key: what a resume is told, allows and refuses.

A table that is there on one side only, or names another component, is one change: the keys of one component mean nothing to
another.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forge_core.component import KeyClass, class_of_keys
from forge_core.config.fields import Shape, shape_of
from forge_core.config.toml import value_text
from forge_core.config.tree import Array, Leaf, Node, Table, join, leaves, plain
from forge_core.config.validation import Resolution
from forge_core.errors import PluginError
from forge_core.redaction import HIDDEN, redacted
from forge_core.registry import Registry

ABSENT = Leaf(None, "")
"""Stands for a key that one of the recipes does not have."""


@dataclass(frozen=True)
class Change:
    """One key with another value; secrets are hidden in both."""

    key: str
    was: Any
    now: Any
    key_class: KeyClass

    def __str__(self) -> str:
        """`model.rope.theta was 10000.0, is 10`"""
        return f"{self.key} was {_shown(self.was)}, is {_shown(self.now)}"


def changes(before: Resolution, now: Resolution, registry: Registry) -> list[Change]:
    """Every key whose value differs. Both recipes are resolved by this version: a key that one was written without has its
    default. Two values that are hidden as secrets count as equal."""
    return list(_Comparison(before, now, registry).node("", before.tree, now.tree))


def class_of(key: str, before: Resolution, now: Resolution, registry: Registry) -> KeyClass:
    """The class of a key of one of the two recipes."""
    return _Comparison(before, now, registry).class_of(key)


def vanished(written: Table, read: Resolution) -> dict[str, Any]:
    """Keys of a recipe that this version does not know, with their values; secrets are hidden."""
    known = {key for key, _, _ in leaves(read.tree)}
    return {key: redacted(value, key) for key, value, _ in leaves(written) if key not in known}


def keys_of(outcome: Resolution) -> set[str]:
    """Every key that can be told apart from another one: fields, and the names of components."""
    return set(outcome.fields) | {join(key, "name") for key in outcome.chosen}


@dataclass(frozen=True)
class _Comparison:
    before: Resolution
    now: Resolution
    registry: Registry

    def node(self, key: str, was: Node, now: Node) -> Iterator[Change]:
        if isinstance(was, Table) and isinstance(now, Table) and not self._is_leaf(key):
            yield from self._tables(key, was, now)
        elif isinstance(was, Array) and isinstance(now, Array) and self._alike(key, was, now):
            for index, (old, new) in enumerate(zip(was.items, now.items, strict=True)):
                yield from self.node(join(key, str(index)), old, new)
        else:
            yield from self._values(key, was, now)

    def _tables(self, key: str, was: Table, now: Table) -> Iterator[Change]:
        if not self._same_component(key):
            yield from self._values(join(key, "name"), was, now)
            return
        for name in dict.fromkeys([*was.items, *now.items]):
            if name != "name" or key not in self.now.chosen:  # a name may be spelled in two ways
                yield from self.node(join(key, name), was.items.get(name, ABSENT), now.items.get(name, ABSENT))

    def _alike(self, key: str, was: Array, now: Array) -> bool:
        """Whether two lists of tables hold the same kinds in the same order, so that their items can be compared."""
        if len(was.items) != len(now.items) or any(isinstance(item, Leaf) for item in (*was.items, *now.items)):
            return False
        return all(self._same_component(join(key, str(index))) for index in range(len(was.items)))

    def _same_component(self, key: str) -> bool:
        old, new = self.before.chosen.get(key), self.now.chosen.get(key)
        if old == new or old is None or new is None:
            return old == new
        try:
            return self.registry.find(*old) == self.registry.find(*new)  # `muon` and `forge-extra:muon` may be one
        except PluginError:
            return False

    def _values(self, key: str, was: Node, now: Node) -> Iterator[Change]:
        old, new = plain(was), plain(now)
        shown = redacted(old, key), redacted(new, key)
        # A checkpoint keeps no secrets, so only the rest can be compared with it; an older one may have kept more of it.
        known = HIDDEN not in str(old) + str(new)
        if old != new and (known or shown[0] != shown[1]):
            yield Change(key, *shown, self.class_of(key))

    def _is_leaf(self, key: str) -> bool:
        """Whether a field holds a table as its value, such as a mapping of texts to numbers."""
        shape = self._shape(key)
        return shape is not None and shape.kind == "leaf"

    def _shape(self, key: str) -> Shape | None:
        info = self.now.fields.get(key) or self.before.fields.get(key)
        return None if info is None else shape_of(info.type)

    def class_of(self, key: str) -> KeyClass:
        """That of the field which holds the key. Where the key of a table is the name of its component, as in
        `[transforms.NAME]`, the component says what its presence means."""
        at = key
        while at and self._shape(at) is None:
            at = at.rpartition(".")[0]
        shape = self._shape(at)
        if shape is None:
            return KeyClass.IDENTITY
        table = key.removesuffix(".name")
        if table != at and shape.inner is not None and shape.inner.slot is not None and shape.inner.slot.named_by_key:
            return self._class_of_choice(table)
        return next(outcome.fields[at].key_class for outcome in (self.now, self.before) if at in outcome.fields)

    def _class_of_choice(self, table: str) -> KeyClass:
        """What the components declare that were chosen here before and now; `IDENTITY` where one declares nothing."""
        chosen = [outcome.chosen[table] for outcome in (self.now, self.before) if table in outcome.chosen]
        try:
            found = [class_of_keys(self.registry.load(group, name)) or KeyClass.IDENTITY for group, name in chosen]
        except PluginError:
            return KeyClass.IDENTITY
        return KeyClass.IDENTITY if KeyClass.IDENTITY in found or not found else found[0]


def _shown(value: Any) -> str:
    return "nothing" if value is None else value_text(value)
