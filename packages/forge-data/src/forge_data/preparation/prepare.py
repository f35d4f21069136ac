"""A corpus to a token store, once: the same bytes for any number of workers, and no part twice after a kill."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from glob import escape
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np

from forge_core.errors import DataError
from forge_core.machine import usable_cores
from forge_core.protocols.data import SourceContext, Texts, Tokenizer
from forge_data.preparation.parts import Done, Job, content_of, encode_documents, finished, write_job, write_part
from forge_data.preparation.pool import Work, process_workers, run_parts, thread_workers
from forge_data.preparation.progress import Progress
from forge_data.sources.records.parts import LISTED, SHOWN, Part, Records, Skips, Wanted, name_skipped, read_part
from forge_data.storage.workspace_lock import locked
from forge_data.store.manifest import MANIFEST, VERSION
from forge_data.store.reader import StoreSource, open_store
from forge_data.store.writer import SHARD_TOKENS, StoreWriter, dtype_for
from forge_data.tokenizers.adapt import identity_of

SMALLEST_PART, LARGEST_PART = 4 << 20, 128 << 20
"""Bytes of input in one part: small ones spread well over workers, large ones keep their number in the thousands."""
MANY_PARTS = 4096
PROCESSES_FROM = 16 << 20
"""A smaller corpus is tokenized by threads: processes cost a third of a second each to begin, and threads share one lock."""
_PORTION = 1 << 22


def prepared(texts: Texts, context: SourceContext, name: str, eos: int | None = None) -> StoreSource:
    """The store of these documents in the workspace; made when it is not there yet.

    Args:
        texts: the documents.
        context: gives workspace, tokenizer and workers.
        name: of the source, for messages and the directory.
        eos: of records that hold ids: what is put after a document that does not end with it.

    Raises:
        DataError: no tokenizer, no text, or a workspace that cannot be written.
    """
    tokenizer = context.tokenizer
    if tokenizer is None and not _holds_ids(texts):
        raise DataError(f"source {name!r} is text and needs a tokenizer; add [data.tokenizer] with name = 'bpe' or 'bytes'")
    made_with = _made_with(texts, tokenizer) if tokenizer else f"ids {eos}"
    key = sha256(f"{VERSION} {texts.fingerprint} {made_with} {eos}".encode()).hexdigest()[:16]
    path = context.workspace / "stores" / f"{name}-{key}"
    if not (path / MANIFEST).exists():
        with locked(context.workspace):
            if not (path / MANIFEST).exists():
                tokenize(texts, tokenizer, path, source=name, workers=context.workers, report=context.report, eos=eos)
    store = open_store(path, tokenizer)
    store.document_name = partial(_document_name, texts)
    return store


def _document_name(texts: Texts, number: int) -> str:
    """What a corpus calls one of its documents: mostly its file and where it begins there. For messages: it reads up to it."""
    if isinstance(texts, Records):
        skips = Skips(texts.skip)
        documents = (document for part in texts.parts(LARGEST_PART) for document in read_part(part, texts.wanted, skips))
    else:
        documents = iter(texts)
    return next((name for name, _ in islice(documents, number, None)), f"document {number} of the prepared store")


def tokenize(
    texts: Texts,
    tokenizer: Tokenizer | None,
    path: Path,
    *,
    source: str,
    workers: int | None = None,
    report: Callable[[str], None],
    shard_tokens: int = SHARD_TOKENS,
    eos: int | None = None,
    processes: bool | None = None,
    request: dict[str, str] | None = None,
) -> StoreSource:
    """Writes the store `path`. A second call after a kill goes on where the first one was.

    Args:
        texts: the documents.
        tokenizer: may be None for records that hold ids.
        path: of the new store.
        source: what the manifest says about their origin.
        workers: at a time, by default one per core; the store does not depend on it.
        report: told about progress.
        shard_tokens: of the store.
        eos: see `prepared`.
        processes: whether workers are processes, by default for large corpora.
        request: what was asked for, for the manifest.

    Raises:
        DataError: no document, broken records, or a directory that cannot be written.
    """
    workers = workers or usable_cores()
    job = _job(texts, tokenizer, eos)
    directory = _work_directory(path, texts, job, tokenizer)
    what = f"tokenizing {source}" if not job.wanted.ids else f"copying {source}"
    todo = [number for number in range(len(job.parts)) if finished(directory, number) is None]
    if len(todo) < len(job.parts):
        report(f"{what}: {len(job.parts) - len(todo)} of {len(job.parts)} parts are there already")
    progress = Progress(what, sum(job.parts[number].size for number in todo), "bytes of input", report)
    with _crew(texts, tokenizer, directory, job, workers, processes, todo) as (work, stop):
        run_parts(work, todo, workers, stop, lambda number: progress.advance(job.parts[number].size))
        parts = [finished(directory, number) for number in range(len(job.parts))]
        skipped = _skipped(parts, job.skip, path, report)
        note = f"{source}, {skipped} broken records left out" if skipped else source
        with StoreWriter(
            path, dtype=job.dtype, tokenizer=tokenizer, source=note, shard_tokens=shard_tokens, request=request
        ) as writer:
            for number in range(len(job.parts)):
                for ids, ends, text_bytes in _content(directory, job, number, work):
                    writer.add(ids, ends, text_bytes)
            manifest = writer.commit()
    for left in path.parent.glob(f"{escape(path.name)}.parts-*"):  # this job's parts, and those of abandoned jobs
        shutil.rmtree(left, ignore_errors=True)
    rate = manifest.tokens / progress.seconds / 1e6
    report(
        f"{what}: {manifest.documents} documents, {manifest.tokens} tokens in {progress.seconds:.1f} s ({rate:.2f} M/s) to {path}"
    )
    return StoreSource(path)


def part_size(size: int) -> int:
    """Bytes of input in one part of a corpus of `size` bytes."""
    return min(max(size // MANY_PARTS, SMALLEST_PART), LARGEST_PART)


def _job(texts: Texts, tokenizer: Tokenizer | None, eos: int | None) -> Job:
    records = texts if isinstance(texts, Records) else None
    vocabulary = tokenizer.vocab_size if tokenizer else None
    return Job(
        parts=tuple(records.parts(part_size(records.bytes))) if records else (Part((), 0, 0, 0),),
        wanted=records.wanted if records else Wanted("text"),
        dtype=dtype_for(vocabulary or 1 << 32),
        eos=eos,
        tokenizer_eos=tokenizer.eos if tokenizer else None,
        add_special_tokens=tokenizer is not None and bool(tokenizer.prefix or tokenizer.suffix),
        vocab_size=vocabulary,
        skip=records.skip if records else 0,
    )


def _holds_ids(texts: Texts) -> bool:
    return isinstance(texts, Records) and texts.wanted.ids


def _made_with(texts: Texts, tokenizer: Tokenizer) -> str:
    """What the ids of documents depend on besides them; ids that they hold are copied."""
    return tokenizer.fingerprint if _holds_ids(texts) else identity_of(tokenizer)


def _work_directory(path: Path, texts: Texts, job: Job, tokenizer: Tokenizer | None) -> Path:
    """Where the parts of this very job are kept: of the same corpus, cut the same way, for the same tokenizer."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} exists and is not empty; choose another directory or remove this one")
    made_with = _made_with(texts, tokenizer) if tokenizer else ""
    # The fingerprint knows the content of the files; their times say nothing about it.
    parts = [(part.start, part.stop, *(file.name for file in part.files)) for part in job.parts]
    key = sha256(f"{replace(job, skip=0, parts=())} {parts} {texts.fingerprint} {made_with}".encode()).hexdigest()[:16]
    directory = path.with_name(f"{path.name}.parts-{key}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_job(directory, job, None if job.wanted.ids else tokenizer)
    except OSError as error:
        raise DataError(f"{path.parent} cannot be written: {error.strerror}; choose another directory") from error
    return directory


def _crew(
    texts: Texts,
    tokenizer: Tokenizer | None,
    directory: Path,
    job: Job,
    workers: int,
    wanted: bool | None,
    todo: list[int],
) -> AbstractContextManager[tuple[Work, Callable[[], None]]]:
    if not isinstance(texts, Records):
        return _alone(texts, tokenizer, directory, job)
    large = len(todo) > 1 and workers > 1 and sum(job.parts[number].size for number in todo) >= PROCESSES_FROM
    if (large if wanted is None else wanted) and todo and _restorable(tokenizer, job):
        return process_workers(directory, min(workers, len(todo)))
    return thread_workers(directory, job, None if job.wanted.ids else tokenizer)


@contextmanager
def _alone(texts: Texts, tokenizer: Tokenizer | None, directory: Path, job: Job) -> Iterator[tuple[Work, Callable[[], None]]]:
    """Documents that know no parts are one part, read by this process."""
    assert tokenizer is not None
    yield lambda number: write_part(directory, number, job.dtype, encode_documents(texts, tokenizer), Skips()), lambda: None


def _restorable(tokenizer: Tokenizer | None, job: Job) -> bool:
    """Whether another process can make the same tokenizer: one of a plugin it cannot."""
    from forge_data.tokenizers.restore import restore

    if job.wanted.ids or tokenizer is None:
        return True
    try:
        again = restore(tokenizer.dump(), tokenizer.eos, tokenizer.name, job.add_special_tokens)
        return identity_of(again) == identity_of(tokenizer)
    except DataError:
        return False


def _skipped(parts: list[Done | None], budget: int, path: Path, report: Callable[[str], None]) -> int:
    done = [part for part in parts if part is not None]
    skipped = sum(part.skipped for part in done)
    messages = [message for part in done for message in part.messages][:LISTED]
    if skipped > budget:
        named = "".join(f"\n  {message}" for message in messages[1:SHOWN])
        raise DataError(f"{skipped} records are broken, and `skip` allows {budget}; the first: {messages[0]}{named}")
    if messages:
        try:
            name_skipped(f"{skipped} broken records", messages, path, report)
        except OSError as error:
            raise DataError(f"{path.parent} cannot be written: {error.strerror}; choose another directory") from error
    return skipped


def _content(directory: Path, job: Job, number: int, work: Work) -> Iterator[tuple[np.ndarray, np.ndarray, int | None]]:
    """The documents of a part in portions; a part that did not survive a crash of the machine is done again."""
    done = finished(directory, number)
    found = content_of(directory, number, job.dtype, done) if done else None
    if done is None or found is None:
        done = work(number)
        found = content_of(directory, number, job.dtype, done)
        if found is None:
            raise DataError(f"{directory} lost data that was written to it; choose another disk")
    ids, ends = found[0], found[1].astype(np.int64)
    text_bytes = done.text_bytes
    begin = start = 0
    while begin < len(ends):
        until = max(begin + 1, int(np.searchsorted(ends, start + _PORTION, side="right")))
        stop = int(ends[until - 1])
        yield ids[start:stop], ends[begin:until] - start, text_bytes
        begin, start = until, stop
        text_bytes = None if text_bytes is None else 0
