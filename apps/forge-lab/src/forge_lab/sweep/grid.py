"""Reads the file of a sweep, generates its points, and checks each one as `forge-train check` does, before any run starts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forge_core.config.layers import find_recipe
from forge_core.config.toml import read_toml
from forge_core.config.tree import Table, origin_at
from forge_core.config.validation import walk
from forge_core.errors import ConfigError, Fault, did_you_mean
from forge_core.registry import Registry
from forge_lab.sweep.points import SEED, Axis, Grid, Point, Search, axes_of, grid, named, sample_points
from forge_train.recipe.checks import final_metrics
from forge_train.recipe.load import Recipe, load_recipe

MOST = 1000
"""Maximum number of points of a sweep."""
STOP = "train.stop_at"
OURS = ("job.name", "job.dir", STOP)
"""Keys that a sweep sets itself."""


@dataclass(frozen=True)
class Sweep:
    """A valid sweep.

    Attributes:
        file: TOML file of the sweep.
        directory: output directory of the sweep.
        grid: typed contents of the file.
        recipe: base recipe of all runs, as the commands accept it: a path or the name of a preset.
        points: points in order; the index of a job array refers to it.
        resolved: recipe of each point, by name.
        warnings: warnings of all points, without duplicates.
    """

    file: Path
    directory: Path
    grid: Grid
    recipe: str
    points: tuple[Point, ...]
    resolved: dict[str, Recipe]
    warnings: tuple[str, ...] = field(default=())

    def folder(self, point: Point) -> Path:
        """Returns the run directory of a point."""
        return self.directory / "points" / point.name

    def recipe_of(self, point: Point) -> Path:
        """Returns the path of the complete recipe of a point."""
        return self.directory / "recipes" / f"{point.name}.toml"

    def steps(self, point: Point) -> int:
        """Returns the number of optimizer steps of the full run of a point."""
        return self.resolved[point.name].job.train.max_steps


def read_sweep(
    file: Path, overrides: Sequence[str] = (), directory: Path | None = None, registry: Registry | None = None
) -> Sweep:
    """Reads a sweep and checks every point of it.

    Args:
        file: TOML file of the sweep.
        overrides: overrides of the form `--section.key=value`, applied to the recipe of every point.
        directory: directory of the sweep; overrides `dir` of the file.

    Raises:
        ConfigError: the file, or the recipe of a point, is invalid; the error lists all faults.
    """
    registry = registry or Registry()
    tree = read_toml(file)
    outcome = walk(Grid, tree, registry)
    faults = list(outcome.faults)
    vary = tree.items.get("vary")
    parts: dict[str, Any] = dict(outcome.parts)
    axes: list[Axis] = []
    if isinstance(vary, Table):
        axes, wrong = axes_of(vary, parts.get("together", []), registry)
        faults += [_placed(fault, tree) for fault in wrong]
        faults += _own_keys(axes, vary)
    recipe = ""
    if "recipe" in parts:
        recipe, wrong = _recipe(parts["recipe"], tree, file.parent, registry)
        faults += wrong
    if not recipe:
        raise ConfigError(faults)
    given = parts.get("search")
    search = given if isinstance(given, Search) else Search()  # an invalid file may lack the section
    rest = Grid(recipe=recipe, vary={}, processes=parts.get("processes", 1), search=search)
    made: Grid = rest if outcome.faults else outcome.value
    if isinstance(vary, Table) and isinstance(given, Search):
        faults += [_placed(fault, tree) for fault in _search_faults(made, axes)]
    # Keys and values are checked even if the sweep has faults itself, so that all faults are reported at once.
    usable = [axis for axis in axes if (axis.values or axis.range is not None) and not set(axis.keys) & set(OURS)]
    seeds = _seeds(made, recipe, overrides, registry)
    points = named(_each_value(usable)) if faults else named(_settings(made, usable), seeds)
    target = directory or Path(made.dir or Path("sweeps") / file.stem)
    resolved, warnings, found = _checked(made, target, recipe, overrides, points, tree, registry)
    faults += found
    if faults:
        raise ConfigError(dict.fromkeys(faults))
    return Sweep(file, target, made, recipe, tuple(points), resolved, tuple(dict.fromkeys(warnings)))


def _recipe(given: str, tree: Table, folder: Path, registry: Registry) -> tuple[str, list[Fault]]:
    """Returns the recipe as the commands accept it, or "" and the faults if it cannot be loaded."""
    try:
        path = find_recipe(given, registry, "recipe", origin_at(tree, "recipe"), folder)
        load_recipe(path, (), None, registry)
    except ConfigError as refusal:
        return "", list(refusal.faults)
    return (given if not (given.endswith(".toml") or "/" in given) else str(path)), []


def _own_keys(axes: Sequence[Axis], vary: Table) -> Iterator[Fault]:
    for key in (key for axis in axes for key in axis.keys if key in OURS):
        yield Fault(f"vary.{key}", "is set by the sweep itself", origin_at(vary, key), "remove it")


def _search_faults(made: Grid, axes: Sequence[Axis]) -> Iterator[Fault]:
    """Yields faults of `[search]` that involve several keys."""
    search, keys = made.search, [key for axis in axes for key in axis.keys]
    ranges = [axis.keys[0] for axis in axes if axis.range is not None]
    uncounted = [axis.keys[0] for axis in axes if axis.range is not None and axis.range.count is None]
    draws = search.kind == "random" or (search.kind == "halving" and search.samples is not None)
    if not keys:
        yield Fault("vary", "no key varies", hint="add a key of the recipe: [vary] optimizer.lr = [1e-3, 3e-3]")
    if search.kind == "random" and search.samples is None:
        yield Fault("search.samples", "is missing: the number of points that kind = 'random' draws")
    if search.kind == "grid" and search.samples is not None:
        yield Fault("search.samples", "has no effect with kind = 'grid', which trains every combination", hint="remove it")
    for key in uncounted if not draws else ():
        hint = "give the range a count = N, or a list" + ("" if search.kind == "grid" else ", or set search.samples")
        yield Fault(f"vary.{key}", f"is a range, but kind = {search.kind!r} needs a finite number of values", hint=hint)
    for key in [key for key in ranges if key not in uncounted] if draws else ():
        yield Fault(f"vary.{key}.count", "has an effect only in a grid, but here values are drawn", hint="remove it")
    if search.repeats > 1 and SEED in keys:
        yield Fault("search.repeats", f"{search.repeats} runs of each point vary {SEED}, which already varies", hint="keep one")
    count = search.repeats * (search.samples or math.prod(len(axis.every()) for axis in axes if axis.keys[0] not in uncounted))
    if count > MOST:
        key, hint = ("vary", "use kind = 'random', or fewer values") if search.samples is None else ("search.samples", "lower it")
        yield Fault(key, f"{count:,} runs exceed the maximum of {MOST:,} runs of a sweep", hint=hint)
    if search.kind != "halving":
        if search.rungs:
            yield Fault("search.rungs", f"has an effect only with kind = 'halving', not {search.kind!r}", hint="remove it")
        return
    if not search.rungs:
        yield Fault("search.rungs", "is missing: the steps after which points are compared", hint="such as rungs = [100, 300]")
    if sorted(set(search.rungs)) != list(search.rungs):
        yield Fault("search.rungs", f"{list(search.rungs)} must increase")
    if search.repeats > 1:
        yield Fault("search.repeats", "is not supported with kind = 'halving'", hint="repeat the best points in a second sweep")
    if "train.max_steps" in keys:
        message = "varies, but kind = 'halving' compares runs of one length after the same steps"
        yield Fault("vary.train.max_steps", message, hint="remove it, or use kind = 'grid'")


def _placed(fault: Fault, tree: Table) -> Fault:
    """Returns the fault with its line in the sweep's file as origin, unless it has an origin."""
    return fault if fault.origin else replace(fault, origin=origin_at(tree, fault.key))


