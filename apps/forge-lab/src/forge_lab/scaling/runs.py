"""Collects the runs for a fit: their parameters, tokens and losses, and why others are left out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forge_core.config.toml import read_toml as read_recipe
from forge_core.errors import DataError, did_you_mean
from forge_core.registry import Registry
from forge_lab.sweep.files import SWEEP_FILE, finite
from forge_lab.sweep.grid import OURS
from forge_train.directory import RECIPE
from forge_train.plan import run_size
from forge_train.recipe.load import Recipe, load_recipe
from forge_train.trackers import METRICS, read_metrics

Counted = Literal["all", "blocks", "active"]
"""Parameters counted as N: all (Hoffmann et al.); those of the blocks, without token table and head (Kaplan et al., 2020); or
those that one token uses, which are fewer with experts."""
DEFAULT = "evaluation/held_out/loss"


@dataclass(frozen=True)
class FittedRun:
    """A run included in the fit. `parameters` is N, `tokens` is D, `loss` is in nats per token."""

    name: str
    parameters: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class GatheredRuns:
    """Runs of a fit, the names of the runs left out with the reason, and the metric used as loss."""

    runs: tuple[FittedRun, ...]
    left_out: tuple[tuple[str, str], ...]
    metric: str


def gather(
    places: Sequence[Path],
    metric: str | None = None,
    counted: Counted = "all",
    unfinished: bool = False,
    registry: Registry | None = None,
) -> GatheredRuns:
    """Reads directories of runs and of sweeps.

    An unusable run of a sweep is left out; an unusable run named in `places` is an error. Of runs with the same parameters,
    tokens and seed, only the best is included, because the law describes tuned runs.

    Args:
        metric: logged name of the loss; by default that of the sweep, or of the set `held_out`.
        counted: parameters counted as N.
        unfinished: whether to include runs that did not reach the end of their schedule.

    Raises:
        DataError: a directory has neither a run nor a sweep, is named twice, or has an unusable run; or two runs have the same
            recipe and seed.
    """
    registry = registry or Registry()
    found: list[tuple[str, Path, bool]] = []
    metrics: list[str] = []
    for place in places:
        if (place / SWEEP_FILE).is_file():
            about = json.loads((place / SWEEP_FILE).read_text(encoding="utf-8"))
            metrics.append(about["metric"])
            found += [(name, place / "points" / name, True) for name in about["points"]]
        elif (place / RECIPE).is_file():
            found.append((place.resolve().name, place, False))
        else:
            raise DataError(f"{place} has neither {SWEEP_FILE} of a sweep nor {RECIPE} of a run; give such a directory")
    recipe = [path.resolve() for _, path, _ in found]
    if twice := [str(path) for index, path in enumerate(recipe) if path in recipe[:index]]:
        raise DataError(f"{twice[0]} is given twice; give each run once")
    metric = metric or next(iter(metrics), DEFAULT)
    kept: list[tuple[FittedRun, Recipe]] = []
    left_out: list[tuple[str, str]] = []
    for name, path, of_sweep in found:
        reason, pair = _run(name, path, metric, counted, unfinished, registry)
        if pair is not None:
            kept.append(pair)
        elif of_sweep:
            left_out.append((name, reason))
        else:
            raise DataError(f"{path}: {reason}")
    _refuse_same(kept)
    return _tuned(kept, left_out, metric)


def _run(
    name: str, path: Path, metric: str, counted: Counted, unfinished: bool, registry: Registry
) -> tuple[str, tuple[FittedRun, Recipe] | None]:
    """Returns ("", run) if the run is usable, else (reason, None)."""
    if not (path / RECIPE).is_file():
        return "it has not begun", None
    recipe = load_recipe(read_recipe(path / RECIPE), (), None, registry)
    entries = read_metrics(path / METRICS)
    step = max((entry["step"] for entry in entries), default=0)
    steps = recipe.job.train.max_steps
    if step < steps and not unfinished:
        return f"it is at step {step} of {steps}: the end of a schedule lowers the loss (--unfinished includes it)", None
    at_end = [entry for entry in entries if entry["step"] == step or unfinished]
    values = [(entry[metric], entry["step"]) for entry in at_end if metric in entry]
    if not values:
        known = sorted({key for entry in entries for key in entry if key.endswith("loss")})
        return f"it has no {metric!r} at step {step}; {did_you_mean(metric, known) or 'choose another with --metric'}", None
    loss, at = values[-1]
    if finite(loss) is None or loss <= 0:
        return f"its {metric} is {loss}", None
    size = run_size(recipe.job)
    parameters = {"all": size.parameters, "blocks": size.blocks, "active": size.active}[counted]
    if parameters is None:
        return f"its model does not report these parameters (--parameters {counted})", None
    tokens = max((int(entry["tokens"]) for entry in entries if "tokens" in entry and entry["step"] <= at), default=0)
    if tokens <= 0 or parameters <= 0:
        return f"it has {parameters} parameters and {tokens} tokens", None
    return "", (FittedRun(name, parameters, tokens, float(loss)), recipe)


def _refuse_same(kept: Sequence[tuple[FittedRun, Recipe]]) -> None:
    seen: dict[str, str] = {}
    for run, resolved in kept:
        recipe = json.dumps(_without_place(resolved.as_json()), sort_keys=True, default=str)
        if recipe in seen:
            raise DataError(f"{seen[recipe]} and {run.name} have the same recipe and seed; remove one of them")
        seen[recipe] = run.name


def _without_place(tree: dict[str, Any]) -> dict[str, Any]:
    ours: dict[str, set[str]] = {}
    for key in OURS:
        section, _, name = key.partition(".")
        ours.setdefault(section, set()).add(name)
    return {
        section: {name: value for name, value in items.items() if name not in ours[section]} if section in ours else items
        for section, items in tree.items()
    }


def _tuned(kept: Sequence[tuple[FittedRun, Recipe]], left_out: list[tuple[str, str]], metric: str) -> GatheredRuns:
    best: dict[tuple[int, int, int], FittedRun] = {}
    for run, recipe in kept:
        key = run.parameters, run.tokens, recipe.job.job.seed
        other = best.get(key)
        if other is None or run.loss < other.loss:
            best[key] = run
    counts = set(best.values())
    worse = [(run.name, "another run of the same size has a lower loss") for run, _ in kept if run not in counts]
    return GatheredRuns(tuple(run for run, _ in kept if run in counts), (*left_out, *worse), metric)
