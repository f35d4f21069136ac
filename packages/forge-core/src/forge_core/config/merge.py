"""Lays one layer over another, guided by the schema.

The schema is needed for one rule: when a layer changes a component's `name`, what lower layers said about the other
component must not leak into the new one. `[job] name` is not a component's, `[optimizer] name` is, and so is the
default name of a slot that no layer wrote down.
"""

from collections.abc import Callable

from forge_core.component import Slot
from forge_core.config.shape import LEAF, Shape, shapes_in
from forge_core.config.tree import Array, Leaf, Node, Table, join
from forge_core.errors import Fault, PluginError
from forge_core.registry import Registry

Children = Callable[[str], Shape | None]


def merge(lower: Table, upper: Table, schema: type, registry: Registry, owner: str = "") -> tuple[Table, list[Fault]]:
    """`upper` over `lower`: tables merge, arrays and values replace; plus faults of list indexes.

    Args:
        owner: the distribution whose preset `upper` is: names in it mean its own parts first, and get its name in front where
            they would mean another part in a recipe of a user.
    """
    merger = _Merger(registry, owner)
    merged = merger.node("", "", lower, upper, Shape("section", schema))
    assert isinstance(merged, Table)
    return merged, merger.faults


def merge_node(key: str, lower: Table, upper: Table, shape: Shape, registry: Registry) -> Node:
    """As `merge`, for the table of one field."""
    return _Merger(registry).node(key, "", lower, upper, shape)


class _Merger:
    def __init__(self, registry: Registry, owner: str = "") -> None:
        self.registry, self.owner = registry, owner
        self.faults: list[Fault] = []

    def node(self, key: str, part: str, lower: Node | None, upper: Node, shape: Shape | None) -> Node:
        if isinstance(upper, Array) and self.owner and shape is not None and shape.inner is not None:
            items = [self.node(join(key, str(index)), "", None, item, shape.inner) for index, item in enumerate(upper.items)]
            return Array(items, upper.origin)
        if not isinstance(upper, Table):
            return upper
        if self.owner and shape is not None and shape.slot is not None and shape.kind == "component":
            upper = self.owned(upper, shape.slot, part)
        if upper.edits and (
            isinstance(lower, Array) or (lower is None and shape is not None and shape.kind in ("list", "tuple"))
        ):
            return self.items(key, lower if isinstance(lower, Array) else Array([], upper.origin), upper, shape)
        if not isinstance(lower, Table):
            lower = Table({}, upper.origin)
        before = _name_in(lower, shape, part)
        after = _name_in(upper, None, part) or before
        named = shape is None or shape.kind == "component"
        if named and before is not None and after != before and not self.same(shape, before, after):
            lower = Table({}, upper.origin)
        child = self.children(shape, after)
        merged = dict(lower.items)
        for name, value in upper.items.items():
            merged[name] = self.node(join(key, name), name, merged.get(name), value, child(name))
        return Table(merged, lower.origin if lower.items else upper.origin)

    def owned(self, table: Table, slot: Slot, part: str) -> Table:
        """The table of a component with the whole name of its part, where that is the owner's and the bare name means another."""
        given = table.items.get("name")
        bare = given.value if isinstance(given, Leaf) else part if given is None and slot.named_by_key else None
        if not isinstance(bare, str) or ":" in bare:
            return table
        try:
            entry = self.registry.find(slot.group, bare, self.owner)
        except PluginError:  # reported, with its origin, when the merged tree is validated
            return table
        name = self.registry.spelled(entry)
        if name == bare:
            return table
        return Table({**table.items, "name": Leaf(name, given.origin if given else table.origin)}, table.origin, table.edits)

    def items(self, key: str, lower: Array, edits: Table, shape: Shape | None) -> Node:
        """Applies `--key.INDEX...=value` to a list; the index behind the last item appends."""
        merged = list(lower.items)
        inner = (shape.inner or LEAF) if shape is not None else None
        for part, value in sorted(edits.items.items(), key=lambda item: (len(item[0]), item[0])):
            if not part.isdecimal() or int(part) > len(merged):
                legal = f"0 to {len(merged)} (the last appends)" if merged else "0 (the list is empty)"
                self.faults.append(Fault(join(key, part), "is not an item of the list", value.origin, f"indexes are {legal}"))
                continue
            index = int(part)
            below = merged[index] if index < len(merged) else None
            item = self.node(join(key, part), part, below, value, inner)
            merged[index : index + 1] = [item]
        return Array(merged, lower.origin if lower.items else edits.origin)

    def children(self, shape: Shape | None, name: str | None) -> Children:
        """The shape of each key of a table; None where the schema does not say."""
        if shape is None:
            return lambda _: None
        if shape.kind == "leaf":
            return lambda _: LEAF
        if shape.kind == "dict":
            return lambda _: shape.inner
        cls = shape.type
        if shape.kind == "component":
            try:
                cls = self.registry.load(shape.slot.group, name) if shape.slot and name else None
            except PluginError:  # reported, with its origin, when the merged tree is validated
                cls = None
        if cls is None or shape.kind in ("list", "tuple"):
            return lambda _: None
        fields = shapes_in(cls)
        return lambda part: fields[part][1] if part in fields else None

    def same(self, shape: Shape | None, before: str, after: str | None) -> bool:
        """Whether two spellings (`muon`, `forge-extra:muon`) mean one component."""
        if shape is None or shape.slot is None or after is None:
            return False
        try:
            return self.registry.find(shape.slot.group, before) == self.registry.find(shape.slot.group, after)
        except PluginError:
            return False


def _name_in(table: Table, shape: Shape | None, part: str) -> str | None:
    found = table.items.get("name")
    if isinstance(found, Leaf) and isinstance(found.value, str):
        return found.value
    if shape is None or shape.slot is None:
        return None
    return part if shape.slot.named_by_key else shape.slot.default
