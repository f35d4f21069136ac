"""Text to a token store, once: the same bytes for any number of workers."""

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext, Texts, Tokenizer
from forge_data.sources.manifest import MANIFEST, VERSION
from forge_data.sources.store import StoreSource, open_store
from forge_data.sources.writer import SHARD_TOKENS, StoreWriter, dtype_for
from forge_data.workspace import locked

CHUNK = 1 << 20
"""Documents are tokenised in portions of about so many characters; fixed, so that no output depends on workers."""
LONGEST_PIECE = 4 << 20
"""A longer document is encoded in pieces cut after a line's end, which bounds the memory."""
_SECONDS = 2.0


class Encoded(NamedTuple):
    """Some documents: ids with their ends of document, where each ends, and the size of their text in bytes."""

    ids: np.ndarray
    ends: np.ndarray
    text_bytes: int


def prepared(texts: Texts, context: SourceContext, name: str) -> StoreSource:
    """The store of these documents in the workspace; made when it is not there yet.

    Raises:
        DataError: no tokenizer, no text, or a workspace that cannot be written.
    """
    tokenizer = context.tokenizer
    if tokenizer is None:
        raise DataError(f"source {name!r} is text and needs a tokenizer; add [data.tokenizer] with name = 'bpe' or 'bytes'")
    key = sha256(f"{VERSION} {texts.fingerprint} {tokenizer.fingerprint}".encode()).hexdigest()[:16]
    path = context.workspace / "stores" / f"{name}-{key}"
    if not (path / MANIFEST).exists():
        with locked(context.workspace) as alone:
            if not (path / MANIFEST).exists():
                for left in path.parent.glob(f"{path.name}.partial-*") if alone else ():
                    shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
                tokenise(texts, tokenizer, path, source=name, workers=context.workers, report=context.report)
    return open_store(path, tokenizer)


def tokenise(
    texts: Texts,
    tokenizer: Tokenizer,
    path: Path,
    *,
    source: str,
    workers: int | None = None,
    report: Callable[[str], None],
    shard_tokens: int = SHARD_TOKENS,
) -> StoreSource:
    """Writes the store `path`; threads, because the encoder runs outside the interpreter's lock.

    Raises:
        DataError: no document, text that is not UTF-8, or a directory that cannot be written.
    """
    workers = workers or os.cpu_count() or 1
    began = spoke = time.monotonic()
    tokens = 0
    dtype = dtype_for(tokenizer.vocab_size)
    with (
        StoreWriter(path, dtype=dtype, tokenizer=tokenizer, source=source, shard_tokens=shard_tokens) as writer,
        ThreadPoolExecutor(workers, thread_name_prefix="tokenise") as pool,
    ):
        for part in _in_order(pool, workers, _chunks(texts), tokenizer):
            writer.add(part.ids, part.ends, part.text_bytes)
            tokens += len(part.ids)
            if (now := time.monotonic()) - spoke > _SECONDS:
                spoke = now
                report(f"tokenising {source}: {tokens / 1e6:.1f} M tokens, {tokens / (now - began) / 1e6:.2f} M/s")
        manifest = writer.commit()
    seconds = max(time.monotonic() - began, 1e-9)
    report(
        f"tokenised {source}: {manifest.documents} documents, {manifest.tokens} tokens in {seconds:.1f} s "
        f"({manifest.tokens / seconds / 1e6:.2f} M/s) to {path}"
    )
    return StoreSource(path)


def encode(documents: Iterable[str], tokenizer: Tokenizer) -> Encoded:
    """Token ids of whole documents, each followed by the end of document, where the tokenizer has one."""
    closing = [] if tokenizer.eos is None else [np.array([tokenizer.eos], dtype=np.int64)]
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    size = 0
    for text in documents:
        ids = [*(tokenizer.encode(piece) for piece in pieces(text)), *closing]
        length = sum(len(part) for part in ids)
        size += len(text.encode("utf-8"))
        if length:
            parts += ids
            lengths.append(length)
    return Encoded(np.concatenate([*parts, np.empty(0, np.int64)]), np.cumsum(lengths, dtype=np.int64), size)


def pieces(text: str) -> Iterator[str]:
    """A document in pieces of at most `LONGEST_PIECE` characters, cut after a line's end where there is one."""
    start = 0
    while len(text) - start > LONGEST_PIECE:
        cut = text.rfind("\n", start, start + LONGEST_PIECE) + 1
        stop = cut if cut > start else start + LONGEST_PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


def _chunks(texts: Texts) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for _, text in texts:
        chunk.append(text)
        size += len(text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _in_order(pool: ThreadPoolExecutor, workers: int, chunks: Iterator[list[str]], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Results in the order of the chunks; a few chunks ahead of the writer, no more."""
    waiting: deque[Future[Encoded]] = deque()
    for chunk in chunks:
        waiting.append(pool.submit(encode, chunk, tokenizer))
        if len(waiting) > 2 * workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
