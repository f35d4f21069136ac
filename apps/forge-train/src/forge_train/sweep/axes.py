"""What varies in a sweep: axes, each with the values of one key or of several jointly."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from forge_core.config.tree import Array, Leaf, Node, Table, join, plain
from forge_core.config.validation import walk
from forge_core.errors import Fault, did_you_mean
from forge_core.registry import Registry
from forge_train.sweep.schema import Range

DIGITS = 4
"""Significant digits of a number that is drawn or spaced: the value that is trained is the one in the point's name."""
_EDGES = ("low", "high", "scale", "count")


@dataclass(frozen=True)
class Axis:
    """One direction of the space.

    Attributes:
        keys: of the recipe; several vary jointly.
        values: each with one value for every key; empty for a range.
        range: between which numbers the only key is drawn.
    """

    keys: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...] = ()
    range: Range | None = None

    def draw(self, random: Random) -> tuple[Any, ...]:
        """One of the values, or a number of the range."""
        if self.range is None:
            return self.values[random.randrange(len(self.values))]
        return (_at(self.range, random.random()),)

    def every(self) -> tuple[tuple[Any, ...], ...]:
        """All values of a grid; those of a range are `count` evenly spaced ones, each once."""
        if self.range is None:
            return self.values
        count = self.range.count or 0
        return tuple(dict.fromkeys((_at(self.range, index / (count - 1)),) for index in range(count)))

    def ends(self) -> tuple[tuple[Any, ...], ...]:
        """All values, or the smallest and the largest of a range: what says whether a key takes them."""
        return self.values if self.range is None else ((_at(self.range, 0.0),), (_at(self.range, 1.0),))


def axes_of(vary: Table, together: Sequence[Sequence[str]], registry: Registry) -> tuple[list[Axis], list[Fault]]:
    """The axes of a `[vary]` table in the order of its keys, and everything that is wrong with it.

    Nested tables and quoted keys mean the same: `optimizer.lr = [...]` and `"optimizer.lr" = [...]`.
    """
    faults: list[Fault] = []
    single: dict[str, Axis] = {}
    for key, node in _given(vary):
        axis, wrong = _axis(key, node, registry)
        faults += wrong
        if key in single:
            faults.append(Fault(f"vary.{key}", "is given twice", node.origin, "keep one of them"))
        single[key] = axis
    groups, wrong = _groups(together, single, vary.origin)
    faults += wrong
    grouped = {key: group for group in groups for key in group}
    axes = []
    for key, axis in single.items():
        group = grouped.get(key)
        if group is None:
            axes.append(axis)
        elif key == group[0]:
            axes.append(Axis(tuple(group), tuple(zip(*(_first(single[item]) for item in group), strict=False))))
    return axes, faults


def _given(table: Table, path: str = "") -> Iterator[tuple[str, Node]]:
    """(dotted key, list or range) of everything that varies."""
    for name, node in table.items.items():
        key = f"{path}.{name}" if path else name
        if isinstance(node, Table) and node.items and not any(isinstance(node.items.get(edge), Leaf) for edge in _EDGES):
            yield from _given(node, key)
        else:
            yield key, node


def _axis(key: str, node: Node, registry: Registry) -> tuple[Axis, list[Fault]]:
    at = f"vary.{key}"
    if isinstance(node, Table) and node.items:
        outcome = walk(Range, node, registry)
        faults = [Fault(join(at, fault.key), fault.message, fault.origin, fault.hint) for fault in outcome.faults]
        found = outcome.value if not faults else None
        faults += [Fault(at, message, node.origin, hint) for message, hint in (_range_faults(found) if found else ())]
        return Axis((key,), (), found if not faults else None), faults
    if not isinstance(node, Array):
        said = "an empty table" if isinstance(node, Table) else repr(node.value)
        hint = f'write {key} = [...] or {key} = {{low = ..., high = ..., scale = "log"}}'
        return Axis((key,)), [Fault(at, f"expected a list of values or a range, not {said}", node.origin, hint)]
    values = [plain(item) for item in node.items]
    if not values:
        return Axis((key,)), [Fault(at, "is an empty list", node.origin, "give the values to try")]
    twice = [value for index, value in enumerate(values) if value in values[:index]]
    faults = [Fault(at, f"{value!r} is given twice", node.origin, "keep one of them") for value in twice[:1]]
    return Axis((key,), tuple((value,) for value in values)), faults


def _range_faults(given: Range) -> Iterator[tuple[str, str]]:
    """(message, hint) of what no single key of a range shows."""
    if not given.low < given.high:
        yield f"low = {given.low:g} is not below high = {given.high:g}", "swap them, or give a list with one value"
    if given.scale == "log" and given.low <= 0:
        yield f"low = {given.low:g} has no logarithm", "start above 0, or use scale = 'linear'"
    if given.scale == "int" and not (given.low.is_integer() and given.high.is_integer()):
        yield f"low = {given.low:g} and high = {given.high:g} are not both integers", "round them, or use scale = 'linear'"


def _groups(together: Sequence[Sequence[str]], single: Mapping[str, Axis], origin: str) -> tuple[list[list[str]], list[Fault]]:
    """Groups of which every key varies over a list, all of one length and in no other group; and what is wrong."""
    faults: list[Fault] = []
    good: list[list[str]] = []
    seen: set[str] = set()
    for index, group in enumerate(together):
        at, before = f"together.{index}", len(faults)
        for key in group:
            if key not in single:
                faults.append(Fault(at, f"{key!r} does not vary", origin, did_you_mean(key, list(single))))
            elif single[key].range is not None:
                faults.append(Fault(at, f"{key!r} is a range", origin, "keys that vary jointly need lists of values"))
            if key in seen:
                faults.append(Fault(at, f"{key!r} is in two groups, or twice in one", origin, "keep one of them"))
            seen.add(key)
        if len(group) < 2:
            faults.append(Fault(at, "needs two keys at least", origin, "name the keys that vary jointly"))
        lengths = {key: len(single[key].values) for key in group if key in single}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{key} has {count}" for key, count in lengths.items())
            faults.append(Fault(at, f"lists of different lengths: {shown}", origin, "give one value of each key per point"))
        if len(faults) == before:
            good.append(list(group))
    return good, faults


def _first(axis: Axis) -> list[Any]:
    return [values[0] for values in axis.values]


def _at(given: Range, part: float) -> float | int:
    """The number at a part of the way from low to high, rounded to `DIGITS` and never outside."""
    if given.scale == "int":
        low, high = int(given.low), int(given.high)
        return min(high, low + math.floor(part * (high - low + 1))) if given.count is None else round(low + part * (high - low))
    if given.scale == "log":
        value = math.exp(math.log(given.low) + part * (math.log(given.high) - math.log(given.low)))
    else:
        value = given.low + part * (given.high - given.low)
    return min(max(float(f"{value:.{DIGITS}g}"), given.low), given.high)
