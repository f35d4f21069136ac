"""Implements `data mix --plan`: tokens and epochs of every source in every phase, before the run.

Counts come from the actual draws, not from the weights: they are what the run will read. `read_recipe` reads the parts of a
recipe on which its data depend, without the trainer's schema.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt

from forge_core.config.layers import load_layers
from forge_core.config.tree import Table, build
from forge_core.config.validation import resolve
from forge_core.errors import ConfigError, DataError
from forge_core.redaction import refuse_redacted
from forge_core.registry import Registry
from forge_data.section import Data

if TYPE_CHECKING:
    from forge_data.loading.sample_order import SampleOrder
    from forge_data.loading.stream import TrainingStream


@dataclass(frozen=True, kw_only=True)
class JobKeys:
    """Keys of `[job]`."""

    name: str = "run"
    dir: str | None = None
    seed: Annotated[int, Ge(0)] = 0


@dataclass(frozen=True, kw_only=True)
class TrainKeys:
    """Keys of `[train]`."""

    max_steps: Annotated[int, Gt(0)] = 1000
    global_batch: Annotated[int, Gt(0)] = 32


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The keys of a recipe that its data depend on."""

    job: JobKeys = field(default_factory=JobKeys)
    data: Data = field(default_factory=Data)
    train: TrainKeys = field(default_factory=TrainKeys)

    @property
    def workspace(self) -> Path:
        """Directory of the prepared data of the recipe's run."""
        return (Path(self.job.dir) if self.job.dir else Path("runs") / self.job.name) / "data"


def read_recipe(recipe: str | Path | Table, overrides: Sequence[str] = ()) -> DataRecipe:
    """Reads a recipe from a TOML file, a preset, or a parsed tree; a tree does not allow Python files to run.

    Raises:
        ConfigError: the sections `job`, `data` or `train` have faults; the error lists all of them.
    """
    registry = Registry()
    layered = load_layers(recipe, overrides, DataRecipe, registry)
    if layered.faults:
        raise ConfigError(layered.faults)
    return _resolved(layered.tree, registry)


def recipe_of(tables: Mapping[str, Any], origin: str) -> DataRecipe:
    """Returns the recipe in plain tables, as stored in a checkpoint; `origin` is its name in messages.

    Raises:
        ConfigError: a component is not installed, or its keys have changed since.
        CheckpointError: the data section contained secrets, which checkpoints do not store.
    """
    refuse_redacted({"data": tables.get("data")}, origin)
    tree = build(dict(tables), (), lambda _: origin, Path.cwd())
    assert isinstance(tree, Table)
    return _resolved(tree, Registry())


def _resolved(tree: Table, registry: Registry) -> DataRecipe:
    tables = {name: tree.items[name] for name in ("job", "data", "train") if name in tree.items}
    for name, section in (("job", JobKeys), ("train", TrainKeys)):
        if isinstance(table := tables.get(name), Table):
            known = section.__dataclass_fields__
            tables[name] = Table({key: item for key, item in table.items.items() if key in known}, table.origin)
    return resolve(DataRecipe, Table(tables, tree.origin), registry).value


MANY_EPOCHS = 4
"""Number of epochs beyond which repeated data have little value (Muennighoff et al., 2023)."""
_LOOKED_AT = 256
"""Number of evenly spaced steps of a phase at which draws are compared with the weights."""


