"""A tokenization job on disk, its parts, and the worker process that tokenizes parts.

The files of finished parts are kept when a job is killed. A job is a directory next to the target:

    job.json             the parts, the fields to read, and the tokenizer's end-of-document token
    tokenizer.json       the tokenizer, unless the records hold ids
    000000.ids           ids of part 0, raw little-endian
    000000.ends.npy      uint64 document ends of part 0
    000000.learned       for conversations: a byte per token of part 0, 1 if it is trained
    000000.json          counts and checksums of both; written last, so a part without it is done again

The parts and their content depend only on the corpus, not on the workers.

`python -m forge_data.preparation.job DIRECTORY` tokenizes parts for another process. It reads part numbers from standard input,
one per line, and answers each with a line of JSON. It ends when its input ends, so it outlives its parent by at most one part.
It does not use `multiprocessing`, which would import the user's script again, possibly a training run.
"""

import json
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_core.files import publish, sync, write_file
from forge_core.protocols.data import Tokenizer
from forge_data.chat import labeled
from forge_data.chat import records as conversations
from forge_data.chat.masks import EncodedExample
from forge_data.sources.records import CorpusPart, Document, Skips, Wanted, part_as_json, part_from_json, read_part
from forge_data.storage import npy
from forge_data.storage.files import find_one
from forge_data.tokenizers.dump import restore

CHUNK = 1 << 20
"""Documents are encoded in portions of about this many characters, which limits memory."""
LONGEST_PIECE = 4 << 20
"""Longer documents are encoded in pieces of this many characters, which limits memory, if the tokenizer has `parting`."""


class EncodedDocuments(NamedTuple):
    """Some documents.

    Attributes:
        ids: ids including end-of-document tokens.
        ends: end of each document.
        text_bytes: size of the text in bytes.
        learned: for conversations: whether each token is trained; for labeled texts: 1 + the label of each token's document.
        turns, ended: for conversations: number of trained turns, and of those that end with a stop token.
    """

    ids: np.ndarray
    ends: np.ndarray
    text_bytes: int
    learned: np.ndarray | None = None
    turns: int = 0
    ended: int = 0


@dataclass(frozen=True)
class PreparationJob:
    """The settings that every worker needs.

    Attributes:
        parts: all parts of the corpus.
        wanted: the field and split to read.
        dtype: dtype of the ids in the store.
        eos: for records of ids: the id that every document must end with.
        tokenizer_eos: id of the tokenizer's end-of-document token.
        vocab_size: upper limit of the ids (exclusive).
        skip: maximum number of broken records in all parts together.
        add_special_tokens: whether documents get the tokenizer's prefix and suffix.
    """

    parts: tuple[CorpusPart, ...]
    wanted: Wanted
    dtype: str
    eos: int | None
    tokenizer_eos: int | None
    vocab_size: int | None
    skip: int
    add_special_tokens: bool = False


@dataclass(frozen=True)
class Done:
    """Result of one part. `text_bytes` is None for records of ids and conversations; `messages` name the skipped records.
    `learned`, `turns` and `ended` are of conversations; see `EncodedDocuments`."""

    tokens: int
    documents: int
    text_bytes: int | None
    skipped: int
    messages: list[str]
    ids: str
    ends: str
    learned: str = ""
    turns: int = 0
    ended: int = 0


def write_job(directory: Path, job: PreparationJob, tokenizer: Tokenizer | None) -> None:
    """Writes a job to disk, for workers in other processes."""
    if tokenizer is not None:
        write_file(directory / "tokenizer.json", tokenizer.dump())
    content = asdict(job) | {"parts": [part_as_json(part) for part in job.parts]}
    write_file(directory / "job.json", json.dumps(content).encode())


def read_job(directory: Path) -> PreparationJob:
    """Reads the job of a directory."""
    content: dict[str, Any] = json.loads((directory / "job.json").read_bytes())
    parts = tuple(part_from_json(part) for part in content.pop("parts"))
    return PreparationJob(parts=parts, wanted=Wanted(**content.pop("wanted")), **content)


