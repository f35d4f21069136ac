"""A corpus to a token store, once: the same bytes for any number of workers, and no part twice after a kill.

Workers are threads of this process for small corpora, and separate processes for large ones.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from glob import escape
from hashlib import sha256
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from forge_core.errors import DataError
from forge_core.machine import usable_cores
from forge_core.protocols.data import SourceContext, Texts, Tokenizer
from forge_core.terminal import ProgressMeter
from forge_data.preparation.job import Done, Job, content_of, encode_documents, finished, tokenize_part, write_job, write_part
from forge_data.sources.records import LISTED, SHOWN, CorpusPart, Records, Skips, Wanted, name_skipped, read_part
from forge_data.sources.store import MANIFEST, VERSION, StoreSource, open_store
from forge_data.sources.store_writer import SHARD_TOKENS, StoreWriter, dtype_for
from forge_data.storage.workspace import locked
from forge_data.tokenizers.control import identity_of

SMALLEST_PART, LARGEST_PART = 4 << 20, 128 << 20
"""Bytes of input in one part: small ones spread well over workers, large ones keep their number in the thousands."""
MANY_PARTS = 4096
PROCESSES_FROM = 16 << 20
"""A smaller corpus is tokenized by threads: processes cost a third of a second each to begin, and threads share one lock."""
_PORTION = 1 << 22
Work = Callable[[int], Done]


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
        report: called with progress messages.
        shard_tokens: of the store.
        eos: see `prepared`.
        processes: whether workers are processes, by default for large corpora.
        request: settings of the command, stored in the manifest.

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
    progress = ProgressMeter(what, sum(job.parts[number].size for number in todo), "bytes of input", report)
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
        parts=tuple(records.parts(part_size(records.bytes))) if records else (CorpusPart((), 0, 0, 0),),
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
    from forge_data.tokenizers.dump import restore

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


def run_parts(
    work: Work, numbers: Sequence[int], workers: int, stop: Callable[[], None], on_finished: Callable[[int], None]
) -> None:
    """Does parts `numbers`, `workers` at a time.

    Args:
        work: does one part.
        numbers: of the parts.
        workers: at a time.
        stop: called when a part fails, so that the parts in progress end soon.
        on_finished: called in this thread with the number of each part that is done.

    Raises:
        DataError: the error of the first part that fails; parts in progress are finished or stopped.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="tokenize") as pool:
        number_of = {pool.submit(work, number): number for number in numbers}
        waiting = set(number_of)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=1.0, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                    on_finished(number_of[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop()
            raise


@contextmanager
def thread_workers(directory: Path, job: Job, tokenizer: Tokenizer | None) -> Iterator[tuple[Work, Callable[[], None]]]:
    """Work in this process; enough for a small corpus, because most encoders run outside the interpreter's lock."""
    yield lambda number: tokenize_part(directory, job, number, tokenizer), lambda: None


@contextmanager
def process_workers(directory: Path, workers: int) -> Iterator[tuple[Work, Callable[[], None]]]:
    """Work in as many processes as there are workers; all have ended when this does."""
    idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
    with ExitStack() as stack:
        crew = [stack.enter_context(_worker_process(directory)) for _ in range(workers)]
        for process in crew:
            idle.put(process)

        def work(number: int) -> Done:
            process = idle.get()
            try:
                return _ask(process, number)
            finally:
                idle.put(process)

        def stop() -> None:
            for process in crew:
                process.kill()

        yield work, stop


@contextmanager
def _worker_process(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    # One thread each: there is a process for every core.
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "forge_data.preparation.job", str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # it is dead already
                    pipe.close()
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ask(process: "subprocess.Popen[str]", number: int) -> Done:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except (BrokenPipeError, ValueError):  # dead, or closed by the one who stops all
        line = ""
    if not line:
        code = process.poll()
        raise DataError(
            f"a worker ended (exit code {code}) while it tokenized part {number}; perhaps memory ran out. "
            "Finished parts are kept: run the same again"
        )
    answer = json.loads(line)
    if "error" in answer:
        raise DataError(answer["error"])
    return Done(**answer["done"])