def _settings(made: Grid, axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """Returns the settings of the search."""
    return grid(axes) if made.search.samples is None else sample_points(axes, made.search.samples, made.search.seed)


def _each_value(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """Returns settings that contain every value of every axis at least once."""
    return [dict(zip(axis.keys, values, strict=True)) for axis in axes for values in axis.ends()]


def _seeds(made: Grid, recipe: str, overrides: Sequence[str], registry: Registry) -> Sequence[int]:
    """Returns the seeds of repeated runs; empty if each point runs once."""
    if made.search.repeats == 1:
        return ()
    try:
        first = load_recipe(recipe, overrides, None, registry).job.job.seed
    except ConfigError:
        return ()  # the checks of the points report the faults of the overrides
    return range(first, first + made.search.repeats)


def _checked(
    made: Grid,
    target: Path,
    recipe: str,
    overrides: Sequence[str],
    points: Sequence[Point],
    tree: Table,
    registry: Registry,
) -> tuple[dict[str, Recipe], list[str], list[Fault]]:
    """Returns the recipe of every point by name, the warnings, and the faults: each once, with the first point that has it."""
    resolved: dict[str, Recipe] = {}
    warnings: list[str] = []
    faults: dict[tuple[str, str], tuple[Fault, list[str]]] = {}
    if made.search.repeats > 1:  # the given seed is the first of the repeats
        overrides = [given for given in overrides if not given.startswith(f"--{SEED}=")]
    for point in points:
        where = [f"--job.name={point.name}", f"--job.dir={target / 'points' / point.name}"]
        try:
            found = load_recipe(recipe, [*overrides, *point.overrides(), *where], made.processes, registry)
        except ConfigError as refusal:
            told: list[Fault] = list(refusal.faults)
        else:
            resolved[point.name] = found
            warnings += found.warnings
            told = list(_point_faults(made, found))
        for fault in told:
            faults.setdefault((fault.key, fault.message), (fault, []))[1].append(point.name)
    keys = {key for point in points for key in point.values}
    return resolved, warnings, [_told(fault, names, len(points), keys, tree) for fault, names in faults.values()]


def _point_faults(made: Grid, found: Recipe) -> Iterator[Fault]:
    """Yields faults of a point's recipe that only matter to the sweep: a metric that is not measured, a rung after the end."""
    known = final_metrics(found.job)
    if known is not None and made.search.metric not in known:
        message = f"no hook of the recipe logs {made.search.metric!r}"
        yield Fault("search.metric", message, hint=did_you_mean(made.search.metric, known) or "add hook 'evaluate' or 'log'")
    steps = found.job.train.max_steps
    if made.search.kind == "halving" and made.search.rungs and made.search.rungs[-1] >= steps:
        message = f"a rung at step {made.search.rungs[-1]} is not before the end of the run (train.max_steps = {steps})"
        yield Fault("search.rungs", message, hint="lower it; the end of the run is always compared")


def _told(fault: Fault, names: Sequence[str], count: int, keys: set[str], tree: Table) -> Fault:
    """Returns a fault of points with the point names; its origin is the line of the sweep's file if a varied key is at fault."""
    key = fault.origin.removeprefix("--")
    vary = tree.items.get("vary")
    origin = fault.origin
    if key in keys and isinstance(vary, Table):
        origin = vary.items[key].origin if key in vary.items else origin_at(vary, key)
    elif not origin:
        origin = origin_at(tree, fault.key)
    partly = len(names) < count and not fault.key.startswith("search.")
    some = f" (point {names[0]}" + (f" and {len(names) - 1} more)" if len(names) > 1 else ")") if partly else ""
    return replace(fault, message=fault.message + some, origin=origin)
