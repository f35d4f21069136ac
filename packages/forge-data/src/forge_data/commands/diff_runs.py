"""What `data diff` says of two runs: the first sample in which what they read, or would read, differs.

A run is its directory, one of its checkpoints, or a recipe that was not run. Rows are compared as a model sees them. Those
that are the same row of the same corpus by arithmetic are not read; streams are, from their beginning.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.errors import DataError
from forge_core.registry import Registry
from forge_data.commands import recipe_data
from forge_data.loading.buffers import Buffers
from forge_data.loading.reader import Reading
from forge_data.loading.rows import Rows
from forge_data.order.cursor import differences_of, refuse_other, sample_of

_FIELDS = ("tokens", "labels", "positions", "documents")


@dataclass(frozen=True)
class Run:
    """One side. `steps` were consumed where `reached`, else they would be."""

    name: str
    reading: Reading
    steps: int
    reached: bool


def is_run(path: str) -> bool:
    """Whether a path, or the name of a preset, means a run and no corpus."""
    folder = Path(path)
    if folder.is_dir():
        return (folder / "config.toml").is_file() or (folder / "checkpoints").is_dir() or _is_checkpoint(folder)
    return (folder.is_file() and folder.suffix == ".toml") or path in Registry().names("forge.presets")


def diff(one: str, other: str, steps: int | None, report: Callable[[str], None]) -> dict[str, Any]:
    """The first difference of what two runs read; JSON as it stands.

    Args:
        one, other: directory of a run, a checkpoint, a recipe, or the name of a preset.
        steps: to compare, whatever the runs have done; by default those that both have.
        report: called with progress messages.

    Raises:
        ForgeError: one of them is no run, its data cannot be read, or changed since its checkpoint.
    """
    sides = [_opened(path, report) for path in (one, other)]
    readings = [side.reading for side in sides]
    ends = [None if (end := reading.end()) is None else reading.timeline.steps_in(end) for reading in readings]
    wanted = steps or min(side.steps for side in sides)
    compared = min([wanted, *(end for end in ends if end is not None)])
    first = _first(readings[0], readings[1], compared)
    settings = differences_of(*(reading.identity_at(compared) for reading in readings))
    return {
        "equal": first is None,
        "steps": compared,
        "samples": [reading.timeline.first_of(compared) for reading in readings],
        "runs": [
            {"steps": side.steps, "consumed": side.reached, "tokens": _tokens(side), "tokenizer": _tokenizer(side.reading)}
            for side in sides
        ],
        "settings": [f"{name} is {here}, there {there}" for name, (here, there) in settings.items()],
        "first": first,
    }


def _opened(path: str, report: Callable[[str], None]) -> Run:
    folder = Path(path)
    cursor: Any = None
    if folder.is_dir() and ((folder / "checkpoints").is_dir() or _is_checkpoint(folder)):
        facts = Registry().load("forge.converters", "forge")().build().read(folder).facts
        if not facts.recipe.get("data") or not facts.cursor:
            raise DataError(f"{path} carries weights only: nothing says what data they were trained on")
        recipe, cursor = recipe_data.of(facts.recipe, f"checkpoint {path}"), facts.cursor
        workspace = facts.run / "data" if facts.run else recipe.workspace
    else:
        inside = folder / "config.toml"
        recipe = recipe_data.read(inside if folder.is_dir() else path)
        workspace = folder / "data" if folder.is_dir() else recipe.workspace
    from forge_data.loading.loader import MixedStream, open_stream

    shape = {"seed": recipe.job.seed, "global_batch": recipe.train.global_batch, "micro_batch": 1}
    stream = open_stream(recipe.data, workspace=workspace, report=report, **shape)
    if not isinstance(stream, MixedStream):
        raise DataError(f"{path}: the only source is a loader of its own; nobody but it knows what it reads")
    if cursor is None:
        return Run(path, stream.reading, recipe.train.max_steps, reached=False)
    done = stream.reading.timeline.steps_in(sample_of(cursor))
    refuse_other(cursor, stream.reading.identity_at(done))
    return Run(path, stream.reading, done, reached=True)


def _first(one: Reading, other: Reading, steps: int) -> dict[str, Any] | None:
    """The first difference in the first `steps` steps."""
    sides = (one, other)
    pools = [Buffers(), Buffers()]
    for reading in sides:
        reading.seek({})
    for step in range(steps):
        spans = [reading.timeline.span_at(step) for reading in sides]
        if spans[0].rows != spans[1].rows or spans[0].length != spans[1].length:
            return {"step": step, "shapes": [[span.rows, span.length] for span in spans]}
        count, length = spans[0].rows, spans[0].length
        if not (one.streams or other.streams) and _same(one, other, step, count):
            continue
        made = [Rows.take(pool, count, length, reading.masked) for pool, reading in zip(pools, sides, strict=True)]
        for reading, rows in zip(sides, made, strict=True):
            reading.fill(rows, step, 0, count)
        if (found := _different(*made)) is not None:
            what, row, column = found
            token = column + (what == "labels")  # a label is the token after
            places = [reading.place_of(step, row, token) for reading in sides]
            return {
                "step": step,
                "row": row,
                "sample": one.timeline.first_row_of(step) + row,
                "column": column,
                "field": what,
                "values": [int(getattr(rows, what)[row, column]) for rows in made],
                "sources": [label for label, _ in places],
                "places": [place for _, place in places],
            }
    return None


def _same(one: Reading, other: Reading, step: int, count: int) -> bool:
    """Whether a step has the same rows of the same corpora, cut alike, so that they need not be read."""
    if one.data.packing != other.data.packing or one.masked != other.masked:
        return False
    (own, own_rows), (their, their_rows) = (reading.rows_of(step, 0, count) for reading in (one, other))
    if not np.array_equal(own_rows, their_rows):
        return False
    pairs = set(zip(own.tolist(), their.tolist(), strict=True))
    return all(one.sources[mine].fingerprint == other.sources[theirs].fingerprint for mine, theirs in pairs)


def _different(one: Rows, other: Rows) -> tuple[str, int, int] | None:
    """(field, row, column) of the first difference of two steps, by rows; masks count where both have them."""
    found: list[tuple[int, int, str]] = []
    for name in _FIELDS:
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine is None or theirs is None:
            continue
        places = np.flatnonzero(mine.reshape(-1) != theirs.reshape(-1))
        if len(places):
            row, column = divmod(int(places[0]), mine.shape[1])
            found.append((row, column, name))
    if not found:
        return None
    row, column, name = min(found, key=lambda entry: (entry[0], _FIELDS.index(entry[2])))
    return name, row, column


def _tokens(side: Run) -> dict[str, int]:
    """Tokens of each source in the steps of a side."""
    timeline = side.reading.timeline
    end = side.reading.end()
    samples = timeline.first_of(side.steps) if end is None else min(end, timeline.first_of(side.steps))
    return {label: drawn * side.reading.unit for label, drawn in zip(side.reading.labels, timeline.draws(samples), strict=True)}


def _tokenizer(reading: Reading) -> str | None:
    return next((found for source in reading.sources if (found := getattr(source, "tokenizer", None)) is not None), None)


def _is_checkpoint(folder: Path) -> bool:
    """Whether a manifest is that of a checkpoint: a store has one, too."""
    try:
        with (folder / "manifest.json").open("rb") as file:
            return file.read(10).startswith(b'{"seal": "')
    except OSError:
        return False


def as_text(found: dict[str, Any], names: tuple[str, str]) -> str:
    """The same for a terminal."""
    lines = []
    for name, run in zip(names, found["runs"], strict=True):
        read = ", ".join(f"{label} {tokens:,}" for label, tokens in run["tokens"].items())
        lines.append(f"{name}: {'read' if run['consumed'] else 'would read'} {run['steps']:,} steps; tokens: {read}")
    lines += [f"setting: {line}" for line in found["settings"]]
    first = found["first"]
    if first is None:
        return "\n".join([*lines, f"equal: every row of the first {found['steps']:,} steps"])
    if "shapes" in first:
        (rows, length), (other_rows, other_length) = first["shapes"]
        return "\n".join([*lines, f"step {first['step']} has {rows} rows of {length} here, {other_rows} of {other_length} there"])
    lines.append(
        f"first difference: step {first['step']}, row {first['row']} (sample {first['sample']}), column {first['column']}"
    )
    for name, source, place, value in zip(names, first["sources"], first["places"], first["values"], strict=True):
        lines.append(f"  {name}: {first['field']} {value}, source {source}, {place}")
    return "\n".join(lines)
