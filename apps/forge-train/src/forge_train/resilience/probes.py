"""Small pieces of work with a known result, by which a machine shows that it still computes, writes and has memory."""

import errno
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from forge_ckpt.resilience.restarts import FAULTY
from forge_core.durable_files import write_file
from forge_core.errors import ForgeError

_ROWS = 256
_COPIED = 1 << 20
_WRITTEN = 1 << 18
_ATTEMPTS, _PAUSE = 3, 0.5
"""A network file system may fail once: the write is repeated, after longer pauses."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class MachineFault(ForgeError):
    """What this rank runs on has failed a probe."""

    exit_code = FAULTY


def device_probe(device: torch.device) -> Callable[[], str]:
    """A function that says what is wrong with the device; empty where nothing is.

    It multiplies matrices of small whole numbers, whose product is exact in every format, and copies a mebibyte there and back.
    The host waits for it.
    """
    row = torch.arange(_ROWS * _ROWS).reshape(_ROWS, _ROWS)
    left, right = row % 7 - 3, row % 5 - 2
    expected, pattern = (left @ right).float(), torch.arange(_COPIED // 4, dtype=torch.int32)
    there = left.float().to(device), right.float().to(device)

    def probe() -> str:
        try:
            product, copied = (there[0] @ there[1]).cpu(), pattern.to(device).cpu()
        except Exception as cause:  # noqa: BLE001 (a broken device may raise anything)
            return f"the device fails: {_first(cause)}"
        if not torch.equal(product, expected):
            return f"the device multiplies wrong: {int((product != expected).sum())} of {expected.numel()} numbers differ"
        return "" if torch.equal(copied, pattern) else "the device gives back other bytes than it was given"

    return probe


def disk_probe(path: Path, number: int) -> tuple[str, bool]:
    """Writes a file of a quarter of a mebibyte, flushes it, reads it back and removes it: what is wrong, if anything, and whether
    that is only that the disk is full.

    Args:
        number: the content depends on it.
    """
    content = (number % 2**32).to_bytes(4, "little") * (_WRITTEN // 4)
    cause = None
    try:
        for attempt in range(_ATTEMPTS):
            time.sleep(attempt * _PAUSE)
            try:
                write_file(path, content)
                return ("" if path.read_bytes() == content else f"{path} has other bytes than were written"), False
            except OSError as failure:
                cause = failure
                if failure.errno in _FULL:
                    break
    finally:
        with suppress(OSError):
            path.unlink()
    assert cause is not None, "every attempt failed"
    return f"{path} cannot be written: {cause.strerror or cause}", cause.errno in _FULL


def collective_probe(rank: int, size: int, device: torch.device, all_reduce: Callable[[Any], Any]) -> Callable[[], str]:
    """A function that says what is wrong with a sum of whole numbers over all ranks, which is exact. Calling it is collective."""
    pattern = torch.arange(_COPIED // 8, dtype=torch.float64, device=device) % 1000
    expected = (pattern * (size * (size + 1) // 2)).cpu()

    def probe() -> str:
        found = all_reduce(pattern * (rank + 1)).cpu()
        wrong = int((found != expected).sum())
        return f"a sum over all ranks is wrong in {wrong} of {expected.numel()} numbers" if wrong else ""

    return probe


def _first(cause: Exception) -> str:
    return (str(cause).splitlines() or [type(cause).__name__])[0]
