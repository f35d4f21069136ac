"""The loader workers of a training process, which requests rows of steps and waits for them.

Workers are plain `python -m forge_data.loading.worker` processes: they do not fork a process with threads or a device, need no
`__main__` guard, and do not import torch. Each opens a `WorkerRecipe`. Rows are passed in anonymous shared memory, which is not
subject to the limit of /dev/shm and is freed when the processes end. The only state of a worker is its position in streams,
which every answer returns; so a cursor covers exactly the consumed steps, however far the workers are ahead.
"""

import io
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.loading.rows import Buffers, Marks, TokenRows
from forge_data.loading.sample_order import SampleOrder
from forge_data.loading.sources import LoadSpec, OpenedSources
from forge_data.order.cursor import fingerprint_of
from forge_data.order.phases import weight_of
from forge_data.sources.store import StoreSource, open_store

_PATIENCE = 2.0
"""Seconds until a worker that does not end by itself is killed."""


@dataclass(frozen=True)
class PreparedSource:
    """Replaces a source component that has a prepared store, so that a worker only opens the store."""

    path: Path
    label: str
    weight: float
    max_epochs: float | None
    too_long: str | None

    def build(self, context: SourceContext) -> StoreSource:
        """Opens the store."""
        return open_store(self.path, context.tokenizer)


@dataclass(frozen=True)
class WorkerRecipe:
    """What a worker needs to open the data; small and picklable.

    Attributes:
        spec: spec of the run.
        fingerprint: fingerprint of the sample order; the worker must compute the same.
    """

    spec: LoadSpec
    fingerprint: str

    @classmethod
    def of(cls, order: SampleOrder, opened: OpenedSources) -> "WorkerRecipe":
        """Returns the recipe of an order whose sources are open.

        Raises:
            DataError: a worker cannot import a component.
        """
        data = order.spec.data
        components: list[Any] = list(data.sources)
        keys = zip(opened.places, opened.sources.items(), opened.max_epochs, opened.too_long, strict=True)
        for place, (label, source), most, too_long in keys:
            if isinstance(source, StoreSource):
                components[place] = PreparedSource(source.path, label, weight_of(components[place]), most, too_long)
        only_stores = all(isinstance(source, StoreSource) for source in opened.sources.values())
        tokenizer = None if only_stores else data.tokenizer
        for component in (*components, tokenizer):
            if type(component).__module__ == "__main__":
                raise DataError(
                    f"{type(component).__name__} is defined in the main script, from which a loader worker cannot import it; "
                    "move it to a module, or set data.loader_workers = 0"
                )
        own = replace(data, sources=components, tokenizer=tokenizer, evaluation={}, loader_workers=0)
        return cls(replace(order.spec, data=own), fingerprint_of(order.identity_at(None)))

    def dump(self) -> bytes:
        """Returns the first message to a worker: `sys.path`, the files of components that are named by file, with the
        content that this process ran, and the recipe.

        Raises:
            DataError: the recipe cannot be pickled.
        """
        components = (*self.spec.data.sources, self.spec.data.tokenizer)
        modules = {type(component).__module__ for component in components if component is not None}
        loaders: Any = {name: sys.modules[name].__loader__ for name in modules if name.startswith("forge_file_")}
        files = {name: (Path(loader.path), loader.content) for name, loader in loaders.items()}
        content = io.BytesIO()
        pickle.dump((sys.path, files), content)
        try:
            pickle.dump(self, content)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(f"the data cannot be sent to a loader worker ({error}); set data.loader_workers = 0") from error
        return content.getvalue()


@dataclass
class _Worker:
    """One worker process and its sockets."""

    number: int
    process: "subprocess.Popen[bytes]"
    messages: "Connection[Any, Any]"
    memory: socket.socket


