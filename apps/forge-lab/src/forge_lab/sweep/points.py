"""Search space of a sweep: its keys and axes, and the points generated from them, each with a stable name."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from forge_core.config.toml import value_text
from forge_core.config.tree import Array, Leaf, Node, Table, join, plain
from forge_core.config.validation import walk
from forge_core.errors import Fault, did_you_mean
from forge_core.registry import Registry

Kind = Literal["grid", "random", "halving"]
Scale = Literal["linear", "log", "int"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search over the space: which points are trained, and by which metric they are compared."""

    kind: Kind = "grid"
    """`grid` trains every combination, `random` draws `samples` of them, `halving` trains all briefly and continues the best."""
    samples: Annotated[int, Gt(0)] | None = None
    """Number of points to draw, for `random`, and for `halving` over ranges. A higher number keeps earlier points."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the draws. The seed of a run is `job.seed`."""
    metric: str = "evaluation/held_out/loss"
    """Metric to compare by, under the name that a run logs."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher is better."""
    repeats: Annotated[int, Gt(0)] = 1
    """Number of runs of each point, with consecutive seeds from `job.seed` of the recipe; settings are compared by their mean."""
    rungs: list[Annotated[int, Gt(0)]] = field(default_factory=list)
    """For `halving`: steps after which the points are compared; the last comparison is at the end of the run."""
    keep: Annotated[float, Gt(0), Lt(1)] = 0.5
    """For `halving`: fraction of the points that continues after each rung, rounded, at least one point."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Contents of the file of a sweep."""

    recipe: str
    """Base recipe of every run: a TOML file, relative to the sweep's file, or the name of a preset."""
    dir: str | None = None
    """Directory of the sweep; by default `sweeps/<name of its file>`."""
    processes: Annotated[int, Gt(0)] = 1
    """Number of processes of each run, on this machine."""
    search: Search = field(default_factory=Search)
    """Search over the space."""
    vary: dict[str, Any]
    """Keys of the recipe to vary, each with a list of values or a range `{low, high, scale, count}`."""
    together: list[list[str]] = field(default_factory=list)
    """Groups of keys that vary jointly: the first values of all lists together, then the second ones, and so on."""
    slurm: dict[str, str | int] = field(default_factory=dict)
    """Further options of `sbatch` for the job array, such as `partition = "gpu"`."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Values between two numbers, both included."""

    low: float
    """The smallest value."""
    high: float
    """The largest value."""
    scale: Scale = "linear"
    """`linear`; `log` is uniform in the logarithm; `int` is linear over integers."""
    count: Annotated[int, Gt(1)] | None = None
    """Number of evenly spaced values for a grid, including `low` and `high`."""


DIGITS = 4
"""Significant digits of a drawn or spaced number, so that the name of a point shows the exact value used for training."""
_EDGES = ("low", "high", "scale", "count")


@dataclass(frozen=True)
class Axis:
    """One dimension of the space.

    Attributes:
        keys: keys of the recipe; several keys vary jointly.
        values: tuples with one value per key; empty for a range.
        range: range of the only key; None for a list of values.
    """

    keys: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...] = ()
    range: Range | None = None

    def draw(self, random: Random) -> tuple[Any, ...]:
        """Draws one of the values, or a number of the range."""
        if self.range is None:
            return self.values[random.randrange(len(self.values))]
        return (_at(self.range, random.random()),)

    def every(self) -> tuple[tuple[Any, ...], ...]:
        """Returns all values for a grid: those of the list, or `count` evenly spaced ones of the range, without duplicates."""
        if self.range is None:
            return self.values
        count = self.range.count or 0
        return tuple(dict.fromkeys((_at(self.range, index / (count - 1)),) for index in range(count)))

    def ends(self) -> tuple[tuple[Any, ...], ...]:
        """Returns the values to validate: all of the list, or the smallest and the largest of the range."""
        return self.values if self.range is None else ((_at(self.range, 0.0),), (_at(self.range, 1.0),))


