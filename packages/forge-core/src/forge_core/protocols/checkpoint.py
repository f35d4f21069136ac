"""Interfaces between live state and checkpoints."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The box of one global tensor on this rank.

    Attributes:
        name: global name, unique in the checkpoint, such as `model/blocks.0.attention.q.weight`.
        shape: shape of the global tensor.
        offset: offset of the box, one entry per dimension.
        local: the live tensor, a plain tensor with the shape of the box; saving reads it, loading fills it.
        owned: whether this rank writes the box. Every element of the global tensor is owned by exactly one rank.
        frozen: a hint that the values have not changed since the previous save. If their bytes are equal, they are not written
            again.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: "Tensor"
    owned: bool
    frozen: bool = False


class World(Protocol):
    """The collectives that checkpoints need. Bytes are sent as tensors, never as pickled objects."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective: returns the payloads of all ranks, in rank order."""
        ...

    def gather(self, payload: bytes) -> list[bytes]:
        """Collective: returns the payloads of all ranks, in rank order, on rank 0, and an empty list on the others."""
        ...

    def broadcast(self, payload: bytes | None) -> bytes:
        """Collective: returns the payload of rank 0."""
        ...


class Store(Protocol):
    """A storage of checkpoint files. Paths are relative, with `/`; a directory becomes visible as a whole by `rename`."""

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Writes a new file; returns when the file and its directory entry are durable.

        If `chunks` can be iterated again (a list, not a generator), the store can restart the file after a transient error. The
        memory of a chunk is reused for the next one, so a store that needs a chunk for longer must copy it.
        """
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Returns bytes of a file; does not follow links out of the store.

        Raises:
            FileNotFoundError: the file does not exist.
            CheckpointError: the file is not a regular file, or ends before `offset + length`.
        """
        ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (writable bytes) from a file; raises the errors of `read`."""
        ...

    def size(self, path: str) -> int:
        """Returns the length of a file in bytes; raises the errors of `read`."""
        ...

    def free(self) -> int | None:
        """Returns the free space in bytes, or None if the store does not report it."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Renames a file or directory atomically and durably; replaces a file, but never a directory."""
        ...

    def list(self, path: str = "") -> Sequence[str]:
        """Returns the names in a directory, sorted; empty if it does not exist."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file or a whole directory; does nothing if it does not exist."""
        ...


@runtime_checkable
class LinkingStore(Store, Protocol):
    """A `Store` with hard links: a file can have two names, and each keeps its content if the other is removed."""

    def link(self, source: str, target: str) -> bool:
        """Adds the name `target` to the file `source`, durably. Returns False if it cannot; the caller then writes the file."""
        ...
