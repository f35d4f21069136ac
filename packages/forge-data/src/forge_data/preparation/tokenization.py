"""Tokenizes a corpus into a token store, once. The store does not depend on the number of workers, and a killed preparation
continues with its unfinished parts.

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
from forge_data.chat import labeled
from forge_data.chat import records as conversations
from forge_data.preparation.job import (
    Done,
    PreparationJob,
    content_of,
    encode_documents,
    finished,
    tokenize_part,
    write_job,
    write_part,
)
from forge_data.sources.records import LISTED, SHOWN, CorpusPart, Records, Skips, Wanted, name_skipped, read_part
from forge_data.sources.store import MANIFEST, VERSION, MaskEntry, StoreSource, open_store
from forge_data.sources.store_writer import SHARD_TOKENS, StoreWriter, dtype_for
from forge_data.storage.workspace import locked
from forge_data.tokenizers.control import identity_of

SMALLEST_PART, LARGEST_PART = 4 << 20, 128 << 20
"""Bytes of input per part: small parts spread well over workers; large ones limit the number of parts to thousands."""
MANY_PARTS = 4096
PROCESSES_FROM = 16 << 20
"""Bytes from which processes tokenize instead of threads. Threads share the interpreter's lock, but a process takes a third of
a second to start."""
RENDERING = 8
"""Conversations take about this many times as long as text, because templates are rendered in Python. So their parts are smaller,
and processes encode them from fewer bytes on."""
_PORTION = 1 << 22
STOPLESS = (
    "a model trained on them would not learn to stop; set data.tokenizer.eos to the token with which the template ends an "
    "answer, such as '<|im_end|>', so that generation stops there too, or list it in `stop` of the source"
)
Work = Callable[[int], Done]


def prepared(texts: Texts, context: SourceContext, name: str, eos: int | None = None) -> StoreSource:
    """Opens the store of these documents in the workspace; writes it first if it does not exist.

    Args:
        texts: the documents.
        context: has workspace, tokenizer and workers.
        name: name of the source, for messages and the directory.
        eos: for records of ids: the id appended to every document that does not end with it.

    Raises:
        DataError: there is no tokenizer or no text, or the workspace is not writable.
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
    store.document_name = partial(_document_name, texts, tokenizer)
    return store


def _document_name(texts: Texts, tokenizer: Tokenizer | None, number: int) -> str:
    """Returns the name of a document, usually its file and offset, for messages. It reads all documents before it."""
    if isinstance(texts, Records) and texts.wanted.reader == conversations.READER:
        assert tokenizer is not None, "conversations need a tokenizer"
        skips = Skips(texts.skip)
        parts = texts.parts(LARGEST_PART)
        made = (each for part in parts for each in conversations.encoded(part, texts.wanted, tokenizer, skips))
        documents = ((name, "") for name, own in made for _ in own)
    elif isinstance(texts, Records):
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
    """Writes the store `path`. After a kill, a second call continues with the unfinished parts.

    Args:
        texts: the documents.
        tokenizer: may be None for records that hold ids.
        path: path of the new store.
        source: origin of the documents, for the manifest.
        workers: number of parallel workers, by default one per core; the store does not depend on it.
        report: called with progress messages.
        shard_tokens: tokens per shard of the store.
        eos: see `prepared`.
        processes: whether workers are processes; by default for large corpora.
        request: options of the command, stored in the manifest.

    Raises:
        DataError: there are no documents, too many records are broken, or the directory is not writable.
    """
    workers = workers or usable_cores()
    job = _job(texts, tokenizer, eos)
    directory = _work_directory(path, texts, job, tokenizer)
    what = f"tokenizing {source}" if not job.wanted.ids else f"copying {source}"
    todo = [number for number in range(len(job.parts)) if finished(directory, number) is None]
    if len(todo) < len(job.parts):
        report(f"{what}: {len(job.parts) - len(todo)} of {len(job.parts)} parts are already finished")
    progress = ProgressMeter(what, sum(job.parts[number].size for number in todo), "bytes of input", report)
    with _crew(texts, tokenizer, directory, job, workers, processes, todo) as (work, stop):
        run_parts(work, todo, workers, stop, lambda number: progress.advance(job.parts[number].size))
        parts = [finished(directory, number) for number in range(len(job.parts))]
        skipped = _skipped(parts, job.skip, path, report)
        mask = _mask(job, [part for part in parts if part is not None], source)
        note = f"{source}, {skipped} broken records left out" if skipped else source
        with StoreWriter(
            path, dtype=job.dtype, tokenizer=tokenizer, source=note, shard_tokens=shard_tokens, request=request, mask=mask
        ) as writer:
            for number in range(len(job.parts)):
                for portion in _content(directory, job, number, work):
                    writer.add(*portion)
            manifest = writer.commit()
    for left in path.parent.glob(f"{escape(path.name)}.parts-*"):  # parts of this job and of abandoned jobs
        shutil.rmtree(left, ignore_errors=True)
    rate = manifest.tokens / progress.seconds / 1e6
    trained = "" if manifest.mask is None else trained_text(manifest.mask, manifest.tokens)
    report(
        f"{what}: {manifest.documents} documents, {manifest.tokens} tokens{trained} in {progress.seconds:.1f} s "
        f"({rate:.2f} M/s) to {path}"
    )
    return StoreSource(path)


