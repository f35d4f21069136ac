"""What a checkpoint does to the disk of the run's directory: write, flush, read again."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from forge_core.durable_files import write_file
from forge_train.doctor.step import Check, Settings
from forge_train.doctor.steps.build import sees_gpu

_GPU_NODE, _OTHER = 1 << 30, 1 << 25
_SLOW = 100e6


def examine_disk(settings: Settings) -> Iterator[Check]:
    """The step; files are removed again."""
    length = _GPU_NODE if sees_gpu() else _OTHER
    content = os.urandom(1 << 20) * (length >> 20)
    with tempfile.TemporaryDirectory(prefix=".forge-doctor-", dir=settings.directory) as name:
        file = Path(name) / "block"
        began = perf_counter()
        write_file(file, content)
        yield _rate("write and flush", length / (perf_counter() - began))
        _forget(file)
        began = perf_counter()
        found = file.read_bytes()
        yield _rate("read", length / (perf_counter() - began))
    if found == content:
        yield Check("content", "PASS", "as it was written")
    else:
        yield Check("content", "FAIL", "not what was written", remedy="do not train here: look at dmesg for I/O errors")


def _rate(name: str, rate: float) -> Check:
    slow = rate < _SLOW
    remedy = (
        "saves and resumes will take long: point job.dir (here: --directory) at a local or a parallel file system" if slow else ""
    )
    return Check(name, "SLOW" if slow else "PASS", rate / 1e6, "MB/s", f"{_SLOW / 1e6:.0f} MB/s at least", remedy, "higher")


def _forget(file: Path) -> None:
    """Asks the system to drop the file from memory, so that it is read from the disk."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
