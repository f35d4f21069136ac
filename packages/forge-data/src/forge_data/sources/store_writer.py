"""Writes a token store: streaming, in bounded memory, atomically.

All files are written to a temporary directory next to the target and flushed to disk; the directory is renamed last.
"""

import io
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_core.files import publish, sync, sync_path, write_file
from forge_core.protocols.data import Tokenizer
from forge_data.sources.store import (
    COUNTS,
    DTYPES,
    MANIFEST,
    TOKENIZER,
    FileEntry,
    MaskEntry,
    ShardEntry,
    StoreManifest,
    TokenizerEntry,
)
from forge_data.storage.workspace import Partial

SHARD_TOKENS = 1 << 27


def dtype_for(vocab_size: int) -> str:
    """Returns the smallest stored dtype that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class StoreWriter:
    """Writes one store. Use it as a context manager; without `commit`, the unfinished store is removed on exit."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: str,
        tokenizer: Tokenizer | None = None,
        source: str = "",
        shard_tokens: int = SHARD_TOKENS,
        request: dict[str, str] | None = None,
        mask: MaskEntry | None = None,
    ) -> None:
        """Creates the unfinished store. If `path` exists, it must be an empty directory.

        Args:
            path: path of the store.
            dtype: dtype of the stored ids.
            tokenizer: tokenizer of the ids; the store gets a copy.
            source: origin of the documents.
            shard_tokens: tokens per shard.
            request: options of the command that writes the store.
            mask: for a store with a loss mask: its layout, its numbers of turns, its pad token, and its stop tokens, which are
                counted here.

        Raises:
            DataError: the directory is not empty or not writable.
        """
        if dtype not in DTYPES:
            raise DataError(f"a store does not support dtype {dtype!r}; known: {', '.join(DTYPES)}")
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.tokenizer = tokenizer
        self.source = source
        self.request = request
        self.shard_tokens = shard_tokens
        self.mask = mask
        self._learned: io.BufferedWriter | None = None
        self._stops = {int(index): [0, 0] for index in mask.stops} if mask else {}
        self._labeled = np.zeros(len(mask.labels) if mask else 0, dtype=np.int64)
        self._shards: list[ShardEntry] = []
        self._counts = np.zeros(0, dtype=np.int64)
        self._text_bytes: int | None = 0
        self._file: io.BufferedWriter | None = None
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise DataError(f"{path} exists and is not empty; choose another path or remove it")
        try:
            self._owned = Partial(path, directory=True)
        except OSError as error:
            raise DataError(f"{path.parent} cannot be written: {error.strerror}; choose another directory") from error
        self.partial = self._owned.path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in (self._file, self._learned):
            if file is not None:
                file.close()
        self._owned.close()

    def add(self, ids: np.ndarray, ends: np.ndarray, text_bytes: int | None = None, learned: np.ndarray | None = None) -> None:
        """Appends whole documents.

        Args:
            ids: (n,) token ids, including the end-of-document tokens.
            ends: end of each document in `ids`, strictly ascending; the last is n.
            text_bytes: size of the text of these documents.
            learned: (n,) bool, whether each token is trained; required by a store with a loss mask. The first token of a document
                never is, because nothing predicts it. In a store of labeled texts, (n,) uint8: 1 + the number of the label of
                each token's document.

        Raises:
            DataError: an id does not fit the dtype, or the disk is full.
        """
        if not len(ids):
            return
        ends = np.asarray(ends, dtype=np.int64)
        if not len(ends) or ends[-1] != len(ids) or ends[0] <= 0 or (np.diff(ends) <= 0).any():
            raise ValueError("document ends must ascend strictly and end with the number of ids")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > np.iinfo(self.dtype).max:
            raise DataError(f"token id {low if low < 0 else high} does not fit {self.dtype.name}; choose a larger dtype")
        if (learned is None) != (self.mask is None):
            raise ValueError("a store with a loss mask needs `learned`, and another store must not have it")
        labeled = bool(self.mask and self.mask.labels)
        if learned is not None and len(learned) != len(ids):
            raise ValueError(f"learned has {len(learned)} values, but there are {len(ids)} ids")
        if learned is not None and labeled:
            learned = np.array(learned, dtype=np.uint8)
            self._add_labels(learned, ends)
        elif learned is not None:
            learned = np.array(learned, dtype=bool)
            learned[np.concatenate([[0], ends[:-1]])] = False
            for index, counts in self._stops.items():
                counts[0] += int(np.count_nonzero(ids[learned] == index))
                counts[1] += int(np.count_nonzero(ids == index))
        self._count(ids if learned is None or labeled else ids[learned], high)
        self._text_bytes = None if text_bytes is None or self._text_bytes is None else self._text_bytes + text_bytes
        ids = ids.astype(self.dtype)
        done, document = 0, 0
        while document < len(ends):
            room = done + self.shard_tokens - self._tokens
            until = int(np.searchsorted(ends, room, side="right"))
            if until <= document:
                if self._tokens:
                    self._close_shard()
                    continue
                until = document + 1  # longer than a shard: the document gets its own shard
            stop = int(ends[until - 1])
            self._write(ids[done:stop], ends[document:until] - done, None if learned is None else learned[done:stop])
            done, document = stop, until

    def commit(self) -> StoreManifest:
        """Finishes the files and renames the store to `path`, unless another process has written it meanwhile.

        Raises:
            DataError: no document was added, or the disk is full.
        """
        self._close_shard()
        if not self._shards:
            raise DataError(f"{self.source or self.path} has no documents; nothing to store")
        mask = self.mask
        if mask is not None:
            stops = {str(index): counts for index, counts in self._stops.items()}
            mask = replace(mask, trained=int(self._counts.sum()), stops=stops, documents=tuple(self._labeled.tolist()))
        tokenizer = self.tokenizer
        entry = None
        if tokenizer is not None:
            around = bool(tokenizer.prefix or tokenizer.suffix)
            entry = TokenizerEntry(tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eos, around)
        try:
            if tokenizer is not None:
                _durable(self.partial / TOKENIZER, tokenizer.dump())
            manifest = StoreManifest(
                dtype=self.dtype.name,
                tokens=sum(shard.tokens for shard in self._shards),
                documents=sum(shard.documents for shard in self._shards),
                text_bytes=self._text_bytes,
                tokenizer=entry,
                shards=tuple(self._shards),
                counts=_durable(self.partial / COUNTS, _npy(self._counts)),
                source=self.source,
                creator=f"forge-data {version('forge-data')}",
                request=self.request,
                mask=mask,
            )
            _durable(self.partial / MANIFEST, manifest.as_json().encode())
            sync_path(self.partial)
            if not (self.path / MANIFEST).exists():
                publish(self.partial, self.path)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror or error}") from error
        return manifest

    def _add_labels(self, classes: np.ndarray, ends: np.ndarray) -> None:
        """Counts the documents of each label, from 1 + the label of each token."""
        of_document = classes[ends - 1]
        if (np.repeat(of_document, np.diff(ends, prepend=0)) != classes).any():
            raise ValueError("all tokens of a document must have its label")
        if not 1 <= int(classes.min()) <= int(classes.max()) <= len(self._labeled):
            raise ValueError(f"labels must be numbers from 0 to {len(self._labeled) - 1}")
        self._labeled += np.bincount(of_document.astype(np.int64) - 1, minlength=len(self._labeled))

    @property
    def _tokens(self) -> int:
        return self._written if self._file is not None else 0

    def _count(self, ids: np.ndarray, high: int) -> None:
        if high >= 1 << 24:
            raise DataError(f"token id {high} is larger than any vocabulary (2^24 ids); check the dtype of the input")
        if high >= len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros(high + 1 - len(self._counts), dtype=np.int64)])
        self._counts += np.bincount(ids.astype(np.int64), minlength=len(self._counts))

    def _write(self, ids: np.ndarray, ends: np.ndarray, learned: np.ndarray | None) -> None:
        try:
            if self._file is None:
                self._file = (self.partial / f"shard-{len(self._shards):05d}.bin").open("wb")
                self._hash = xxhash.xxh3_128()
                self._written, self._max = 0, 0
                self._ends: list[np.ndarray] = []
                if learned is not None:
                    self._learned = (self.partial / f"shard-{len(self._shards):05d}.learned.bin").open("wb")
                    self._learned_hash = xxhash.xxh3_128()
            data = ids.tobytes()
            self._file.write(data)
            if learned is not None and self._learned is not None:
                self._learned.write(learned.tobytes())
                self._learned_hash.update(learned.tobytes())
        except OSError as error:
            raise DataError(f"{self.partial} cannot be written: {error.strerror or error}") from error
        self._hash.update(data)
        self._ends.append((ends + self._written).astype("<u8"))
        self._written += len(ids)
        self._max = max(self._max, int(ids.max()))

    def _close_shard(self) -> None:
        if self._file is None:
            return
        mask = None
        try:
            sync(self._file)
            self._file.close()
            if self._learned is not None:
                sync(self._learned)
                self._learned.close()
                mask = FileEntry(Path(self._learned.name).name, self._written, self._learned_hash.hexdigest())
            name = Path(self._file.name).name
            ends = np.concatenate(self._ends)
            end_file = _durable(self.partial / f"{name.removesuffix('.bin')}.doc.npy", _npy(ends))
        except OSError as error:
            raise DataError(f"{self.partial} cannot be written: {error.strerror or error}") from error
        self._file = self._learned = None
        data = FileEntry(name, self._written * self.dtype.itemsize, self._hash.hexdigest())
        self._shards.append(ShardEntry(self._written, len(ends), self._max, data, end_file, mask))


def _npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array.astype("<u8"), allow_pickle=False)
    return content.getvalue()


def _durable(path: Path, content: bytes) -> FileEntry:
    write_file(path, content)
    return FileEntry(path.name, len(content), xxhash.xxh3_128_hexdigest(content))