def part_size(size: int) -> int:
    """Returns the bytes of input per part of a corpus of `size` bytes."""
    return min(max(size // MANY_PARTS, SMALLEST_PART), LARGEST_PART)


def _job(texts: Texts, tokenizer: Tokenizer | None, eos: int | None) -> PreparationJob:
    records = texts if isinstance(texts, Records) else None
    vocabulary = tokenizer.vocab_size if tokenizer else None
    return PreparationJob(
        parts=tuple(records.parts(part_size(records.bytes) // _slower(records.wanted)))
        if records
        else (CorpusPart((), 0, 0, 0),),
        wanted=records.wanted if records else Wanted("text"),
        dtype=dtype_for(vocabulary or 1 << 32),
        eos=eos,
        tokenizer_eos=tokenizer.eos if tokenizer else None,
        add_special_tokens=tokenizer is not None and bool(tokenizer.prefix or tokenizer.suffix),
        vocab_size=vocabulary,
        skip=records.skip if records else 0,
    )


def _slower(wanted: Wanted) -> int:
    """Returns how many times as long as text the records take."""
    return RENDERING if wanted.reader == conversations.READER else 1


def _holds_ids(texts: Texts) -> bool:
    return isinstance(texts, Records) and texts.wanted.ids


def _made_with(texts: Texts, tokenizer: Tokenizer) -> str:
    """Returns the identity of the tokenizer for the store's key; records of ids are only copied."""
    return tokenizer.fingerprint if _holds_ids(texts) else identity_of(tokenizer)


def _work_directory(path: Path, texts: Texts, job: PreparationJob, tokenizer: Tokenizer | None) -> Path:
    """Creates the directory of this job's parts; its name depends on corpus, parts and tokenizer."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} exists and is not empty; choose another directory or remove it")
    made_with = _made_with(texts, tokenizer) if tokenizer else ""
    # The fingerprint covers the content of the files, so the key leaves out their times.
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
    job: PreparationJob,
    workers: int,
    wanted: bool | None,
    todo: list[int],
) -> AbstractContextManager[tuple[Work, Callable[[], None]]]:
    if not isinstance(texts, Records):
        return _alone(texts, tokenizer, directory, job)
    size = sum(job.parts[number].size for number in todo) * _slower(job.wanted)
    large = len(todo) > 1 and workers > 1 and size >= PROCESSES_FROM
    if (large if wanted is None else wanted) and todo and _restorable(tokenizer, job):
        return process_workers(directory, min(workers, len(todo)))
    return thread_workers(directory, job, None if job.wanted.ids else tokenizer)


@contextmanager
def _alone(
    texts: Texts, tokenizer: Tokenizer | None, directory: Path, job: PreparationJob
) -> Iterator[tuple[Work, Callable[[], None]]]:
    """Tokenizes documents without parts as a single part in this process."""
    assert tokenizer is not None
    yield lambda number: write_part(directory, number, job.dtype, encode_documents(texts, tokenizer), Skips()), lambda: None


def _restorable(tokenizer: Tokenizer | None, job: PreparationJob) -> bool:
    """Whether another process can restore the same tokenizer; tokenizers of plugins cannot be restored."""
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


def trained_text(mask: MaskEntry, tokens: int) -> str:
    """Returns what is trained, for messages."""
    if mask.labels:
        counted = zip(mask.labels, mask.documents, strict=True)
        return f" ({', '.join(f'{count} {name}' for name, count in counted)})"
    share = f", {mask.trained / tokens:.1%} of them trained"
    return f"{share} ({mask.turns} turns, {mask.ended} of which end with a stop token)"


def _mask(job: PreparationJob, parts: list[Done], source: str) -> MaskEntry | None:
    """Returns what the store says about its loss mask, or None for documents without one.

    Raises:
        DataError: no trained turn ends with a stop token.
    """
    if job.wanted.reader == labeled.READER:
        return MaskEntry("labels", labels=tuple(job.wanted.options["labels"]))
    settings = conversations.settings_of(job.wanted)
    if settings is None:
        return None
    turns, ended = sum(part.turns for part in parts), sum(part.ended for part in parts)
    if turns and not ended:
        raise DataError(f"source {source!r}: none of {turns} trained turns ends with a stop token; {STOPLESS}")
    stops = {str(index): [0, 0] for index in settings.stops}
    return MaskEntry("pairs" if settings.pairs else "rows", turns=turns, ended=ended, stops=stops, pad=settings.pad)


def _content(
    directory: Path, job: PreparationJob, number: int, work: Work
) -> Iterator[tuple[np.ndarray, np.ndarray, int | None, np.ndarray | None]]:
    """Yields the documents of a part in portions; a part that was damaged by a system crash is done again."""
    done = finished(directory, number)
    content = content_of(directory, number, job.dtype, done) if done else None
    if done is None or content is None:
        done = work(number)
        content = content_of(directory, number, job.dtype, done)
        if content is None:
            raise DataError(f"files in {directory} differ from what was just written to them; choose another disk")
    ids, ends, learned = content[0], content[1].astype(np.int64), content[2]
    text_bytes = done.text_bytes
    begin = start = 0
    while begin < len(ends):
        until = max(begin + 1, int(np.searchsorted(ends, start + _PORTION, side="right")))
        stop = int(ends[until - 1])
        yield ids[start:stop], ends[begin:until] - start, text_bytes, None if learned is None else learned[start:stop]
        begin, start = until, stop
        text_bytes = None if text_bytes is None else 0


def run_parts(
    work: Work, numbers: Sequence[int], workers: int, stop: Callable[[], None], on_finished: Callable[[int], None]
) -> None:
    """Processes parts in parallel.

    Args:
        work: processes one part.
        numbers: numbers of the parts.
        workers: number of parallel parts.
        stop: called when a part fails, to end the parts in progress.
        on_finished: called in this thread with the number of each finished part.

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
def thread_workers(
    directory: Path, job: PreparationJob, tokenizer: Tokenizer | None
) -> Iterator[tuple[Work, Callable[[], None]]]:
    """Yields the work function for threads of this process; most encoders release the interpreter's lock."""
    yield lambda number: tokenize_part(directory, job, number, tokenizer), lambda: None


@contextmanager
def process_workers(directory: Path, workers: int) -> Iterator[tuple[Work, Callable[[], None]]]:
    """Yields the work function for worker processes, and ends them on exit."""
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
    # One thread per process, because there is a process per core.
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "forge_data.preparation.job", str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # the process has already ended
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
    except (BrokenPipeError, ValueError):  # the process has ended, or `stop` has killed it
        line = ""
    if not line:
        code = process.poll()
        raise DataError(
            f"a worker ended (exit code {code}) while it tokenized part {number}; perhaps memory ran out. "
            "Run the command again (finished parts are kept)"
        )
    answer = json.loads(line)
    if "error" in answer:
        raise DataError(answer["error"])
    return Done(**answer["done"])
