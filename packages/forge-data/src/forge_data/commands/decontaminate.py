"""Implements `data decontaminate`: finds documents that share runs of words with an evaluation set, and leaves them out.

The criterion is the usual one (Brown et al., 2020): a run of 13 words that occurs in both. It needs neither a network nor a
tokenizer of the evaluation set. A shorter example is searched for as a whole, as one run.

Text is converted to lower case; words are separated by everything except letters, digits and symbols beyond ASCII. Runs are
found by 64-bit hashes at many megabytes per second: the hash of a word is a polynomial in its bytes, and that of a run a
polynomial in its words, both modulo 2^64, so two cumulative sums produce the hashes of all runs (Karp and Rabin, 1987).
Runs with equal hashes are then compared word by word.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_core.terminal import ProgressMeter
from forge_data.sources import jsonl
from forge_data.sources.formats import open_any
from forge_data.sources.scan import mask_of, portions
from forge_data.sources.store import StoreSource
from forge_data.sources.store_writer import StoreWriter
from forge_data.storage.files import find
from forge_data.tokenizers.dump import tokenizer_of

_SHORTEST = 3
"""Minimum number of words of an example; shorter ones occur everywhere."""
_BYTE_BASE, _WORD_BASE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
_ODD = np.uint64(0xBF58476D1CE4E5B9)
_GAPS = dict.fromkeys((*range(8192, 8304), 12288, 12289, 12290), " ")
"""Spaces, dashes, quotation marks and CJK punctuation beyond ASCII."""


@dataclass
class EvaluationExamples:
    """Runs of words of an evaluation set.

    Attributes:
        names: name of every example: file and byte offset.
        runs: by length in words, maps the words of a run to the numbers of the examples that contain it.
        hashes: by length in words, the sorted hashes of these runs.
        too_short: number of examples that are too short.
        hit: numbers of the examples that were found.
    """

    names: list[str] = field(default_factory=list)
    runs: dict[int, dict[tuple[bytes, ...], list[int]]] = field(default_factory=dict)
    hashes: dict[int, np.ndarray] = field(default_factory=dict)
    too_short: int = 0
    hit: set[int] = field(default_factory=set)


def decontaminate(
    path: str,
    against: Sequence[str],
    fields: tuple[str, ...],
    words: int,
    out: Path | None,
    report_to: Path | None,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Compares a store with evaluation sets; returns a summary as JSON.

    Args:
        path: a store with a copy of its tokenizer.
        against: JSON lines: files, directories or patterns.
        fields: keys of the text in their records; empty = every text of a record.
        words: number of words of a run.
        out: a new store without the overlapping documents.
        report_to: a new file of JSON lines, one per overlap.
        report: called with progress messages.

    Raises:
        DataError: the store has no tokenizer, there are no examples, or a file exists or cannot be written.
    """
    source = open_any(path)
    tokenizer = tokenizer_of(source) if isinstance(source, StoreSource) else None
    if not isinstance(source, StoreSource) or tokenizer is None:
        raise DataError(f"{path} has no copy of its tokenizer, so its text is unknown; use `data convert --tokenizer` first")
    mask = source.manifest.mask
    if source.pairs and out is not None:
        raise DataError(
            f"{path} has preference pairs, which --out would separate; remove the overlapping records from their file"
        )
    examples = read_examples(against, fields, words)
    if report_to is not None and report_to.exists():
        raise DataError(f"{report_to} exists; choose another path or remove it")
    summary = {"path": path, "examples": len(examples.names), "too_short": examples.too_short, "words": words}
    counts = {"documents": 0, "overlapping_documents": 0, "overlapping_tokens": 0}
    progress = ProgressMeter(f"comparing {path}", source.tokens, "tokens", report)
    with ExitStack() as stack:
        writer = out and stack.enter_context(
            StoreWriter(
                out,
                dtype=source.dtype.name,
                tokenizer=tokenizer,
                source=f"{source.manifest.source}, decontaminated",
                mask=mask and replace(mask, turns=0, ended=0),
            )
        )
        lines = report_to and stack.enter_context(_open_report(report_to))
        for start, ids, ends in portions(source):
            kept = _compare(tokenizer, examples, start, ids, ends, counts, lines)
            if writer:
                _add_kept(writer, ids, ends, kept, mask_of(source, start, start + len(ids)))
            progress.advance(len(ids))
        if writer:
            writer.commit()
    return summary | counts | {"overlapping_examples": len(examples.hit), "out": str(out) if out else None}


