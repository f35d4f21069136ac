"""Reads a token store through memory maps; opening reads the manifest and the sizes of the files, nothing else."""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.packing import borders_in
from forge_data.sources.manifest import FileEntry, Manifest, Shard, read_manifest

_BLOCK = 1 << 24


class StoreSource:
    """A store as a `Source`. Shards are mapped when they are first touched."""

    def __init__(self, path: Path) -> None:
        """Opens the store at `path`.

        Raises:
            DataError: it is no store, or a file is missing, truncated or longer than the manifest says.
        """
        self.path = path
        self.name = str(path)
        self.manifest: Manifest = read_manifest(path)
        self.fingerprint = self.manifest.fingerprint
        self.tokens = self.manifest.tokens
        self.documents = self.manifest.documents
        self.max_id: int | None = self.manifest.max_id
        entry = self.manifest.tokenizer
        self.vocab_size = entry.vocab_size if entry else None
        self.tokenizer = entry.sha256 if entry else None
        self.text_bytes = self.manifest.text_bytes
        self.dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._check_sizes()
        tokens = [shard.tokens for shard in self.manifest.shards]
        self._firsts = [0, *accumulate(tokens)]
        self._data: list[np.ndarray | None] = [None] * len(tokens)
        self._ends: list[np.ndarray | None] = [None] * len(tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop): a view of the mapped file where they lie in one shard."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of a store of {self.tokens}")
        if len(self._data) == 1:
            return self._shard(0)[start:stop]
        parts = []
        for number in range(self._shard_of(start), len(self._data)):
            first = self._firsts[number]
            if first >= stop:
                break
            parts.append(self._shard(number)[max(0, start - first) : stop - first])
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, self.dtype)])

    def ends(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Document ends e with start < e <= stop, ascending uint64."""
        stop = self.tokens if stop is None else stop
        parts = [np.empty(0, dtype=np.uint64)]
        for number in range(self._shard_of(start), len(self._data)):
            first = self._firsts[number]
            if first >= stop:
                break
            ends = self._shard_ends(number)
            window = np.array([max(0, start - first), min(stop, self.tokens) - first], dtype=np.uint64)
            low, high = np.searchsorted(ends, window, side="right")
            parts.append(ends[low:high] + np.uint64(first))
        return np.concatenate(parts)

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Document ends inside many windows; see `Source.borders`."""
        if len(self._data) == 1:
            return borders_in(self._shard_ends(0), starts, length)
        shards = np.array([self._shard_of(start) for start in starts.tolist()])
        firsts = np.array(self._firsts, dtype=np.uint64)
        crossing = starts + np.uint64(length) > firsts[shards + 1]
        rows, columns = [], []
        for number in np.unique(shards[~crossing]).tolist():
            own = np.flatnonzero((shards == number) & ~crossing)
            places, found = borders_in(self._shard_ends(number), starts[own] - firsts[number], length)
            rows.append(own[places])
            columns.append(found)
        for row in np.flatnonzero(crossing).tolist():
            found = (self.ends(int(starts[row]), int(starts[row]) + length) - starts[row]).astype(np.int64)
            rows.append(np.full(len(found), row))
            columns.append(found)
        joined = np.concatenate(rows)
        order = np.argsort(joined, kind="stable")
        return joined[order], np.concatenate(columns)[order]

    def counts(self) -> np.ndarray:
        """(ids,) int64 occurrences of every token id, as the writer counted them."""
        return np.load(self.path / self.manifest.counts.file, allow_pickle=False).astype(np.int64)

    def verify(self) -> list[str]:
        """Reads everything and compares it with the manifest; one message per fault, with file and offset."""
        faults: list[str] = []
        found = np.zeros(self.manifest.max_id + 1, dtype=np.int64)
        for number, shard in enumerate(self.manifest.shards):
            for entry in (shard.data, shard.ends):
                faults += self._verify_checksum(entry)
            if not faults:
                faults += self._verify_shard(number, shard, found)
        faults += self._verify_checksum(self.manifest.counts)
        if not faults and not np.array_equal(found, self.counts()):
            faults.append(f"{self.path / self.manifest.counts.file}: counts differ from the tokens")
        return faults

    def _verify_checksum(self, entry: FileEntry) -> list[str]:
        digest = xxhash.xxh3_128()
        with (self.path / entry.file).open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        if digest.hexdigest() == entry.xxh3:
            return []
        return [f"{self.path / entry.file}: content differs from its checksum ({digest.hexdigest()}, not {entry.xxh3})"]

    def _verify_shard(self, number: int, shard: Shard, found: np.ndarray) -> list[str]:
        """The manifest's claims about one shard; counts its tokens into `found`."""
        faults: list[str] = []
        ends = self._shard_ends(number)
        if len(ends) != shard.documents or int(ends[-1]) != shard.tokens or int(ends[0]) == 0:
            faults.append(f"{self.path / shard.ends.file}: document ends do not cover the {shard.tokens} tokens of the shard")
        falling = np.flatnonzero(ends[1:] <= ends[:-1])
        if len(falling):
            faults.append(f"{self.path / shard.ends.file}: document {int(falling[0]) + 1} does not end after the one before")
        data = self._shard(number)
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK]
            high = int(block.max())
            if high > shard.max_id:
                offset = (start + int(np.argmax(block > shard.max_id))) * self.dtype.itemsize
                faults.append(f"{self.path / shard.data.file} at byte {offset}: id above max_id = {shard.max_id}")
                break
            found += np.bincount(block, minlength=len(found))
        return faults

    def _check_sizes(self) -> None:
        for shard in self.manifest.shards:
            if shard.tokens * self.dtype.itemsize != shard.data.bytes:
                raise DataError(
                    f"{self.path}: the manifest gives {shard.data.file} {shard.data.bytes} bytes for {shard.tokens} tokens"
                )
            for entry in (shard.data, shard.ends):
                path = self.path / entry.file
                try:
                    size = path.stat().st_size
                except OSError as error:
                    raise DataError(f"{path} is missing: {error.strerror}; the store is damaged, write it again") from error
                if size != entry.bytes:
                    what = "empty" if not size else "truncated" if size < entry.bytes else "too long"
                    raise DataError(
                        f"{path} is {what}: it ends at byte {size}, the manifest says {entry.bytes}; write the store again"
                    )

    def _shard_of(self, token: int) -> int:
        return min(max(bisect_right(self._firsts, token) - 1, 0), len(self._data) - 1)

    def _shard(self, number: int) -> np.ndarray:
        data = self._data[number]
        if data is None:
            path = self.path / self.manifest.shards[number].data.file
            # A plain view of the map: slicing np.memmap itself costs a microsecond each time.
            data = self._data[number] = np.asarray(np.memmap(path, dtype=self.dtype, mode="r"))
        return data

    def _shard_ends(self, number: int) -> np.ndarray:
        ends = self._ends[number]
        if ends is None:
            path = self.path / self.manifest.shards[number].ends.file
            ends = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
            if ends.dtype != np.uint64 or ends.ndim != 1 or not len(ends):
                raise DataError(f"{path}: document ends must be a list of uint64, found {ends.dtype} {ends.shape}")
            self._ends[number] = ends
        return ends


def open_store(path: str | Path, tokenizer: Tokenizer | None = None) -> StoreSource:
    """Opens a store and, where a tokenizer is given, refuses tokens that another one made.

    Raises:
        DataError: see `StoreSource`; or the tokenizers differ.
    """
    store = StoreSource(Path(path))
    entry = store.manifest.tokenizer
    if tokenizer is not None and entry is not None and entry.sha256 != tokenizer.fingerprint:
        raise DataError(
            f"{path} was made with tokenizer {entry.name} sha256 {entry.sha256[:12]}, the recipe's is {tokenizer.name} "
            f"sha256 {tokenizer.fingerprint[:12]}; remove [data.tokenizer] or prepare the store again"
        )
    return store
