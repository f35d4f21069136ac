"""Implements `data diff`: the first difference between two corpora, or between the samples of two runs.

A run is its directory, one of its checkpoints, or a recipe that has not been run. Rows are compared as model inputs. Equal rows
of equal corpora are recognized from the sample order without reading them; streams are read from their beginning.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.config import toml
from forge_core.errors import DataError
from forge_core.protocols.data import Source, SourceWithMask
from forge_core.registry import Registry
from forge_data.commands.mix import read_recipe, recipe_of
from forge_data.loading.rows import Buffers, RowReader, TokenRows
from forge_data.order.cursor import differences_of, refuse_other, sample_of
from forge_data.sources.scan import mask_of, place_of

_BLOCK = 1 << 22
_FIELDS = ("tokens", "labels", "positions", "documents")


def diff_corpora(one: Source, other: Source) -> dict[str, Any]:
    """Returns the first token, document border and value of the loss mask at which two corpora differ, as JSON.

    Tokens are compared by value, so uint16 tokens can equal int32 tokens.
    """
    result: dict[str, Any] = {
        "tokens": [one.tokens, other.tokens],
        "dtype": [one.read(0, 0).dtype.name, other.read(0, 0).dtype.name],
        "tokenizer": [one.tokenizer, other.tokenizer],
        "fingerprint": [one.fingerprint, other.fingerprint],
        "first_token": None,
        "first_border": None,
        "first_mask": None,
    }
    shared = min(one.tokens, other.tokens)
    for start in range(0, shared, _BLOCK):
        stop = min(start + _BLOCK, shared)
        different = np.flatnonzero(one.read(start, stop) != other.read(start, stop))
        if len(different):
            token = start + int(different[0])
            result["first_token"] = _different_token(one, other, token)
            break
    for start in range(0, shared, _BLOCK):
        stop = min(start + _BLOCK, shared)
        borders = np.setxor1d(one.ends(start, stop), other.ends(start, stop))
        if len(borders) and not (int(borders[0]) == shared and one.tokens != other.tokens):
            end = int(borders[0])
            here = len(one.ends(end - 1, end)) > 0
            result["first_border"] = {"token": end, "only_in": [one.name, other.name][0 if here else 1]}
            break
    masked = isinstance(one, SourceWithMask) or isinstance(other, SourceWithMask)
    for start in range(0, shared if masked else 0, _BLOCK):
        stop = min(start + _BLOCK, shared)
        differ = np.flatnonzero(_trained(one, start, stop) != _trained(other, start, stop))
        if len(differ):
            token = start + int(differ[0])
            result["first_mask"] = {"token": token, "trained_in": (one if _trained(one, token, token + 1)[0] else other).name}
            break
    firsts = (result["first_token"], result["first_border"], result["first_mask"])
    result["equal"] = one.tokens == other.tokens and firsts == (None, None, None)
    return result


def _trained(source: Source, start: int, stop: int) -> np.ndarray:
    """Returns whether each token is trained; without a loss mask, all are but the first of a document."""
    mask = mask_of(source, start, stop)
    if mask is None:
        mask = np.ones(stop - start, dtype=bool)
        begins = source.ends(max(start - 1, 0), stop).astype(np.int64) - start
        mask[begins[(begins >= 0) & (begins < stop - start)]] = False
        mask[: int(start == 0)] = False
    return mask


def _different_token(one: Source, other: Source, token: int) -> dict[str, Any]:
    document = sum(len(one.ends(start, min(start + _BLOCK, token))) for start in range(0, token, _BLOCK))
    return {
        "token": token,
        "document": document,
        "ids": [int(source.read(token, token + 1)[0]) for source in (one, other)],
        "places": [place_of(source, token) for source in (one, other)],
    }


def corpora_text(found: dict[str, Any], names: tuple[str, str]) -> str:
    """Formats the result for a terminal."""
    if found["equal"]:
        return f"equal: {found['tokens'][0]:,} tokens and all document borders"
    lines = [
        f"{key}: {found[key][0]} in {names[0]}, {found[key][1]} in {names[1]}"
        for key in ("tokens", "tokenizer")
        if found[key][0] != found[key][1]
    ]
    if first := found["first_token"]:
        lines.append(f"first different token: {first['token']}, in document {first['document']}")
        lines += [f"  {place}: id {id_}" for place, id_ in zip(first["places"], first["ids"], strict=True)]
    elif found["tokens"][0] != found["tokens"][1]:
        lines.append("the shorter corpus is the beginning of the longer one")
    if border := found["first_border"]:
        lines.append(f"first different border: a document ends at token {border['token']} only in {border['only_in']}")
    if mask := found["first_mask"]:
        lines.append(f"first different loss mask: token {mask['token']} is trained only in {mask['trained_in']}")
    return "\n".join(lines)


def is_run(path: str) -> bool:
    """Whether a path, or the name of a preset, refers to a run and not to a corpus."""
    folder = Path(path)
    if folder.is_dir():
        return (folder / "config.toml").is_file() or (folder / "checkpoints").is_dir() or _is_checkpoint(folder)
    return (folder.is_file() and folder.suffix == ".toml") or path in Registry().names("forge.presets")


@dataclass(frozen=True)
class ComparedRun:
    """One side of a comparison. If `reached`, the run has done `steps` steps; else it would do them."""

    name: str
    reader: RowReader
    steps: int
    reached: bool


def compare_runs(one: str, other: str, steps: int | None, report: Callable[[str], None]) -> dict[str, Any]:
    """Returns the first difference between the samples of two runs, as JSON.

    Args:
        one, other: directory of a run, a checkpoint, a recipe, or the name of a preset.
        steps: number of steps to compare, possibly more than the runs have done; by default those that both have done.
        report: called with progress messages.

    Raises:
        ForgeError: an argument is not a run, or its data cannot be read or have changed since its checkpoint.
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
            raise DataError(f"{path} has only weights and does not record its training data; use a checkpoint that a run saved")
        recipe, cursor = recipe_of(facts.recipe, f"checkpoint {path}"), facts.cursor
        workspace = facts.run / "data" if facts.run else recipe.workspace
    else:
        inside = folder / "config.toml"
        recipe = read_recipe(toml.read_toml(inside) if folder.is_dir() else path)
        workspace = folder / "data" if folder.is_dir() else recipe.workspace
    from forge_data.loading.stream import TrainingStream, open_stream

    shape = {"seed": recipe.job.seed, "global_batch": recipe.train.global_batch, "micro_batch": 1}
    stream = open_stream(recipe.data, workspace=workspace, report=report, pairs=None, **shape)
    if not isinstance(stream, TrainingStream):
        raise DataError(f"{path}: its only source is a foreign loader, whose samples cannot be known without reading them")
    if cursor is None:
        return ComparedRun(path, stream.reader, recipe.train.max_steps, reached=False)
    done = stream.reader.order.timeline.steps_in(sample_of(cursor))
    refuse_other(cursor, stream.reader.order.identity_at(done))
    return ComparedRun(path, stream.reader, done, reached=True)