def read_examples(against: Sequence[str], fields: tuple[str, ...], words: int) -> EvaluationExamples:
    """Returns the runs of all examples.

    Raises:
        DataError: a file is missing, is not JSON lines, or has a record without text.
    """
    examples = EvaluationExamples()
    for file in (file for path in against for file in find(path, jsonl.SUFFIXES, "evaluation")):
        for offset, record in jsonl.records(file):
            texts = list(_texts_in(record, fields))
            if not texts:
                what = f"no text under {' or '.join(fields)}" if fields else "no text"
                raise DataError(f"{file.where} at byte {offset} has {what}")
            number = len(examples.names)
            examples.names.append(f"{file.name}:{offset}")
            runs = [run for text in texts for run in _runs_of_words(words_of(text), words)]
            examples.too_short += not runs
            for run in runs:
                owners = examples.runs.setdefault(len(run), {}).setdefault(run, [])
                if number not in owners:
                    owners.append(number)
    if not examples.runs:
        raise DataError(f"{', '.join(against)}: no example has at least {_SHORTEST} words")
    for length, runs_of_length in examples.runs.items():
        hashes = [run_hashes(" ".join(word.decode("utf-8", errors="replace") for word in run), length) for run in runs_of_length]
        examples.hashes[length] = np.unique(np.concatenate(hashes))
    return examples


def _runs_of_words(words: list[bytes], length: int) -> Iterator[tuple[bytes, ...]]:
    if _SHORTEST <= len(words) < length:
        yield tuple(words)
    for start in range(len(words) - length + 1):
        yield tuple(words[start : start + length])


