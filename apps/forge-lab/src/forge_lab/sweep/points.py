"""What varies in a sweep: its keys and axes, and the points that they give, each with a name that stays."""

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
    """Which points of the space are trained, and what makes one better than another."""

    kind: Kind = "grid"
    """`grid` trains every combination, `random` draws `samples` of them, `halving` trains all a little and the best on."""
    samples: Annotated[int, Gt(0)] | None = None
    """Points to draw, for `random`, and for `halving` over ranges. More of them later leave those that are there as they are."""
    seed: Annotated[int, Ge(0)] = 0
    """Fixes what is drawn. It is not the seed of a run, which is `job.seed`."""
    metric: str = "evaluation/held_out/loss"
    """The result that counts, by the name under which a run logs it."""
    mode: Literal["min", "max"] = "min"
    """Whether less or more is better."""
    repeats: Annotated[int, Gt(0)] = 1
    """Runs of each point, with `job.seed` of the recipe, the next one, and so on; settings are compared by the mean."""
    rungs: list[Annotated[int, Gt(0)]] = field(default_factory=list)
    """Of `halving`: steps after which the points are compared; the last comparison is at the end of the run."""
    keep: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Of `halving`: the part of the points that goes on after each rung, rounded, one at least."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A whole sweep."""

    recipe: str
    """What every run is based on: a TOML file, relative to the sweep's, or the name of a preset."""
    dir: str | None = None
    """Directory of the sweep instead of `sweeps/<name of its file>`."""
    processes: Annotated[int, Gt(0)] = 1
    """Processes of each run, on this machine."""
    search: Search = field(default_factory=Search)
    """How the space is searched."""
    vary: dict[str, Any]
    """Keys of the recipe, each with a list of values or a range `{low, high, scale, count}`."""
    together: list[list[str]] = field(default_factory=list)
    """Groups of keys that vary jointly: the first values of all lists, the second ones, and so on."""
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
    """`linear`; `log` is even in the logarithm; `int` is linear over integers."""
    count: Annotated[int, Gt(1)] | None = None
    """Values of a grid, evenly spaced, `low` and `high` among them."""


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


SEED = "job.seed"
LONGEST = 100
"""Characters of a name; a longer one is cut and ends with a digest."""
_UNSAFE = re.compile(r"[^A-Za-z0-9.+_-]+")  # without `=`, a name reads in one way


@dataclass(frozen=True)
class Point:
    """One run of a sweep. `values` has a value for every key that varies; `setting` is the same without the seed of a repeat."""

    name: str
    values: Mapping[str, Any]
    setting: str

    def overrides(self) -> list[str]:
        """The values as a command line has them: `--optimizer.lr=0.001`."""
        return [f"--{key}={value_text(value)}" for key, value in self.values.items()]


def grid(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """Every combination, the last axis fastest."""
    return [_joined(axes, chosen) for chosen in itertools.product(*(axis.every() for axis in axes))]


def sample_points(axes: Sequence[Axis], samples: int, seed: int) -> list[dict[str, Any]]:
    """`samples` different settings. What is drawn for a key depends on the seed, the number of the draw and the key alone, so
    more samples, or another key, change none of the others. Fewer come back where the space has no more."""
    found: dict[str, dict[str, Any]] = {}
    for number in range(20 * samples):
        chosen = [axis.draw(Random(f"{seed}/{number}/{'/'.join(axis.keys)}")) for axis in axes]
        values = _joined(axes, chosen)
        found.setdefault(json.dumps(values, sort_keys=True, default=str), values)
        if len(found) == samples:
            break
    return list(found.values())


def named(settings: Iterable[Mapping[str, Any]], seeds: Sequence[int] = ()) -> list[Point]:
    """A point for every setting, or for every seed of each one, `optimizer.lr = 1e-3` as `lr=0.001`.

    A name depends on the point's own values and on which keys vary, so other values leave it as it is. Keys that end alike
    have more of their path in it; values that look alike have a digest.
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
    """Every key by as much of its end as tells it from the others."""

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