def _first_difference(one: RowReader, other: RowReader, steps: int) -> dict[str, Any] | None:
    """Returns the first difference in the first `steps` steps, or None."""
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
        both = [TokenRows.take(pool, count, length, reader.spec.marks) for pool, reader in zip(pools, sides, strict=True)]
        for reader, rows in zip(sides, both, strict=True):
            reader.fill(rows, step, 0, count)
        if (difference := _difference_of_rows(*both)) is not None:
            what, row, column = difference
            token = column + (what == "labels")  # a label is the next token
            places = [reader.place_of(step, row, token) for reader in sides]
            return {
                "step": step,
                "row": row,
                "sample": one.order.timeline.first_row_of(step) + row,
                "column": column,
                "field": what,
                "values": [int(getattr(rows, what)[row, column]) for rows in both],
                "sources": [label for label, _ in places],
                "places": [place for _, place in places],
            }
    return None


def _same_rows(one: RowReader, other: RowReader, step: int, count: int) -> bool:
    """Whether both runs have the same rows of equal corpora, packed in the same way, in a step."""
    if one.spec.data.packing != other.spec.data.packing or one.spec.masked != other.spec.masked:
        return False
    (sources, rows), (other_sources, other_rows) = (reader.order.rows_of(step, 0, count) for reader in (one, other))
    if not np.array_equal(rows, other_rows):
        return False
    pairs = set(zip(sources.tolist(), other_sources.tolist(), strict=True))
    return all(one.order.sources[left].fingerprint == other.order.sources[right].fingerprint for left, right in pairs)


def _difference_of_rows(one: TokenRows, other: TokenRows) -> tuple[str, int, int] | None:
    """Returns (field, row, column) of the first difference between two steps, or None; compares fields that both have."""
    differences: list[tuple[int, int, str]] = []
    for name in _FIELDS:
        left, right = getattr(one, name), getattr(other, name)
        if left is None or right is None:
            continue
        places = np.flatnonzero(left.reshape(-1) != right.reshape(-1))
        if len(places):
            row, column = divmod(int(places[0]), left.shape[1])
            differences.append((row, column, name))
    if not differences:
        return None
    row, column, name = min(differences, key=lambda entry: (entry[0], _FIELDS.index(entry[2])))
    return name, row, column


def _tokens_by_source(side: ComparedRun) -> dict[str, int]:
    """Returns the tokens of each source in the steps of a run."""
    order = side.reader.order
    timeline, end = order.timeline, order.end()
    samples = timeline.first_of(side.steps) if end is None else min(end, timeline.first_of(side.steps))
    return {label: drawn * order.unit for label, drawn in zip(order.labels, timeline.draws(samples), strict=True)}


def _tokenizer_of(reader: RowReader) -> str | None:
    tokenizers = (getattr(source, "tokenizer", None) for source in reader.order.sources)
    return next((fingerprint for fingerprint in tokenizers if fingerprint is not None), None)


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder has the manifest of a checkpoint; a token store has a file of the same name."""
    try:
        with (folder / "manifest.json").open("rb") as file:
            return file.read(10).startswith(b'{"seal": "')
    except OSError:
        return False


def runs_text(found: dict[str, Any], names: tuple[str, str]) -> str:
    """Formats the result for a terminal."""
    lines = []
    for name, run in zip(names, found["runs"], strict=True):
        read = ", ".join(f"{label} {tokens:,}" for label, tokens in run["tokens"].items())
        lines.append(f"{name}: {'read' if run['consumed'] else 'would read'} {run['steps']:,} steps; tokens: {read}")
    lines += [f"setting: {line}" for line in found["settings"]]
    first = found["first"]
    if first is None:
        return "\n".join([*lines, f"equal: all rows of the first {found['steps']:,} steps"])
    if "shapes" in first:
        (rows, length), (other_rows, other_length) = first["shapes"]
        return "\n".join([*lines, f"step {first['step']} has {rows} rows of {length} here, {other_rows} of {other_length} there"])
    lines.append(
        f"first difference: step {first['step']}, row {first['row']} (sample {first['sample']}), column {first['column']}"
    )
    for name, source, place, value in zip(names, first["sources"], first["places"], first["values"], strict=True):
        lines.append(f"  {name}: {first['field']} {value}, source {source}, {place}")
    return "\n".join(lines)