def axes_of(vary: Table, together: Sequence[Sequence[str]], registry: Registry) -> tuple[list[Axis], list[Fault]]:
    """Returns the axes of a `[vary]` table, in the order of its keys, and its faults.

    Nested tables and quoted keys are equivalent: `optimizer.lr = [...]` and `"optimizer.lr" = [...]`.
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
    """Yields (dotted key, list or range) of every varied key."""
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
    """Yields (message, hint) of faults that involve several keys of a range."""
    if not given.low < given.high:
        yield f"low = {given.low:g} is not below high = {given.high:g}", "swap them, or give a list with one value"
    if given.scale == "log" and given.low <= 0:
        yield f"low = {given.low:g} has no logarithm", "start above 0, or use scale = 'linear'"
    if given.scale == "int" and not (given.low.is_integer() and given.high.is_integer()):
        yield f"low = {given.low:g} and high = {given.high:g} are not both integers", "round them, or use scale = 'linear'"


def _groups(together: Sequence[Sequence[str]], single: Mapping[str, Axis], origin: str) -> tuple[list[list[str]], list[Fault]]:
    """Returns the valid groups of keys, whose lists have one length and which are in one group each, and the faults."""
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
            faults.append(Fault(at, "needs at least two keys", origin, "name the keys that vary jointly"))
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
    """Returns the number at the fraction `part` of the range, rounded to `DIGITS` significant digits and clamped to the range."""
    if given.scale == "int":
        low, high = int(given.low), int(given.high)
        return min(high, low + math.floor(part * (high - low + 1))) if given.count is None else round(low + part * (high - low))
    if given.scale == "log":
        value = math.exp(math.log(given.low) + part * (math.log(given.high) - math.log(given.low)))
    else:
        value = given.low + part * (given.high - given.low)
    return min(max(float(f"{value:.{DIGITS}g}"), given.low), given.high)


SEED = "job.seed"
LONGEST = 100
"""Maximum number of characters of a name; a longer one is cut and ends with a digest."""
_UNSAFE = re.compile(r"[^A-Za-z0-9.+_-]+")  # `=` in a value would make a name ambiguous


@dataclass(frozen=True)
class Point:
    """One run of a sweep. `values` has the value of every varied key; `setting` is the name without the seed of a repeat."""

    name: str
    values: Mapping[str, Any]
    setting: str

    def overrides(self) -> list[str]:
        """Returns the values as command-line overrides, such as `--optimizer.lr=0.001`."""
        return [f"--{key}={value_text(value)}" for key, value in self.values.items()]


def grid(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """Returns every combination of values; the last axis varies fastest."""
    return [_joined(axes, chosen) for chosen in itertools.product(*(axis.every() for axis in axes))]


def sample_points(axes: Sequence[Axis], samples: int, seed: int) -> list[dict[str, Any]]:
    """Returns `samples` distinct settings, or fewer if the space is too small.

    The value of a key depends only on the seed, the index of the draw and the key, so more samples or another key leave the other
    values unchanged.
    """
    found: dict[str, dict[str, Any]] = {}
    for number in range(20 * samples):
        chosen = [axis.draw(Random(f"{seed}/{number}/{'/'.join(axis.keys)}")) for axis in axes]
        values = _joined(axes, chosen)
        found.setdefault(json.dumps(values, sort_keys=True, default=str), values)
        if len(found) == samples:
            break
    return list(found.values())


def named(settings: Iterable[Mapping[str, Any]], seeds: Sequence[int] = ()) -> list[Point]:
    """Returns a named point for every setting, or for every seed of each setting; `optimizer.lr = 1e-3` is named `lr=0.001`.

    A name depends only on the point's own values and on the set of varied keys. Keys with the same last part are named by more of
    their path; names that are cut, or lack characters of a value, end with a digest.
    """
    settings = [dict(values) for values in settings]
    keys = list(dict.fromkeys(key for values in settings for key in values)) + ([SEED] if seeds else [])
    short = _short(keys)
    points = []
    for values in settings:
        setting = _name(values, short)
        for extra in [{SEED: seed} for seed in seeds] or [{}]:
            whole = {**values, **extra}
            points.append(Point(_name(whole, short), whole, setting))
    return points


def _joined(axes: Sequence[Axis], chosen: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    return {key: value for axis, values in zip(axes, chosen, strict=True) for key, value in zip(axis.keys, values, strict=True)}


def _short(keys: Sequence[str]) -> dict[str, str]:
    """Returns the shortest end of every key that tells it from the others."""

    def end(key: str, length: int) -> list[str]:
        return key.split(".")[-length:]

    found = {}
    for key in keys:
        lengths = range(1, key.count(".") + 2)
        alone = [length for length in lengths if all(other == key or end(other, length) != end(key, length) for other in keys)]
        found[key] = ".".join(end(key, alone[0] if alone else lengths[-1]))
    return found


def _name(values: Mapping[str, Any], short: Mapping[str, str]) -> str:
    parts, exact = [], True
    for key, value in values.items():
        text = value if isinstance(value, str) else value_text(value)
        safe = _UNSAFE.sub("-", text)
        exact = exact and safe == text
        parts.append(f"{_UNSAFE.sub('-', short[key])}={safe}")
    name = "_".join(parts)
    if exact and len(name) <= LONGEST:
        return name
    digest = blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()
    return f"{name[:LONGEST]}_{digest}"
