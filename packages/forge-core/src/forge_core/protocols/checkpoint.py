"""What live state and a checkpoint agree on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The box of one global tensor that lives on this rank.

    Attributes:
        name: global name, unique in the checkpoint, such as `model/blocks.0.attention.q.weight`.
        shape: of the global tensor.
        offset: of the box, one entry per dimension.
        local: the live tensor, a plain one shaped as the box; saving reads it, loading fills it.
        owned: this rank writes the box. Every element of the global tensor is owned by exactly one rank.
        frozen: it is expected to be what it was at the save before: where it is, it is not written again. A hint: bytes decide.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: "Tensor"
    owned: bool
    frozen: bool = False


class World(Protocol):
    """The few collectives that a checkpoint needs; bytes travel as tensors, never as pickled objects."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order, on every rank."""
        ...

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's payload on every rank."""
        ...


class Store(Protocol):
    """Where checkpoint files live. Paths are relative, with `/`; a directory appears whole by `rename`."""

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Writes a new file and returns when it and its directory entry are durable.

        `chunks` that can be iterated again (a list, not a generator) let the store start the file anew after a
        transient fault. A chunk is of use until the next one is asked for, when its memory is written again: a store
        that needs one for longer copies it.
        """
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file; follows no link out of the store.

        Raises:
            FileNotFoundError: the file does not exist.
            CheckpointError: it is not a regular file, or ends before `offset + length`.
        """
        ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (writable bytes) from a file; raises as `read` does."""
        ...

    def size(self, path: str) -> int:
        """Length of a file in bytes; raises as `read` does."""
        ...

    def free(self) -> int | None:
        """Bytes that may still be written; None when the store cannot tell."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomically gives a file or directory its final name, durably; replaces a file, never a directory."""
        ...

    def list(self, path: str = "") -> Sequence[str]:
        """Names inside a directory, sorted; empty when it does not exist."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file or a whole directory; a missing one is not an error."""
        ...


@runtime_checkable
class LinkingStore(Store, Protocol):
    """What a `Store` offers too that can give one file two names, each of which keeps its bytes when the other is removed."""

    def link(self, source: str, target: str) -> bool:
        """Gives the file `source` the further name `target`, durably; False where it cannot be: the caller writes it then."""
        ...
