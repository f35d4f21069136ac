"""A log file per rank, with time stamps; warnings and errors of every rank are kept, not only those of rank 0."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def logging_to(directory: Path, rank: int, size: int) -> Iterator[logging.Logger]:
    """Inside, `logging` and `warnings` write to `logs/rank-00000.log`; warnings reach the terminal too."""
    folder = directory / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    layout = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ rank {rank}/{size} %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    layout.converter = time.gmtime
    file = logging.FileHandler(folder / f"rank-{rank:05d}.log")
    file.setFormatter(layout)
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(logging.WARNING)
    terminal.setFormatter(
        logging.Formatter(f"rank {rank}: %(levelname)s: %(message)s" if size > 1 else "%(levelname)s: %(message)s")
    )
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for handler in (file, terminal):
        root.addHandler(handler)
    try:
        yield logging.getLogger("forge")
    finally:
        logging.captureWarnings(False)
        root.setLevel(before)
        for handler in (file, terminal):
            root.removeHandler(handler)
            handler.close()
