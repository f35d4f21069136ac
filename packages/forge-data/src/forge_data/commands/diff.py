"""What `data diff` says: the first difference between two corpora, or between the samples that two runs read.

A run is its directory, one of its checkpoints, or a recipe that has not been run. Rows are compared as a model sees them.
Rows that are known by arithmetic to be the same row of the same corpus are not read; streams are read from their beginning.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.config import toml
from forge_core.errors import DataError
from forge_core.protocols.data import Source
from forge_core.registry import Registry
from forge_data.commands.recipe import read_recipe, recipe_of
from forge_data.loading.rows import Buffers, RowReader, Rows
from forge_data.order.cursor import differences_of, refuse_other, sample_of
from forge_data.sources.scan import place_of

_BLOCK = 1 << 22
_FIELDS = ("tokens", "labels", "positions", "documents")


def diff_corpora(one: Source, other: Source) -> dict[str, Any]:
    """The first token and the first document border at which two corpora differ; JSON as it stands.

    Tokens are compared by value, so a corpus as uint16 equals itself as int32.
    """
    found: dict[str, Any] = {
        "tokens": [one.tokens, other.tokens],
        "dtype": [one.read(0, 0).dtype.name, other.read(0, 0).dtype.name],
        "tokenizer": [one.tokenizer, other.tokenizer],
        "fingerprint": [one.fingerprint, other.fingerprint],
        "first_token": None,
        "first_border": None,
    }
    shared = min(one.tokens, other.tokens)
    for start in range(0, shared, _BLOCK):
        stop = min(start + _BLOCK, shared)
        different = np.flatnonzero(one.read(start, stop) != other.read(start, stop))
        if len(different):
            token = start + int(different[0])
            found["first_token"] = _different_token(one, other, token)
            break
    for start in range(0, shared, _BLOCK):
        stop = min(start + _BLOCK, shared)
        borders = np.setxor1d(one.ends(start, stop), other.ends(start, stop))
        if len(borders) and not (int(borders[0]) == shared and one.tokens != other.tokens):
            end = int(borders[0])
            here = len(one.ends(end - 1, end)) > 0
            found["first_border"] = {"token": end, "only_in": [one.name, other.name][0 if here else 1]}
            break
    found["equal"] = one.tokens == other.tokens and found["first_token"] is None and found["first_border"] is None
    return found


def _different_token(one: Source, other: Source, token: int) -> dict[str, Any]:
    document = sum(len(one.ends(start, min(start + _BLOCK, token))) for start in range(0, token, _BLOCK))
    return {
        "token": token,
        "document": document,
        "ids": [int(source.read(token, token + 1)[0]) for source in (one, other)],
        "places": [place_of(source, token) for source in (one, other)],
    }


def corpora_text(found: dict[str, Any], names: tuple[str, str]) -> str:
    """The same for a terminal."""
    if found["equal"]:
        return f"equal: {found['tokens'][0]:,} tokens, every document border"
    lines = [
        f"{key}: {found[key][0]} in {names[0]}, {found[key][1]} in {names[1]}"
        for key in ("tokens", "tokenizer")
        if found[key][0] != found[key][1]
    ]
    if first := found["first_token"]:
        lines.append(f"first different token: {first['token']}, in document {first['document']}")
        lines += [f"  {place}: id {id_}" for place, id_ in zip(first["places"], first["ids"], strict=True)]
    elif found["tokens"][0] != found["tokens"][1]:
        lines.append("the shorter one is the beginning of the longer one")
    if border := found["first_border"]:
        lines.append(f"first different border: a document ends at token {border['token']} in {border['only_in']} only")
    return "\n".join(lines)


def is_run(path: str) -> bool:
    """Whether a path, or the name of a preset, means a run and no corpus."""
    folder = Path(path)
    if folder.is_dir():
        return (folder / "config.toml").is_file() or (folder / "checkpoints").is_dir() or _is_checkpoint(folder)
    return (folder.is_file() and folder.suffix == ".toml") or path in Registry().names("forge.presets")


@dataclass(frozen=True)
class ComparedRun:
    """One side. `steps` were consumed where `reached`, else they would be."""

    name: str
    reader: RowReader
    steps: int
    reached: bool


def compare_runs(one: str, other: str, steps: int | None, report: Callable[[str], None]) -> dict[str, Any]:
    """The first difference of what two runs read; JSON as it stands.

    Args:
        one, other: directory of a run, a checkpoint, a recipe, or the name of a preset.
        steps: to compare, also more than the runs have done; by default those that both have done.
        report: called with progress messages.

    Raises:
        ForgeError: one of them is not a run, its data cannot be read, or changed since its checkpoint.
    """
    sides = [_open_run(path, report) for path in (one, other)]
    readers = [side.reader for side in sides]
    ends = [None if (end := reader.order.end()) is None else reader.order.timeline.steps_in(end) for reader in readers]
    wanted = steps or min(side.steps for side in sides)
    compared = min([wanted, *(end for end in ends if end is not None)])
    first = _first_difference(readers[0], readers[1], compared)
    settings = differences_of(*(reader.order.identity_at(compared) for reader in readers))
    return {
        "equal": first is None,
        "steps": compared,
        "samples": [reader.order.timeline.first_of(compared) for reader in readers],
        "runs": [
            {
                "steps": side.steps,
                "consumed": side.reached,
                "tokens": _tokens_by_source(side),
                "tokenizer": _tokenizer_of(side.reader),
            }
            for side in sides
        ],
        "settings": [f"{name} is {here}, there {there}" for name, (here, there) in settings.items()],
        "first": first,
    }


def _open_run(path: str, report: Callable[[str], None]) -> ComparedRun:
    folder = Path(path)
    cursor: Any = None
    if folder.is_dir() and ((folder / "checkpoints").is_dir() or _is_checkpoint(folder)):
        facts = Registry().load("forge.converters", "forge")().build().read(folder).facts
        if not facts.recipe.get("data") or not facts.cursor:
            raise DataError(f"{path} has weights only and does not record its training data; give a checkpoint that a run saved")
        recipe, cursor = recipe_of(facts.recipe, f"checkpoint {path}"), facts.cursor
        workspace = facts.run / "data" if facts.run else recipe.workspace
    else:
        inside = folder / "config.toml"
        recipe = read_recipe(toml.read_toml(inside) if folder.is_dir() else path)
        workspace = folder / "data" if folder.is_dir() else recipe.workspace
    from forge_data.loading.stream import TrainingStream, open_stream

    shape = {"seed": recipe.job.seed, "global_batch": recipe.train.global_batch, "micro_batch": 1}
    stream = open_stream(recipe.data, workspace=workspace, report=report, **shape)
    if not isinstance(stream, TrainingStream):
        raise DataError(f"{path}: the only source is a foreign loader, and its samples are unknown before it reads them")
    if cursor is None:
        return ComparedRun(path, stream.reader, recipe.train.max_steps, reached=False)
    done = stream.reader.order.timeline.steps_in(sample_of(cursor))
    refuse_other(cursor, stream.reader.order.identity_at(done))
    return ComparedRun(path, stream.reader, done, reached=True)


def _first_difference(one: RowReader, other: RowReader, steps: int) -> dict[str, Any] | None:
    """The first difference in the first `steps` steps."""
    sides = (one, other)
    pools = [Buffers(), Buffers()]
    for reader in sides:
        reader.seek(0, {})
    for step in range(steps):
        spans = [reader.order.timeline.span_at(step) for reader in sides]
        if spans[0].rows != spans[1].rows or spans[0].length != spans[1].length:
            return {"step": step, "shapes": [[span.rows, span.length] for span in spans]}
        count, length = spans[0].rows, spans[0].length
        if not (one.streams or other.streams) and _same_rows(one, other, step, count):
            continue
        made = [Rows.take(pool, count, length, reader.spec.marks) for pool, reader in zip(pools, sides, strict=True)]
        for reader, rows in zip(sides, made, strict=True):
            reader.fill(rows, step, 0, count)
        if (found := _difference_of_rows(*made)) is not None:
            what, row, column = found
            token = column + (what == "labels")  # a label is the token after
            places = [reader.place_of(step, row, token) for reader in sides]
            return {
                "step": step,
                "row": row,
                "sample": one.order.timeline.first_row_of(step) + row,
                "column": column,
                "field": what,
                "values": [int(getattr(rows, what)[row, column]) for rows in made],
                "sources": [label for label, _ in places],
                "places": [place for _, place in places],
            }
    return None


def _same_rows(one: RowReader, other: RowReader, step: int, count: int) -> bool:
    """Whether a step has the same rows of the same corpora, cut alike, so that they need not be read."""
    if one.spec.data.packing != other.spec.data.packing or one.spec.masked != other.spec.masked:
        return False
    (own, own_rows), (their, their_rows) = (reader.order.rows_of(step, 0, count) for reader in (one, other))
    if not np.array_equal(own_rows, their_rows):
        return False
    pairs = set(zip(own.tolist(), their.tolist(), strict=True))
    return all(one.order.sources[mine].fingerprint == other.order.sources[theirs].fingerprint for mine, theirs in pairs)


def _difference_of_rows(one: Rows, other: Rows) -> tuple[str, int, int] | None:
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


def _tokens_by_source(side: ComparedRun) -> dict[str, int]:
    """Tokens of each source in the steps of a side."""
    order = side.reader.order
    timeline, end = order.timeline, order.end()
    samples = timeline.first_of(side.steps) if end is None else min(end, timeline.first_of(side.steps))
    return {label: drawn * order.unit for label, drawn in zip(order.labels, timeline.draws(samples), strict=True)}


def _tokenizer_of(reader: RowReader) -> str | None:
    return next((found for source in reader.order.sources if (found := getattr(source, "tokenizer", None)) is not None), None)


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder's manifest is that of a checkpoint; token stores have a file of the same name."""
    try:
        with (folder / "manifest.json").open("rb") as file:
            return file.read(10).startswith(b'{"seal": "')
    except OSError:
        return False


def runs_text(found: dict[str, Any], names: tuple[str, str]) -> str:
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
