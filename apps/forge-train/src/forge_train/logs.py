"""A log file per rank, with time stamps; warnings and errors of every rank are kept, not only those of rank 0."""

import logging
import logging.handlers
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NEVER = logging.CRITICAL + 1


class RunLog:
    """Records of one rank: held in memory until the run owns its directory, then in a file of it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.logger = logging.getLogger("forge")
        self.held = logging.handlers.MemoryHandler(sys.maxsize, flushLevel=_NEVER, flushOnClose=False)
        self.handlers: list[logging.Handler] = [self.held]

    @property
    def is_open(self) -> bool:
        """Whether there is a file."""
        return self.held not in self.handlers

    def open(self, directory: Path) -> None:
        """Begins `logs/rank-00000.log`, or goes on with it, with what was said until now.

        Raises:
            OSError: it cannot be written.
        """
        folder = directory / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / f"rank-{self.rank:05d}.log")
        layout = logging.Formatter(
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


@contextmanager
def logging_of(rank: int, size: int) -> Iterator[RunLog]:
    """Inside, `logging` and `warnings` go to the run's log; warnings reach the terminal too."""
    log = RunLog(rank, size)
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(logging.WARNING)
    terminal.setFormatter(
        logging.Formatter(f"rank {rank}: %(levelname)s: %(message)s" if size > 1 else "%(levelname)s: %(message)s")
    )
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
