"""A `Source` that reads token files of any format in place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_data.storage.checksums import TOKEN_BLOCK, TOKEN_BLOCKS, sampled_ranges
from forge_data.storage.document_ends import Documents
from forge_data.storage.shards import Shards

SCANNED = 1 << 26
"""Tokens of the largest local corpus that is read completely when it is opened, to find its largest id. Of larger and remote
corpora, only samples are read."""
_PART = 1 << 22


@dataclass(frozen=True)
class TokenFilesInfo:
    """Further properties of token files; `data inspect` shows them."""

    format: str
    documents: int | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None
    more: dict[str, object] = field(default_factory=dict)
    joins: Callable[[], bool] | None = None
    """Whether documents have several sequences, which are joined; None if the format has no sequences."""


class TokenFiles:
    """Tokens and documents of some files as a `Source`.

    Attributes:
        seen_id: largest id that was read when the corpus was opened.
        max_id: the same if the whole corpus was read, else None.
        described: further properties of the files.
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
        """Reads samples of the ids, or all of them.

        Args:
            name: name for messages.
            shards: the tokens.
            documents: the document borders.
            described: further properties of the files.
            identity: identifies the document borders in the fingerprint.
            check: reads the whole document index and returns its faults, with file and offset.

        Raises:
            DataError: there are no tokens, an id is negative, or an id exceeds the stated vocabulary; the message has file
                and offset.
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
        """Returns token ids [start, stop)."""
        return self.shards.read(start, stop)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns (N, length) token ids: one window from each of `starts`."""
        return self.shards.windows(starts, length)

    def ends(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the document ends e with start < e <= stop."""
        return self.documents.ends(start, self.tokens if stop is None else min(stop, self.tokens))

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the document ends inside many windows; see `Source.borders`."""
        return self.documents.borders(starts, length)

    @property
    def borders_checked(self) -> bool:
        """Whether all document ends used so far come from completely checked tables."""
        return self.documents.checked

    def place(self, token: int) -> str:
        """Returns file and byte offset of a token, for messages."""
        return self.shards.place(token)

    def _sampled(self, identity: str) -> tuple[str, int]:
        """Returns (fingerprint, largest id) of sizes, dtype, borders, head, tail and 64 blocks of the stream.

        The cost does not depend on the length of the stream. The fingerprint does not depend on the location of the files,
        but on how the stream is split into files.
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
                f"{self.place(token)} (token {token}): id {int(ids[token - start])} is not in a vocabulary of {self.vocab_size} "
                "ids; check the dtype"
            )
        return high


def same_dtype(files: Sequence[tuple[str, np.dtype]]) -> np.dtype:
    """Returns the common dtype of all files.

    Args:
        files: (file, dtype) of each file.

    Raises:
        DataError: two files have different dtypes; the message names them.
    """
    first_name, first = files[0]
    for name, dtype in files:
        if dtype != first:
            raise DataError(f"{first_name} holds {_named(first)}, but {name} holds {_named(dtype)}; use one source per dtype")
    return first


def _named(dtype: np.dtype) -> str:
    return f"big-endian {dtype.name}" if dtype.str[0] == ">" else dtype.name


def integers(where: str, dtype: np.dtype) -> np.dtype:
    """Returns `dtype` if it is an integer dtype.

    Raises:
        DataError: it is not.
    """
    if dtype.kind not in "ui":
        raise DataError(f"{where}: token ids must be integers, found {dtype.name}")
    return dtype