def mix(
    recipe: str, overrides: Sequence[str], steps: int | None, workspace: Path | None, report: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the plan of a recipe's data, as JSON.

    Args:
        recipe: a TOML file, or the name of a preset.
        overrides: `--section.key=value`.
        steps: steps of the run; by default `train.max_steps`.
        workspace: directory of tokenized text and pack plans; by default that of the run.
        report: called with progress messages.

    Raises:
        ForgeError: see `open_stream`.
    """
    parsed = read_recipe(recipe, overrides)
    from forge_data.loading.stream import TrainingStream, open_stream
    from forge_data.order.phases import faults_of, refuse_faults

    steps = steps or parsed.train.max_steps
    refuse_faults(faults_of(parsed.data, parsed.train.global_batch, steps))
    stream = open_stream(
        parsed.data,
        workspace=workspace or parsed.workspace,
        seed=parsed.job.seed,
        global_batch=parsed.train.global_batch,
        micro_batch=1,
        report=report,
        pairs=None,
    )
    if not isinstance(stream, TrainingStream):
        raise DataError("the only source is a foreign loader, and its samples are unknown before it reads them")
    return plan_of(stream, steps)


def plan_of(stream: "TrainingStream", steps: int) -> dict[str, Any]:
    """Returns the plan of an opened stream over `steps` steps."""
    order = stream.order
    timeline, rows = order.timeline, order.samples.rows
    ends_at = steps if stream.steps is None else min(steps, stream.steps)
    borders = [0, *(phase.start for phase in order.data.phases if phase.start < ends_at), ends_at]
    phases = []
    for start, stop in pairwise(borders):
        before, after = (timeline.draws(timeline.first_of(step)) for step in (start, stop))
        planned = [b - a for a, b in zip(*(timeline.planned(timeline.first_of(step)) for step in (start, stop)), strict=True)]
        drawn = [b - a for a, b in zip(before, after, strict=True)]
        total = sum(drawn)
        sources = {
            label: {
                "samples": drawn[index],
                "tokens": drawn[index] * order.unit,
                "share": drawn[index] / total if total else 0.0,
                "planned_tokens": float(planned[index] * order.unit),
                "epochs": None if (size := rows[index]) is None else drawn[index] / size,
                "epochs_so_far": None if size is None else after[index] / size,
            }
            for index, label in enumerate(order.labels)
        }
        span = timeline.span_at(start)
        phases.append(
            {
                "start": start,
                "stop": stop,
                "sequence_length": span.length,
                "global_batch": span.rows,
                "lr_scale": stream.lr_scale(stop - 1),
                "tokens": total * order.unit,
                "sources": sources,
                "largest_deviation": _largest_deviation(order, start, stop),
            }
        )
    warnings = [
        f"source {label!r} is read {entry['epochs_so_far']:.1f} times; epochs beyond {MANY_EPOCHS} have little value"
        for label, entry in phases[-1]["sources"].items()
        if (entry["epochs_so_far"] or 0) > MANY_EPOCHS
    ]
    if ends_at < steps:
        warnings.append(f"the data end after step {ends_at}, before the {steps} steps of the run")
    return {"steps": steps, "tokens": sum(phase["tokens"] for phase in phases), "phases": phases, "warnings": warnings}


def _largest_deviation(order: "SampleOrder", start: int, stop: int) -> dict[str, Any]:
    """Returns the largest deviation of a source from its share since step 0, in samples; negative if it was drawn too rarely.

    Considers the ends of `_LOOKED_AT` steps in [start, stop).
    """
    timeline, count = order.timeline, min(stop - start, _LOOKED_AT)
    deviations: list[tuple[Fraction, str, int]] = []
    for step in (start + (stop - start) * number // count for number in range(1, count + 1)):
        first = timeline.first_of(step)
        pairs = zip(order.labels, timeline.draws(first), timeline.planned(first), strict=True)
        deviations += [(drawn - planned, label, step) for label, drawn, planned in pairs]
    samples, label, step = max(deviations, key=lambda entry: abs(entry[0]))
    return {"samples": float(samples), "source": label, "step": step}


def as_text(plan: dict[str, Any]) -> str:
    """Formats the plan for a terminal."""
    lines = [f"{plan['tokens']:,} tokens in {plan['steps']:,} steps"]
    for phase in plan["phases"]:
        shape = f"{phase['global_batch']:,} rows of {phase['sequence_length']:,}, lr x {phase['lr_scale']:g}"
        lines.append(f"steps {phase['start']:,} to {phase['stop']:,}: {phase['tokens']:,} tokens, {shape}")
        for label, entry in phase["sources"].items():
            epochs = (
                "a stream" if entry["epochs"] is None else f"{entry['epochs']:.3f} epochs, {entry['epochs_so_far']:.3f} so far"
            )
            lines.append(f"  {label:20} {_percent(entry['share']):>7} {entry['tokens']:>20,} tokens   {epochs}")
        farthest = phase["largest_deviation"]
        where = f"{farthest['source']}, before step {farthest['step']:,}"
        lines.append(f"  largest deviation from the weights: {farthest['samples']:+.2f} samples ({where})")
    return "\n".join([*lines, *(f"warning: {warning}" for warning in plan["warnings"])])


def _percent(share: float) -> str:
    return f"{share:.2%}" if share >= 0.001 or not share else f"{100 * share:.2g}%"