class WorkerPool:
    """Workers that build the rows of one rank; a context manager that ends them.

    The workers take turns: each builds whole steps. Streams are read sequentially, so they require a single worker.
    """

    def __init__(
        self,
        recipe: WorkerRecipe,
        workers: int,
        start: tuple[int, Mapping[str, Any]],
        report: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            recipe: the data to open.
            workers: number of workers; 1 with streams.
            start: the first step, and the positions of the streams before it.
            report: called with messages of sources.
        """
        self._report = report
        self._marks: Marks = recipe.spec.marks
        self._count = workers
        self._buffers = Buffers(self._share)
        self._slots: dict[int, int] = {}
        self._made = 0
        self._asked: deque[tuple[TokenRows, _Worker]] = deque()
        self._recipe, self._start = recipe, start
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        content = self._recipe.dump()
        try:
            self._workers = [_start(number) for number in range(self._count)]
            for worker in self._workers:
                worker.messages.send_bytes(content)
            for worker in self._workers:
                if self._receive(worker) != self._recipe.fingerprint:
                    raise DataError("a loader worker opened different data: files changed since the run opened them; start again")
                worker.messages.send(("seek", *self._start))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ask(self, step: int, first: int, count: int, length: int) -> None:
        """Requests rows [first, first + count) of a step's global batch."""
        size = TokenRows.size_of(count, length, self._marks)
        self._buffers.drop_others((size,))
        memory = self._buffers.take((size,), np.uint8)
        worker = self._workers[step % self._count]
        self._send(worker, ("fill", self._slots[id(memory)], count, length, step, first, first + count))
        self._asked.append((TokenRows(memory, count, length, self._marks), worker))

    def collect(self) -> tuple[TokenRows, dict[str, dict[str, Any]]]:
        """Waits for the oldest request; returns its rows and the positions of the streams after them.

        Raises:
            DataError: a worker refused its data; the message ends with the worker's traceback.
            RuntimeError: a worker raised another error, or died.
        """
        rows, worker = self._asked.popleft()
        return rows, self._receive(worker)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.messages.close()
            worker.memory.close()
        for worker in self._workers:
            try:
                worker.process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self._workers = []

    def _share(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Returns new anonymous memory that every worker also maps."""
        descriptor = _anonymous()
        try:
            os.ftruncate(descriptor, shape[0])
            array = np.frombuffer(mmap.mmap(descriptor, shape[0]), dtype=dtype)
            self._made += 1
            self._slots = {key: slot for key, slot in self._slots.items() if key in self._buffers.held()}
            self._slots[id(array)] = self._made
            for worker in self._workers:
                self._send(worker, ("map", self._made, shape[0], frozenset(self._slots.values())))
                socket.send_fds(worker.memory, [b"m"], [descriptor])
        finally:
            os.close(descriptor)
        return array

    def _send(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        try:
            worker.messages.send(message)
        except (BrokenPipeError, ConnectionResetError):
            while True:  # reads the remaining answers until one raises the worker's error, or the connection ends
                self._receive(worker)

    def _receive(self, worker: _Worker) -> Any:
        try:
            while (received := worker.messages.recv())[0] == "said":
                if self._report is not None:
                    self._report(received[1])
        except (EOFError, ConnectionResetError) as error:
            worker.process.wait()
            code = worker.process.returncode
            raise RuntimeError(f"loader worker {worker.number} {ended_how(code)}") from error
        kind, content, trace = received
        if kind == "ok":
            return content
        text = f"{content}\n\nraised in loader worker {worker.number}:\n{trace}"
        raise DataError(text) if kind == "refused" else RuntimeError(text)


def ended_how(code: int) -> str:
    """Returns the meaning of the exit code of a worker that died, for messages."""
    if code == -signal.SIGBUS:
        return f"was killed by signal {-code} (SIGBUS): a mapped file was truncated while it was read; restore the file"
    return f"was killed by signal {-code}, perhaps because memory ran out" if code < 0 else f"ended with code {code}"


def _start(number: int) -> _Worker:
    ours, theirs = socket.socketpair()
    memory, their_memory = socket.socketpair()
    with theirs, their_memory:
        passed = (theirs.fileno(), their_memory.fileno())
        process = subprocess.Popen(
            [sys.executable, "-m", "forge_data.loading.worker", *(str(descriptor) for descriptor in passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(_first_paths())},
        )
    return _Worker(number, process, Connection(ours.detach()), memory)


def _first_paths() -> Iterable[str]:
    """Returns the paths on which the worker finds this package; the first message contains the whole sys.path."""
    return (path for path in sys.path if path)


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("forge-data")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
