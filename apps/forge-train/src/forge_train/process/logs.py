"""Log files: one per rank, with time stamps."""

import logging
import logging.handlers
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forge_core.errors import ForgeError
from forge_core.redaction import redacted_text
from forge_core.terminal import Console

_NEVER = logging.CRITICAL + 1


class RunLog:
    """The log of one rank: kept in memory until the run owns its directory, then written to a file there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.logger = logging.getLogger("forge")
        self.held = logging.handlers.MemoryHandler(sys.maxsize, flushLevel=_NEVER, flushOnClose=False)
        self.handlers: list[logging.Handler] = [self.held]

    @property
    def is_open(self) -> bool:
        """True if the log is written to a file."""
        return self.held not in self.handlers

    def say(self, refusal: ForgeError) -> None:
        """Logs a refusal if the log file is open; otherwise prints it on the terminal."""
        if self.is_open:
            self.logger.error("%s", refusal)
        else:
            Console().error(refusal)

    def open(self, directory: Path) -> Path:
        """Opens `logs/rank-00000.log` for appending, writes the records kept in memory, and returns its path.

        Raises:
            OSError: the file cannot be written.
        """
        folder = directory / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.rank:05d}.log"
        file = _File(path)
        layout = _Redacted(
            f"%(asctime)s.%(msecs)03dZ rank {self.rank}/{self.size} %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        layout.converter = time.gmtime
        file.setFormatter(layout)
        self.held.setTarget(file)
        self.held.flush()
        root = logging.getLogger()
        root.addHandler(file)
        root.removeHandler(self.held)
        self.handlers[self.handlers.index(self.held)] = file
        return path


class _Redacted(logging.Formatter):
    """Removes secrets from all messages and tracebacks, also those of libraries, which may show URLs with credentials."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted_text(super().format(record))


class _File(logging.FileHandler):
    """A log file. If it cannot be written, for example on a full disk, it prints one warning and the run continues."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name of the library)
        cause = sys.exc_info()[1]
        if not isinstance(cause, OSError):
            super().handleError(record)
        elif not self.failed:
            self.failed = True
            print(f"WARNING: the log {self.baseFilename} cannot be written: {cause.strerror}; the run continues", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # raised by the flush; the file is closed anyway
            super().close()


@contextmanager
def logging_of(rank: int, size: int) -> Iterator[RunLog]:
    """Sends `logging` and `warnings` to the run's log inside the `with` block; warnings also go to the terminal."""
    log = RunLog(rank, size)
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(logging.WARNING)
    terminal.setFormatter(_Redacted(f"rank {rank}: %(levelname)s: %(message)s" if size > 1 else "%(levelname)s: %(message)s"))
    log.handlers.append(terminal)
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for handler in log.handlers:
        root.addHandler(handler)
    try:
        yield log
    finally:
        logging.captureWarnings(False)
        root.setLevel(before)
        for handler in log.handlers:
            root.removeHandler(handler)
            handler.close()
