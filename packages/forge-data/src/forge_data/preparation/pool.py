"""Workers that tokenize the parts of a job: threads of this process, or separate processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.preparation.parts import Done, Job, tokenize_part

Work = Callable[[int], Done]


def run_parts(
    work: Work, numbers: Sequence[int], workers: int, stop: Callable[[], None], finished: Callable[[int], None]
) -> None:
    """Does parts `numbers`, `workers` at a time.

    Args:
        work: does one part.
        numbers: of the parts.
        workers: at a time.
        stop: called when a part failed, so that those under way end soon.
        finished: called with the number of each part that is done, in this thread.

    Raises:
        DataError: of the first part that failed; those that were under way are finished or stopped.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="tokenize") as pool:
        number_of = {pool.submit(work, number): number for number in numbers}
        waiting = set(number_of)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=1.0, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                    finished(number_of[future])
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
    command = [sys.executable, "-P", "-m", "forge_data.preparation.worker", str(directory)]
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
