"""A `Source` made of files of any format, read where they lie."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_data.storage.checksums import TOKEN_BLOCK, TOKEN_BLOCKS, sampled_ranges
from forge_data.storage.document_ends import Documents
from forge_data.storage.shards import Shards

SCANNED = 1 << 26
"""A corpus of at most this many tokens on this machine is read once when it is opened, to know the largest id; of a larger one
only samples are read."""
_PART = 1 << 22


@dataclass(frozen=True)
class TokenFilesInfo:
    """What a format says about itself beyond tokens and documents; `data inspect` shows it."""

    format: str
    documents: int | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None
    more: dict[str, object] = field(default_factory=dict)
    joins: Callable[[], bool] | None = None
    """Whether documents have several sequences, which are joined; None where the format has no sequences."""


class TokenFiles:
    """Tokens and documents of some files as a `Source`.

    Attributes:
        seen_id: the largest id that was read when the corpus was opened; `max_id` is None when that was not all of it.
        described: what the format says.
    """

    text_bytes: int | None = None

    def __init__(
        self,
        name: str,
        shards: Shards,
        documents: Documents,
        described: TokenFilesInfo,
        identity: str,
        check: Callable[[], list[str]] | None = None,
    ) -> None:
        """Reads a sample of the ids, or all of them.

        Args:
            name: for messages.
            shards: the tokens.
            documents: their borders.
            described: what the files say of themselves.
            identity: of the borders, for the fingerprint.
            check: reads the whole index of documents and says what is wrong with it, with file and offset.

        Raises:
            DataError: no token, a negative id, or one that the stated vocabulary does not have; with file and offset.
        """
        if not shards.tokens:
            raise DataError(f"{name} has no tokens")
        self.name = name
        self.shards = shards
        self.documents = documents
        self.described = described
        self.check = check
        self.tokens = shards.tokens
        self.dtype = shards.dtype
        self.vocab_size = described.vocab_size
        self.tokenizer = described.tokenizer
        self.fingerprint, self.seen_id = self._sampled(identity)
        self.max_id: int | None = None
        if self.tokens <= SCANNED and not shards.remote:
            self.max_id = self.seen_id = max(
                self._largest(start, self.read(start, min(start + _PART, self.tokens))) for start in range(0, self.tokens, _PART)
            )

    def read(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop)."""
        return self.shards.read(start, stop)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """(N, length) token ids from each of `starts` on."""
        return self.shards.windows(starts, length)

    def ends(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Document ends e with start < e <= stop."""
        return self.documents.ends(start, self.tokens if stop is None else min(stop, self.tokens))

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Document ends inside many windows; see `Source.borders`."""
        return self.documents.borders(starts, length)

    @property
    def borders_checked(self) -> bool:
        """Whether the document ends that were used so far were compared as a whole."""
        return self.documents.checked

    def place(self, token: int) -> str:
        """File and byte offset of a token, for messages."""
        return self.shards.place(token)

    def _sampled(self, identity: str) -> tuple[str, int]:
        """(fingerprint, largest id) of sizes, dtype, borders, both ends and 64 blocks of the stream: O(1) in its length.

        A corpus of one file and the same corpus elsewhere agree; one that was cut into other files does not.
        """
        digest = xxhash.xxh3_128(f"{self.tokens} {self.dtype.str} {identity}".encode())
        if len(self.shards.shards) > 1:
            digest.update(np.array(self.shards.firsts, dtype="<u8").tobytes())
        high = 0
        for start, stop in sampled_ranges(self.tokens, TOKEN_BLOCK, TOKEN_BLOCKS):
            block = self.shards.peek(start, stop)
            digest.update(block.tobytes())
            high = max(high, self._largest(start, block))
        return digest.hexdigest(), high

    def _largest(self, start: int, ids: np.ndarray) -> int:
        high = int(ids.max())
        if ids.dtype.kind == "i" and int(ids.min()) < 0:
            where = int(ids.argmin())
            raise DataError(f"{self.place(start + where)} (token {start + where}): negative token id {int(ids[where])}")
        if self.vocab_size is not None and high >= self.vocab_size:
            token = start + int(np.argmax(ids >= self.vocab_size))
            raise DataError(
                f"{self.place(token)} (token {token}): id {int(ids[token - start])} is not in a vocabulary of {self.vocab_size}; "
                "check the dtype"
            )
        return high


def same_dtype(found: Sequence[tuple[str, np.dtype]]) -> np.dtype:
    """The dtype of all shards.

    Args:
        found: (file, dtype) of each.

    Raises:
        DataError: two differ; names them.
    """
    first_name, first = found[0]
    for name, dtype in found:
        if dtype != first:
            raise DataError(f"{first_name} holds {_named(first)} and {name} {_named(dtype)}; make two sources of them")
    return first


def _named(dtype: np.dtype) -> str:
    return f"big-endian {dtype.name}" if dtype.str[0] == ">" else dtype.name


def integers(where: str, dtype: np.dtype) -> np.dtype:
    """`dtype`, if token ids can have it.

    Raises:
        DataError: they cannot.
    """
    if dtype.kind not in "ui":
        raise DataError(f"{where}: token ids are integers, found {dtype.name}")
    return dtype