def tokenize_part(directory: Path, job: PreparationJob, number: int, tokenizer: Tokenizer | None) -> Done:
    """Writes the files of one part.

    Raises:
        DataError: too many records are broken, an id is too large, or the disk is full.
    """
    skips = Skips(job.skip)
    if job.wanted.reader == conversations.READER:
        assert tokenizer is not None, "conversations need a tokenizer"
        return write_part(directory, number, job.dtype, _conversations(job, number, tokenizer, skips), skips)
    if job.wanted.reader == labeled.READER:
        assert tokenizer is not None, "texts need a tokenizer"
        return write_part(directory, number, job.dtype, _labeled(job, number, tokenizer, skips), skips)
    documents = read_part(job.parts[number], job.wanted, skips)
    portions = _ids(documents, job) if tokenizer is None else encode_documents(documents, tokenizer)
    return write_part(directory, number, job.dtype, portions, skips)


def write_part(directory: Path, number: int, dtype: str, portions: Iterable[EncodedDocuments], skips: Skips) -> Done:
    """Writes portions one after the other as the files of a part.

    Raises:
        DataError: the disk is full.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    stem = directory / f"{number:06d}"
    partial = stem.with_name(f"{stem.name}.partial-{token_hex(4)}")
    digest, tokens, text_bytes, turns, ended = xxhash.xxh3_128(), 0, 0, 0, 0
    ends, masks = [np.empty(0, dtype=np.uint64)], list[np.ndarray]()
    try:
        with partial.open("wb") as file:
            for portion in portions:
                data = portion.ids.astype(kind).tobytes()
                file.write(data)
                digest.update(data)
                ends.append((portion.ends + tokens).astype("<u8"))
                tokens += len(portion.ids)
                text_bytes += portion.text_bytes
                turns, ended = turns + portion.turns, ended + portion.ended
                masks += [] if portion.learned is None else [portion.learned]
            sync(file)
        publish(partial, stem.with_suffix(".ids"))
        all_ends = np.concatenate(ends).astype("<u8")
        with partial.open("wb") as file:
            np.save(file, all_ends, allow_pickle=False)
            sync(file)
        publish(partial, stem.with_suffix(".ends.npy"))
        learned = np.concatenate(masks).astype(np.uint8) if masks else None
        if learned is not None:
            write_file(partial, learned.tobytes())
            publish(partial, stem.with_suffix(".learned"))
        done = Done(
            tokens=tokens,
            documents=len(all_ends),
            text_bytes=text_bytes if text_bytes or not tokens else None,
            skipped=skips.count,
            messages=skips.messages,
            ids=digest.hexdigest(),
            ends=xxhash.xxh3_128_hexdigest(all_ends.data),
            learned="" if learned is None else xxhash.xxh3_128_hexdigest(learned.data),
            turns=turns,
            ended=ended,
        )
        write_file(partial, json.dumps(asdict(done)).encode())
        publish(partial, stem.with_suffix(".json"))
    except OSError as error:
        raise DataError(
            f"{directory} cannot be written: {error.strerror or error}; free disk space and run the command again (finished "
            "parts are kept)"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return done


def finished(directory: Path, number: int) -> Done | None:
    """Returns the result of a part, or None if it is not finished."""
    try:
        return Done(**json.loads((directory / f"{number:06d}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def content_of(directory: Path, number: int, dtype: str, done: Done) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
    """Returns (ids, ends, learned) of a finished part, or None if the files are damaged, for example after a system crash."""
    borders = find_one(str(directory / f"{number:06d}.ends.npy"))
    if borders is None:
        return None
    try:
        ids = np.fromfile(directory / f"{number:06d}.ids", dtype=np.dtype(dtype).newbyteorder("<"))
        ends = npy.load(borders, np.dtype("<u8"))
        learned = np.fromfile(directory / f"{number:06d}.learned", dtype=np.uint8) if done.learned else None
    except (OSError, DataError):
        return None
    same = xxhash.xxh3_128_hexdigest(ids.data) == done.ids and xxhash.xxh3_128_hexdigest(ends.data) == done.ends
    if learned is not None:
        same = same and xxhash.xxh3_128_hexdigest(learned.data) == done.learned
    return (ids, ends, learned) if same else None


def encode(documents: Iterable[str], tokenizer: Tokenizer, ended: bool = True) -> EncodedDocuments:
    """Encodes whole documents: the tokenizer's prefix, the text, its suffix, and if `ended` its end-of-document token if it has
    one."""
    end = () if tokenizer.eos is None or not ended else (tokenizer.eos,)
    opening, closing = ([np.array(around)] if around else [] for around in (tokenizer.prefix, (*tokenizer.suffix, *end)))
    parting = getattr(tokenizer, "parting", None)
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    size = 0
    for text in documents:
        ids = [*opening, *(tokenizer.encode(piece) for piece in pieces(text, parting)), *closing]
        length = sum(len(part) for part in ids)
        size += len(text) if text.isascii() else len(text.encode("utf-8"))
        if length:
            parts += ids
            lengths.append(length)
    return EncodedDocuments(np.concatenate([*parts, np.empty(0, np.int64)]), np.cumsum(lengths, dtype=np.int64), size)


def pieces(text: str, parting: re.Pattern[str] | None) -> Iterator[str]:
    """Yields a document in pieces of about `LONGEST_PIECE` characters, or as a whole.

    Args:
        text: text of the document.
        parting: an empty match marks a place where cutting the text does not change its ids.
    """
    start = 0
    while parting is not None and len(text) - start > LONGEST_PIECE:
        match = parting.search(text, start + LONGEST_PIECE)
        if match is None:
            break
        yield text[start : match.start()]
        start = match.start()
    yield text[start:]


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[EncodedDocuments]:
    """Encodes documents of text; yields them in portions."""
    chunk: list[str] = []
    size = 0
    for _, text in documents:
        assert isinstance(text, str)
        chunk.append(text)
        size += len(text)
        if size >= CHUNK:
            yield encode(chunk, tokenizer)
            chunk, size = [], 0
    yield encode(chunk, tokenizer)


def _conversations(job: PreparationJob, number: int, tokenizer: Tokenizer, skips: Skips) -> Iterator[EncodedDocuments]:
    """Encodes the conversations of a part; yields them in portions."""
    chunk: list[EncodedExample] = []
    size = 0
    for _, made in conversations.encoded(job.parts[number], job.wanted, tokenizer, skips):
        chunk += made
        size += sum(len(document.ids) for document in made)
        if size >= CHUNK:
            yield _masked(chunk)
            chunk, size = [], 0
    if chunk:
        yield _masked(chunk)


def _labeled(job: PreparationJob, number: int, tokenizer: Tokenizer, skips: Skips) -> Iterator[EncodedDocuments]:
    """Encodes the labeled texts of a part; yields them in portions."""
    for texts, numbers in labeled.portions(job.parts[number], job.wanted, skips, CHUNK):
        made = encode(texts, tokenizer, ended=False)
        sizes = np.diff(made.ends, prepend=0)
        yield made._replace(learned=np.repeat(np.array(numbers, dtype=np.uint8) + np.uint8(1), sizes))


def _masked(documents: list[EncodedExample]) -> EncodedDocuments:
    return EncodedDocuments(
        np.concatenate([document.ids for document in documents]),
        np.cumsum([len(document.ids) for document in documents], dtype=np.int64),
        0,
        np.concatenate([document.learned for document in documents]),
        sum(document.turns for document in documents),
        sum(document.ended for document in documents),
    )


def _ids(documents: Iterable[Document], job: PreparationJob) -> Iterator[EncodedDocuments]:
    """Checks records that hold ids, and appends the end-of-document token to those that lack it."""
    limit = min(np.iinfo(job.dtype).max + 1, job.vocab_size or 1 << 62)
    chunk: list[np.ndarray] = []
    size = 0
    for name, ids in documents:
        assert not isinstance(ids, str)
        if int(ids.max()) >= limit:
            raise DataError(f"document {name} holds token id {int(ids.max())}, but the vocabulary has only {limit} ids")
        chunk.append(ids if job.eos is None or ids[-1] == job.eos else np.append(ids, job.eos))
        size += len(chunk[-1])
        if size >= CHUNK:
            yield _joined(chunk)
            chunk, size = [], 0
    if chunk:
        yield _joined(chunk)


def _joined(documents: list[np.ndarray]) -> EncodedDocuments:
    return EncodedDocuments(np.concatenate(documents), np.cumsum([len(ids) for ids in documents], dtype=np.int64), 0)


def main() -> None:
    """Tokenizes the requested parts until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent decides
    directory = Path(sys.argv[1])
    job = read_job(directory)
    content = directory / "tokenizer.json"
    tokenizer = None if job.wanted.ids else restore(content.read_bytes(), job.tokenizer_eos, str(content), job.add_special_tokens)
    for line in sys.stdin:
        try:
            answer = {"done": asdict(tokenize_part(directory, job, int(line), tokenizer))}
        except DataError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