def _texts_in(value: Any, fields: tuple[str, ...]) -> Iterator[str]:
    """Yields all texts in a value; in a record, only those of the named fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item, ())
    elif isinstance(value, dict):
        for key, item in value.items():
            if not fields or key in fields:
                yield from _texts_in(item, ())


def _compare(
    tokenizer: Tokenizer,
    examples: EvaluationExamples,
    start: int,
    ids: np.ndarray,
    ends: np.ndarray,
    counts: dict[str, int],
    lines: IO[str] | None,
) -> np.ndarray:
    """Returns (documents,) bool, True for documents without an overlap; updates `counts` and writes every overlap."""
    kept = np.ones(len(ends), dtype=bool)
    begin = 0
    for number, end in enumerate(ends.tolist()):
        text = tokenizer.decode(ids[begin:end].tolist())
        overlaps = _overlaps(text, examples)
        if overlaps:
            kept[number] = False
            counts["overlapping_documents"] += 1
            counts["overlapping_tokens"] += end - begin
            for run, owners in overlaps:
                examples.hit.update(owners)
                if lines is not None:
                    named = [examples.names[owner] for owner in owners]
                    shared = b" ".join(run).decode("utf-8", errors="replace")
                    place = {"document": counts["documents"] + number, "token": start + begin}
                    lines.write(json.dumps(place | {"examples": named, "words": shared}, ensure_ascii=False) + "\n")
        begin = end
    counts["documents"] += len(ends)
    return kept


def _overlaps(text: str, examples: EvaluationExamples) -> list[tuple[tuple[bytes, ...], list[int]]]:
    """Returns (run, examples that contain it) for every run that occurs in the text."""
    words: list[bytes] | None = None
    overlaps: dict[tuple[bytes, ...], list[int]] = {}
    for length, wanted in examples.hashes.items():
        own = run_hashes(text, length)
        if not len(own):
            continue
        places = np.searchsorted(wanted, own)
        places[places == len(wanted)] = 0
        for start in np.flatnonzero(wanted[places] == own).tolist():
            words = words_of(text) if words is None else words
            run = tuple(words[start : start + length])
            owners = examples.runs[length].get(run)
            if owners is not None:
                overlaps[run] = owners
    return list(overlaps.items())


def _add_kept(writer: StoreWriter, ids: np.ndarray, ends: np.ndarray, kept: np.ndarray, learned: np.ndarray | None) -> None:
    lengths = np.diff(ends, prepend=0)
    chosen = np.repeat(kept, lengths)
    if chosen.any():
        writer.add(ids[chosen], np.cumsum(lengths[kept]), learned=None if learned is None else learned[chosen])


def _open_report(path: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error


def as_text(found: dict[str, Any]) -> str:
    """Formats the summary for a terminal."""
    lines = [
        f"{found['path']}: {found['overlapping_documents']:,} of {found['documents']:,} documents "
        f"({found['overlapping_tokens']:,} tokens) share {found['words']} words in a row with "
        f"{found['overlapping_examples']:,} of {found['examples']:,} examples"
    ]
    if found["too_short"]:
        lines.append(f"  {found['too_short']:,} examples have fewer than {_SHORTEST} words and were ignored")
    if found["out"]:
        lines.append(f"  the other documents are in {found['out']}")
    return "\n".join(lines)


def normalized(text: str) -> bytes:
    """Returns lower-case text as UTF-8, with punctuation beyond ASCII replaced by spaces."""
    lowered = text.lower()
    return (lowered if lowered.isascii() else lowered.translate(_GAPS)).encode("utf-8", errors="replace")


def words_of(text: str) -> list[bytes]:
    """Returns the words of a text."""
    content = normalized(text)
    return [content[start:stop] for start, stop in zip(*(edge.tolist() for edge in word_edges(content)), strict=True)]


def word_edges(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Returns (starts, stops) of the words in normalized text."""
    inside = np.zeros(len(content) + 2, dtype=bool)
    inside[1:-1] = _letters()[np.frombuffer(content, dtype=np.uint8)]
    turns = np.flatnonzero(inside[1:] != inside[:-1])
    return turns[::2], turns[1::2]


def run_hashes(text: str, n: int) -> np.ndarray:
    """Returns the (runs,) uint64 hashes of all runs of `n` words, in order."""
    content = normalized(text)
    starts, stops = word_edges(content)
    if len(starts) < n:
        return np.empty(0, dtype=np.uint64)
    # A zero would not contribute to the polynomial, so bytes count from 1.
    letters = np.frombuffer(content, dtype=np.uint8).astype(np.uint64) + np.uint64(1)
    words = _polynomials(letters, starts, stops, _BYTE_BASE)
    words = (words ^ (words >> np.uint64(29))) * _ODD + (stops - starts).astype(np.uint64)
    first = np.arange(len(words) - n + 1)
    return _polynomials(words, first, first + n, _WORD_BASE)


def _polynomials(values: np.ndarray, starts: np.ndarray, stops: np.ndarray, base: int) -> np.ndarray:
    """Returns the sums over i in [start, stop) of values[i] base^(i - start), modulo 2^64."""
    powers = _powers(base, len(values))
    sums = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values * powers, out=sums[1:])
    inverse = _powers(pow(base, -1, 1 << 64), len(values))
    return (sums[stops] - sums[starts]) * inverse[starts]


def _powers(base: int, count: int) -> np.ndarray:
    """Returns (count,) uint64 base^0, base^1, ..., modulo 2^64."""
    steps = np.full(count, base, dtype=np.uint64)
    steps[0] = 1
    return np.multiply.accumulate(steps)


def _letters() -> np.ndarray:
    """Returns (256,) bool: whether a byte of lower-case UTF-8 belongs to a word."""
    table = np.zeros(256, dtype=bool)
    table[[*b"0123456789abcdefghijklmnopqrstuvwxyz"]] = True
    table[128:] = True
    return table
