"""Compares two resolved recipes key by key, with the class of each key, which determines what a resume reports or refuses.

A table that only one recipe has, or that names another component, is a single change, because the keys of different components
cannot be compared.
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
"""Placeholder for a key that one of the recipes does not have."""


@dataclass(frozen=True)
class Change:
    """One key whose value differs; secrets are hidden in both values."""

    key: str
    was: Any
    now: Any
    key_class: KeyClass

    def __str__(self) -> str:
        """Returns, for example, `model.rope.theta was 10000.0, is 10`."""
        return f"{self.key} was {_shown(self.was)}, is {_shown(self.now)}"


def changes(before: Resolution, now: Resolution, registry: Registry) -> list[Change]:
    """Returns all keys whose values differ. This version of Forge must have resolved both recipes, so missing keys have their
    defaults. Two values that are hidden as secrets count as equal."""
    return list(_Comparison(before, now, registry).node("", before.tree, now.tree))


def class_of(key: str, before: Resolution, now: Resolution, registry: Registry) -> KeyClass:
    """Returns the class of a key of one of the two recipes."""
    return _Comparison(before, now, registry).class_of(key)


def vanished(written: Table, read: Resolution) -> dict[str, Any]:
    """Returns the keys of a recipe that do not exist in this version of Forge, with their values; secrets are hidden."""
    known = {key for key, _, _ in leaves(read.tree)}
    return {key: redacted(value, key) for key, value, _ in leaves(written) if key not in known}


def keys_of(outcome: Resolution) -> set[str]:
    """Returns all keys of a recipe: fields, and the names of components."""
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
            if name != "name" or key not in self.now.chosen:  # names were compared above: one component may have two spellings
                yield from self.node(join(key, name), was.items.get(name, ABSENT), now.items.get(name, ABSENT))

    def _alike(self, key: str, was: Array, now: Array) -> bool:
        """Whether two lists of tables have the same components in the same order, so that their items can be compared."""
        if len(was.items) != len(now.items) or any(isinstance(item, Leaf) for item in (*was.items, *now.items)):
            return False
        return all(self._same_component(join(key, str(index))) for index in range(len(was.items)))

    def _same_component(self, key: str) -> bool:
        old, new = self.before.chosen.get(key), self.now.chosen.get(key)
        if old == new or old is None or new is None:
            return old == new
        try:
            return self.registry.find(*old) == self.registry.find(*new)  # `muon` and `forge-extra:muon` may be the same
        except PluginError:
            return False

    def _values(self, key: str, was: Node, now: Node) -> Iterator[Change]:
        old, new = plain(was), plain(now)
        shown = redacted(old, key), redacted(new, key)
        # Checkpoints hide secrets, so only the other parts of a value can be compared; older ones may hide less of it.
        known = HIDDEN not in str(old) + str(new)
        if old != new and (known or shown[0] != shown[1]):
            yield Change(key, *shown, self.class_of(key))

    def _is_leaf(self, key: str) -> bool:
        """Whether the value of a field is itself a table, such as a mapping of texts to numbers."""
        shape = self._shape(key)
        return shape is not None and shape.kind == "leaf"

    def _shape(self, key: str) -> Shape | None:
        info = self.now.fields.get(key) or self.before.fields.get(key)
        return None if info is None else shape_of(info.type)

    def class_of(self, key: str) -> KeyClass:
        """Returns the class of the field that holds the key. If the key of a table is the name of its component, as in
        `[transforms.NAME]`, it is the class that the component declares."""
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
        """Returns the class that the components of a table, before and now, declare; `IDENTITY` if one declares none."""
        chosen = [outcome.chosen[table] for outcome in (self.now, self.before) if table in outcome.chosen]
        try:
            classes = [class_of_keys(self.registry.load(group, name)) or KeyClass.IDENTITY for group, name in chosen]
        except PluginError:
            return KeyClass.IDENTITY
        return KeyClass.IDENTITY if KeyClass.IDENTITY in classes or not classes else classes[0]


def _shown(value: Any) -> str:
    return "nothing" if value is None else value_text(value)
