"""Implements `data show`: the first rows of a recipe, and what of them is trained.

The rows are those of the run, and what is trained follows from their labels, so this shows what training does and not what a
source intends.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_core.terminal import Console
from forge_data.commands.mix import read_recipe

if TYPE_CHECKING:
    from forge_data.loading.stream import TrainingStream

Role = Literal["trained", "context", "padding"]
STYLES = {"trained": "bold green", "context": "default", "padding": "bright_black", "border": "cyan"}
MARKS = "«", "»"
"""Around trained text, where there are no colors."""


class TokenSpan(NamedTuple):
    """Neighboring tokens of one role in one document.

    Attributes:
        role: what the tokens are.
        document: number of the document in the row.
        ids: token ids.
        text: their text, control tokens included; None if the tokenizer is unknown.
    """

    role: Role
    document: int
    ids: list[int]
    text: str | None


def show(
    recipe: str, overrides: Sequence[str], rows: int, workspace: Path | None, report: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the first rows of a recipe with the roles of their tokens, as JSON.

    Args:
        recipe: a TOML file, or the name of a preset.
        overrides: `--section.key=value`.
        rows: number of rows.
        workspace: directory of tokenized text and pack plans; by default that of the run.
        report: called with progress messages.

    Raises:
        ForgeError: see `open_stream`; or the only source is a foreign loader.
    """
    parsed = read_recipe(recipe, overrides)
    from forge_data.loading.stream import TrainingStream, open_stream

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
    spelled = spellings(stream.tokenizer) if stream.tokenizer else {}
    found: list[dict[str, Any]] = []
    for batches, _ in stream.from_cursor(stream.start()):
        found += [_row(batch, stream, spelled) for batch in batches[: rows - len(found)]]
        if len(found) == rows:
            break
    return {"recipe": recipe, "rows": found, **_totals(found)}


def roles_of(batch: Batch) -> list[np.ndarray]:
    """Returns (role of each token, number of its document) of a batch of one row.

    A token is trained if the label of the token before it is its id. The first token of a document never is.

    Returns:
        Two (T,) arrays: of strings, and of integers.
    """
    labels = batch.labels[0].numpy()
    roles = np.full(len(labels), "context", dtype="<U7")
    roles[1:][labels[:-1] != IGNORE] = "trained"
    documents = np.zeros(len(labels), dtype=np.int64) if batch.documents is None else batch.documents[0].numpy()
    roles[documents == PADDING] = "padding"
    if batch.token_mask is not None:
        roles[~batch.token_mask[0].numpy()] = "padding"
    return [roles, documents]


def _row(batch: Batch, stream: "TrainingStream", spelled: Mapping[int, str]) -> dict[str, Any]:
    tokenizer = stream.tokenizer
    number = 0 if batch.sources is None else int(batch.sources.rows[0])
    names = tuple(getattr(stream.sources[number], "labels", ()))
    given: list[str] = []
    if names:  # labels of whole documents, which are no tokens
        given = [names[label] for label in batch.labels[0].tolist() if label != IGNORE]
        batch = replace(batch, labels=batch.labels.new_full(tuple(batch.labels.shape), IGNORE))
    ids, labels = batch.tokens[0].tolist(), batch.labels[0]
    roles, documents = (array.tolist() for array in roles_of(batch))
    counts = {role: roles.count(role) for role in ("trained", "context", "padding")}
    # The label of the last token is the first token of the next row, which is not in this one.
    counts["trained_after"] = int(labels[-1] != IGNORE)
    pieces = []
    for (role, document), same in groupby(zip(roles, documents, ids, strict=True), key=lambda each: each[:2]):
        own = [each[2] for each in same]
        pieces.append(TokenSpan(role, document, own, None if tokenizer is None else text_of(own, tokenizer, spelled)))
    source = stream.labels[number]
    held = len({document for role, document in zip(roles, documents, strict=True) if role != "padding"})
    return {
        "sample": batch.samples[0],
        "source": source,
        "documents": held,
        **counts,
        "pieces": [piece._asdict() for piece in pieces],
        **({"labels": given} if names else {}),
    }


def _totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    totals = {name: sum(row[name] for row in rows) for name in ("trained", "context", "padding", "trained_after")}
    tokens = totals["trained"] + totals["context"] + totals["padding"]
    none = sum(not row["trained"] + row["trained_after"] + len(row.get("labels", ())) for row in rows)
    share = (totals["trained"] + totals["trained_after"]) / tokens if tokens else 0.0
    return {"tokens": tokens, **totals, "trained_share": share, "rows_without_training": none}


def spellings(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns the spelling of each control token, which `decode` leaves out."""
    content = json.loads(tokenizer.dump())
    added = content.get("added_tokens") or ()
    found = {token["id"]: token["content"] for token in added if token.get("special")}
    for spelling in dict(tokenizer.special_tokens).values():
        ids, _ = tokenizer.encode_pieces([(spelling, True)])
        if len(ids) == 1:
            found.setdefault(int(ids[0]), spelling)
    if tokenizer.eos is not None:
        found.setdefault(tokenizer.eos, "<end of document>")
    return found


def text_of(ids: Sequence[int], tokenizer: Tokenizer, spelled: Mapping[int, str]) -> str:
    """Returns the text of ids, control tokens included. Characters that a terminal could obey are escaped."""
    parts = []
    for control, group in groupby(ids, key=lambda index: index in spelled):
        own = list(group)
        parts.append("".join(spelled[index] for index in own) if control else tokenizer.decode(own))
    text = "".join(parts)
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def print_rows(found: Mapping[str, Any], console: Console, color: bool) -> None:
    """Prints the rows: trained text in color, or between `MARKS`; borders of documents as lines."""
    for number, row in enumerate(found["rows"], 1):
        console.text(f"row {number}: {_facts(row)}")
        console.styled([*_parts(row["pieces"], color), ("\n", "")], color)
    listed = f"{found['tokens']:,} tokens in {len(found['rows'])} rows: {found['trained_share']:.1%} trained"
    console.text(f"{listed}, {found['context']:,} context, {found['padding']:,} padding")
    if none := found["rows_without_training"]:
        console.text(f"warning: {none} of these rows train nothing")
    legend = [("trained", STYLES["trained"])] if color else [(f"{MARKS[0]}trained{MARKS[1]}", "")]
    console.styled([*legend, (" context; ... padding; --- document ---\n", "")], color)


def _facts(row: Mapping[str, Any]) -> str:
    size = row["trained"] + row["context"] + row["padding"]
    after = ", and the first token of the next row" if row["trained_after"] else ""
    documents = f"{row['documents']} document{'s' if row['documents'] != 1 else ''}"
    roles = f"{row['trained']} trained{after}, {row['context']} context, {row['padding']} padding"
    labels = f", labeled {', '.join(row['labels'])}" if "labels" in row else ""
    return f"sample {row['sample']} of {row['source']}, {size} tokens: {roles}; {documents}{labels}"


def _parts(pieces: Sequence[Mapping[str, Any]], color: bool) -> Iterator[tuple[str, str]]:
    """Yields (text, style) of a row."""
    before = None
    for piece in pieces:
        role, text = piece["role"], piece["text"]
        text = " ".join(map(str, piece["ids"])) + " " if text is None else text
        if role == "padding":
            yield f"\n... {len(piece['ids'])} tokens of padding", STYLES["padding"]
            continue
        if before is not None and piece["document"] != before:
            yield f"\n--- document {piece['document'] + 1} ---\n", STYLES["border"]
        before = piece["document"]
        yield (text if color or role != "trained" else f"{MARKS[0]}{text}{MARKS[1]}"), STYLES[role]
