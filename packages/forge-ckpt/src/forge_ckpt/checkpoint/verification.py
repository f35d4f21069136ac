"""Verification of checkpoints: waits until all files are visible, and compares them with their checksums.

Network file systems cache listings, so a rank waits for files that another node has written. Then the ranks divide the bytes
of a checkpoint among themselves and compare them with the checksums of its manifest.
"""

import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from forge_ckpt.format import codec
from forge_ckpt.format.manifest import CHUNK_BYTES, Manifest
from forge_ckpt.format.names import MANIFEST, committed
from forge_ckpt.format.rank_files import checksum
from forge_ckpt.world import describe_error
from forge_core.errors import CheckpointError, Damaged
from forge_core.machine import usable_cores
from forge_core.protocols.checkpoint import Store, World

SECONDS = 60.0


class Hidden(NamedTuple):
    """A file that is missing or too short on this rank; `found` is its length here, or None if it is missing."""

    name: str
    length: int
    found: int | None


def hidden_file(
    store: Store, directory: str, files: Iterable[tuple[str, int]], absent: tuple[type[Exception], ...] = (FileNotFoundError,)
) -> Hidden | None:
    """Waits until every file of `directory` has its full length on this rank; returns the first file that has not, or None.

    Args:
        absent: exceptions of the store that mean that a file is not visible yet; others are raised.
    """
    deadline = time.monotonic() + SECONDS
    for name, length in files:
        while (found := _length(store, f"{directory}/{name}", absent)) != length:
            if time.monotonic() > deadline:
                return Hidden(name, length, found)
            time.sleep(0.05)
    return None


def _length(store: Store, path: str, absent: tuple[type[Exception], ...]) -> int | None:
    try:
        return store.size(path)
    except absent:
        return None


_THREADS = 4


def open_manifest(store: Store, directory: str) -> tuple[Manifest, bytes]:
    """Reads a checkpoint's manifest, and compares it with the directory's name and the lengths of the files; reads no tensors.

    Raises:
        Damaged: the manifest is missing or invalid, or a file is missing or has another length.
        NewerFormat: a later version wrote the manifest.
    """
    data = manifest_bytes(store, directory)
    manifest = codec.decode(data)
    named = committed([directory.rpartition("/")[2]])
    if named and named[0].step != manifest.step:
        raise Damaged(f"the manifest says step {manifest.step}, but the directory is {directory}")
    for name, length in manifest.files:
        try:
            found = store.size(f"{directory}/{name}")
        except FileNotFoundError as cause:
            raise Damaged(f"{name} is missing") from cause
        except CheckpointError as cause:
            raise Damaged(str(cause)) from cause
        if found != length:
            raise Damaged(f"{name} has {found} bytes, expected {length}")
    return manifest, data


def manifest_bytes(store: Store, directory: str) -> bytes:
    """Returns the bytes of a checkpoint's manifest.

    Raises:
        Damaged: the manifest is missing, too long, or not a regular file.
    """
    try:
        size = store.size(f"{directory}/{MANIFEST}")
        if size > codec.MAX_BYTES:
            raise Damaged(f"{MANIFEST} has {size} bytes; at most {codec.MAX_BYTES} are read")
        return store.read(f"{directory}/{MANIFEST}", 0, size)
    except FileNotFoundError as cause:
        raise Damaged(f"{MANIFEST} is missing") from cause
    except Damaged:
        raise
    except CheckpointError as cause:  # a link or a pipe, which the store does not open
        raise Damaged(str(cause)) from cause


def first_fault(store: Store, directory: str, manifest: Manifest, pieces: np.ndarray) -> str | None:
    """Reads the given pieces; returns a message about the first damaged one, or None."""
    workers = min(_THREADS, usable_cores(), len(pieces))
    if workers < 1:
        return None
    size = manifest.pieces.length[pieces]
    parts = _even_parts(size, workers)
    with ThreadPoolExecutor(workers) as pool:  # reading and hashing release the interpreter lock
        faults = list(pool.map(lambda part: _fault_in(store, directory, manifest, pieces[part]), parts))
    return next((fault for fault in faults if fault), None)


def _fault_in(store: Store, directory: str, manifest: Manifest, pieces: np.ndarray) -> str | None:
    columns = manifest.pieces
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max([1, *columns.length[pieces].tolist()]))))
    for piece in pieces.tolist():
        name = manifest.files[int(columns.file[piece])][0]
        start, length = int(columns.start[piece]), int(columns.length[piece])
        try:
            found = checksum(store, f"{directory}/{name}", start, length, buffer)
        except FileNotFoundError:
            return f"{name} is missing"
        except CheckpointError as cause:
            return str(cause)
        if found != columns.checksum[16 * piece : 16 * piece + 16]:
            tensor = manifest.tensors[int(columns.tensor[piece])].name
            return f"{name}, bytes {start} to {start + length} ({tensor}): checksum mismatch"
    return None


def agreed_fault(store: Store, directory: str, manifest: Manifest, world: World, tensors: np.ndarray | None = None) -> str | None:
    """Collective: returns the first fault that any rank finds, on all ranks, or None. Every rank reads its share of the bytes.

    Args:
        tensors: verifies only pieces of these tensors, the same on every rank; None verifies all.

    Raises:
        CheckpointError: a rank could not read its share; this does not prove damage.
    """
    pieces = np.arange(len(manifest.pieces))
    if tensors is not None:
        pieces = pieces[np.isin(manifest.pieces.tensor, tensors)]
    share = pieces[_even_parts(manifest.pieces.length[pieces], world.size)[world.rank]]
    verdict: dict[str, str | None]
    try:
        verdict = {"fault": first_fault(store, directory, manifest, share), "error": None}
    except Exception as cause:  # noqa: BLE001 (stores are plugins and may raise anything; every rank must learn of it)
        verdict = {"fault": None, "error": describe_error(cause)}
    verdicts = [json.loads(payload) for payload in world.all_gather(json.dumps(verdict).encode())]
    for rank, found in enumerate(verdicts):
        if found["error"]:
            raise CheckpointError(f"{directory} cannot be read on rank {rank}: {found['error']}")
    return next((found["fault"] for found in verdicts if found["fault"]), None)


def _even_parts(length: np.ndarray, parts: int) -> list[np.ndarray]:
    """Splits positions into runs of about equal bytes."""
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    middle = ends - length // 2
    borders = np.searchsorted(middle, [total * part / parts for part in range(1, parts)])
    return np.split(np.arange(len(length)), borders)
