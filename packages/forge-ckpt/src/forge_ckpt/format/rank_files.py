"""The files of one rank: the table of its boxes, the bytes with their checksums, and frozen tensors that are stored once.

Names, dtypes and shapes are most of a table and usually equal on all ranks, so each distinct list (the *signature*) is sent once;
boxes and checksums are plain int64 arrays. A rank file has no header: the manifest lists its boxes in order, and the length of a
box follows from its shape and dtype.

Frozen tensors are stored once: a checkpoint links the file of the previous checkpoint (a hard link). The name of such a file is
derived from the checksums of its boxes, and its bytes are read and verified before it is linked. Needs no torch.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from forge_ckpt.format.manifest import CHUNK_BYTES, ITEMSIZE, Manifest, TensorInfo, build
from forge_ckpt.format.names import committed, frozen_file, rank_file
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import LinkingStore, Store


@dataclass(frozen=True)
class RankTable:
    """The tensors of a rank, and the boxes that it writes, in the order of their bytes.

    `tensor` indexes `tensors`; `offset` and `extent` are (pieces, D) int64; `checksum` is empty until the file is written. The
    last `frozen` boxes are in a second file.
    """

    tensors: tuple[TensorInfo, ...]
    tensor: np.ndarray
    offset: np.ndarray
    extent: np.ndarray
    checksum: bytes = b""
    frozen: int = 0

    @property
    def signature(self) -> bytes:
        return json.dumps([[info.name, info.dtype, info.shape] for info in self.tensors]).encode()

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.signature)

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())

    @property
    def frozen_bytes(self) -> int:
        return int(self.lengths[len(self.tensor) - self.frozen :].sum())

    @property
    def lengths(self) -> np.ndarray:
        """(pieces,) int64 bytes of each box."""
        itemsize = np.array([ITEMSIZE[info.dtype] for info in self.tensors], dtype=np.int64)
        return self.extent.prod(axis=1) * itemsize[self.tensor] if len(self.tensor) else np.zeros(0, dtype=np.int64)

    def files(self, rank: int) -> list[tuple[str, int]]:
        """Returns name and number of boxes of each file of this rank; requires the checksums."""
        moving = len(self.tensor) - self.frozen
        files = [(rank_file(rank), moving), (frozen_file(rank, self.checksum[16 * moving :]), self.frozen)]
        return [(name, count) for name, count in files if count]


def pack(table: RankTable, with_signature: bool) -> bytes:
    """Returns a table as bytes; without its signature if another rank sends the same one."""
    count, dims = table.offset.shape
    signature = table.signature if with_signature else b""
    head = {"digest": table.digest, "pieces": count, "dims": dims, "signature": len(signature), "frozen": table.frozen}
    columns = b"".join(array.astype("<i8").tobytes() for array in (table.tensor, table.offset, table.extent))
    return json.dumps(head).encode() + b"\n" + signature + columns + table.checksum


def unpack(payloads: Sequence[bytes]) -> list[RankTable]:
    """Returns the tables of all ranks in rank order; parses each signature once."""
    known: dict[str, tuple[TensorInfo, ...]] = {}
    rows = []
    for payload in payloads:
        line, _, rest = payload.partition(b"\n")
        head = json.loads(line)
        if head["signature"]:
            entries = json.loads(rest[: head["signature"]])
            known[head["digest"]] = tuple(TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in entries)
        rows.append((head, memoryview(rest)[head["signature"] :]))
    tables = []
    for head, rest in rows:
        count, dims = head["pieces"], head["dims"]
        numbers = np.frombuffer(rest[: 8 * count * (1 + 2 * dims)], dtype="<i8").astype(np.int64, copy=False)
        tensor, boxes = numbers[:count], numbers[count:]
        offset, extent = boxes[: count * dims].reshape(count, dims), boxes[count * dims :].reshape(count, dims)
        checksum = bytes(rest[8 * count * (1 + 2 * dims) :])
        tables.append(RankTable(known[head["digest"]], tensor, offset, extent, checksum, head["frozen"]))
    return tables


def join(tables: Sequence[RankTable], *, step: int, generation: str, meta: Mapping[str, Any]) -> Manifest:
    """Builds the manifest from the tables of all ranks; a rank that writes nothing has no file.

    Raises:
        CheckpointError: ranks disagree about a tensor, or their boxes do not cover every tensor exactly once.
    """
    tensors: dict[str, TensorInfo] = {}
    position: dict[str, int] = {}
    placed: dict[int, np.ndarray] = {}  # by identity: ranks with one signature share one tuple
    for rank, table in enumerate(tables):
        if id(table.tensors) in placed:
            continue
        for info in table.tensors:
            if tensors.setdefault(info.name, info) != info:
                raise CheckpointError(f"ranks disagree about a tensor: {tensors[info.name]} and, on rank {rank}, {info}")
            position.setdefault(info.name, len(position))
        placed[id(table.tensors)] = np.array([position[info.name] for info in table.tensors], dtype=np.int64)
    dims = max([1, *(len(info.shape) for info in tensors.values())])
    writing = [(rank, replace(table, **_padded(table, dims))) for rank, table in enumerate(tables) if len(table.tensor)]
    empty = np.zeros((0, dims), dtype=np.int64)
    tensor = np.concatenate([empty[:, 0], *(placed[id(table.tensors)][table.tensor] for _, table in writing)])
    extent = np.concatenate([empty, *(table.extent for _, table in writing)])
    files = [file for rank, table in writing for file in table.files(rank)]
    counts = [count for _, count in files]
    itemsize = np.array([ITEMSIZE[info.dtype] for info in tensors.values()], dtype=np.int64)
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(extent.prod(axis=1) * itemsize[tensor])])
    sizes = np.diff(ends[np.cumsum([0, *counts])]).tolist()
    return build(
        step=step,
        generation=generation,
        world=len(tables),
        tensors=tuple(tensors.values()),
        files=[(name, size) for (name, _), size in zip(files, sizes, strict=True)],
        tensor=tensor,
        file=np.repeat(np.arange(len(files), dtype=np.int64), counts),
        offset=np.concatenate([empty, *(table.offset for _, table in writing)]),
        extent=extent,
        checksum=b"".join(table.checksum for _, table in writing),
        meta=meta,
    )


def _padded(table: RankTable, dims: int) -> dict[str, np.ndarray]:
    if table.offset.shape[1] == dims:
        return {}
    missing = [(0, 0), (0, dims - table.offset.shape[1])]
    return {"offset": np.pad(table.offset, missing), "extent": np.pad(table.extent, missing, constant_values=1)}


class RankFile:
    """Pieces back to back. Iterating yields their bytes and computes `checksums` (xxh3_128); it can be repeated.

    Args:
        lengths: bytes of each piece.
        source: returns the bytes of all pieces in order, in chunks that do not span pieces. A chunk is valid until the next one
            is requested.
    """

    def __init__(self, lengths: Sequence[int], source: Callable[[], Generator[memoryview]]) -> None:
        self.lengths = lengths
        self.checksums: list[bytes] = []
        self._source = source

    def chunks(self) -> Generator[memoryview]:
        """Yields the bytes without computing checksums."""
        return self._source()

    def read(self) -> None:
        """Computes the checksums without writing anything."""
        for _ in self:
            pass

    def __iter__(self) -> Iterator[memoryview]:
        self.checksums = []
        with closing(self._source()) as chunks:
            for length in self.lengths:
                digest = xxhash.xxh3_128()
                while length:
                    chunk = next(chunks)
                    length -= len(chunk)  # before the yield, after which the chunk is released
                    digest.update(chunk)
                    yield chunk
                self.checksums.append(digest.digest())


def checksum(store: Store, path: str, start: int, length: int, buffer: memoryview) -> bytes:
    """Returns the xxh3_128 of a range of a file, read through `buffer`."""
    digest = xxhash.xxh3_128()
    for offset in range(0, length, len(buffer)):
        part = buffer[: min(len(buffer), length - offset)]
        store.read_into(path, start + offset, part)
        digest.update(part)
    return digest.digest()


def find_frozen(store: Store, file: RankFile | None, rank: int) -> str | None:
    """Computes the checksums of frozen pieces. Returns the path of an existing file with the same bytes, or None."""
    if file is None:
        return None
    file.read()
    if not isinstance(store, LinkingStore):
        return None
    for entry in committed(store.list())[:1]:
        path = f"{entry.name}/{_frozen_name(file, rank)}"
        try:
            return path if _holds(store, path, file) else None
        except (OSError, CheckpointError):  # another layout wrote it, the tensors have changed, or it cannot be read
            return None
    return None


def _holds(store: Store, path: str, file: RankFile) -> bool:
    """Whether a stored file has the bytes of these checksums."""
    if store.size(path) != sum(file.lengths):
        return False
    buffer, start = memoryview(bytearray(min(CHUNK_BYTES, max(file.lengths)))), 0
    for length, wanted in zip(file.lengths, file.checksums, strict=True):
        if checksum(store, path, start, length, buffer) != wanted:
            return False
        start += length
    return True


def put_frozen(store: Store, file: RankFile, before: str | None, folder: str, rank: int) -> None:
    """Stores frozen pieces in the folder of a checkpoint: links the file `before`, or else writes a new file."""
    path = f"{folder}/{_frozen_name(file, rank)}"
    if before is not None and isinstance(store, LinkingStore) and store.link(before, path):
        return
    store.write(path, file)


def _frozen_name(file: RankFile, rank: int) -> str:
    return frozen_file(rank, b"".join(file.checksums))
