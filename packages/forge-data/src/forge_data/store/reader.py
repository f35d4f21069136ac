"""Reads a token store through memory maps; opening reads the manifest, the sizes of all files, and samples of them."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.storage import npy
from forge_data.storage.document_ends import Ends, Listed
from forge_data.storage.file import File
from forge_data.storage.files import read_bytes
from forge_data.storage.fingerprints import TOKEN_BLOCK, TOKEN_BLOCKS, edges, places
from forge_data.storage.shards import Shard, Shards, map_file
from forge_data.store.checksums import Checksum, fault_of
from forge_data.store.manifest import FileEntry, Manifest, ShardEntry, read_manifest

_BLOCK = 1 << 24
_ADVICE = "write the store again"
_U8 = np.dtype("<u8")


class StoreSource:
    """A store as a `Source`. Shards are mapped when they are first touched."""

    def __init__(self, path: Path) -> None:
        """Opens the store at `path`.

        Raises:
            DataError: it is not a store, or a file is missing, truncated or longer than the manifest says.
        """
        self.path = path
        self.name = str(path)
        self.document_name: Callable[[int], str] | None = None  # of a document by its number, where the corpus is known
        self.manifest: Manifest = read_manifest(path)
        self.tokens = self.manifest.tokens
        self.documents = self.manifest.documents
        self.max_id: int | None = self.manifest.max_id
        self.max_id_from = "in its manifest"
        entry = self.manifest.tokenizer
        self.vocab_size = entry.vocab_size if entry else None
        self.tokenizer = entry.sha256 if entry else None
        self.text_bytes = self.manifest.text_bytes
        self.dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._check_sizes()
        pieces = [Shard(self._file(shard.data), shard.tokens) for shard in self.manifest.shards]
        self._tokens = Shards(pieces, self.dtype)
        self._documents = Listed(self._tokens.firsts, self._table, advice=_ADVICE)
        self.fingerprint = self._sampled()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop): a view of the mapped file where they lie in one shard."""
        return self._tokens.read(start, stop)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """(N, length) token ids from each of `starts` on."""
        return self._tokens.windows(starts, length)

    def ends(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Document ends e with start < e <= stop, ascending uint64."""
        return self._documents.ends(start, self.tokens if stop is None else min(stop, self.tokens))

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Document ends inside many windows; see `Source.borders`."""
        return self._documents.borders(starts, length)

    @property
    def borders_checked(self) -> bool:
        """Whether the document ends that were used so far were compared as a whole."""
        return self._documents.checked

    def place(self, token: int) -> str:
        """File and byte offset of a token, for messages."""
        return self._tokens.place(token)

    def counts(self) -> np.ndarray:
        """(ids,) int64 occurrences of every token id, as the writer counted them.

        Raises:
            DataError: the file is damaged.
        """
        return npy.load(self._file(self.manifest.counts), _U8, _ADVICE).astype(np.int64)

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

    def _sampled(self) -> str:
        """Of the manifest's checksums, and of samples of the files that they are of."""
        digest = sha256(self.manifest.fingerprint.encode())
        for start, stop in places(self.tokens, TOKEN_BLOCK, TOKEN_BLOCKS):
            digest.update(self._tokens.peek(start, stop).tobytes())
        for shard in self.manifest.shards[:: max(1, len(self.manifest.shards) // TOKEN_BLOCKS)]:
            file = self._file(shard.ends)
            for start, stop in edges(file.size):
                digest.update(read_bytes(file, start, stop))
        return digest.hexdigest()

    def checksums(self) -> list[Checksum]:
        """Of the files that are read, in the order of the stream."""
        shards = zip(self._tokens.firsts, self.manifest.shards, strict=False)
        return [
            Checksum(first, self.path / entry.file, entry.xxh3) for first, shard in shards for entry in (shard.data, shard.ends)
        ]

    def _verify_checksum(self, entry: FileEntry) -> list[str]:
        fault = fault_of(self.path / entry.file, entry.xxh3)
        return [fault] if fault else []

    def _verify_shard(self, number: int, shard: ShardEntry, found: np.ndarray) -> list[str]:
        """The manifest's claims about one shard; counts its tokens into `found`."""
        faults = self._table(number).faults(whole=True)
        data = map_file(self._file(shard.data), self.dtype, shard.tokens)
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
        for what in ("tokens", "documents"):
            claimed, held = getattr(self.manifest, what), sum(getattr(shard, what) for shard in self.manifest.shards)
            if claimed != held:
                raise DataError(f"{self.path}: the manifest says {claimed} {what}, its shards hold {held}; write the store again")
        for shard in self.manifest.shards:
            if shard.tokens * self.dtype.itemsize != shard.data.bytes:
                raise DataError(
                    f"{self.path}: the manifest gives {shard.data.file} {shard.data.bytes} bytes for {shard.tokens} tokens"
                )
            self._check_size(shard.data)
            self._check_size(shard.ends)
        self._check_size(self.manifest.counts)

    def _check_size(self, entry: FileEntry) -> None:
        path = self.path / entry.file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} is missing: {error.strerror}; the store is damaged, write it again") from error
        if size != entry.bytes:
            what = "empty" if not size else "truncated" if size < entry.bytes else "too long"
            raise DataError(f"{path} is {what}: it ends at byte {size}, the manifest says {entry.bytes}; write the store again")

    def _table(self, number: int) -> Ends:
        """Document ends of one shard, mapped."""
        shard = self.manifest.shards[number]
        entry = shard.ends
        file = self._file(entry)
        header = npy.read_header(file, advice=_ADVICE)
        shape, dtype = header.shape, header.dtype
        if dtype != _U8 or shape != (shard.documents,) or not shape[0] or header.offset + 8 * shape[0] != entry.bytes:
            raise DataError(
                f"{file.where} must list the ends of {shard.documents} documents as uint64, found {dtype} {shape}; {_ADVICE}"
            )
        ends = map_file(file, _U8, shape[0], header.offset)
        return Ends(ends, shard.tokens, file.where, header.offset, empty=False)

    def _file(self, entry: FileEntry) -> File:
        return File(entry.file, str(self.path / entry.file), entry.bytes, entry.xxh3)


def open_store(path: str | Path, tokenizer: Tokenizer | None = None) -> StoreSource:
    """Opens a store and, where a tokenizer is given, refuses tokens that another one made.

    Raises:
        DataError: see `StoreSource`; or the tokenizers differ, or the path is empty.
    """
    if not str(path).strip():
        raise DataError("the path of a store is empty; '.' is the working directory")
    store = StoreSource(Path(path))
    entry = store.manifest.tokenizer
    if tokenizer is not None and entry is not None and entry.sha256 != tokenizer.fingerprint:
        raise DataError(
            f"{path} was made with tokenizer {entry.name} sha256 {entry.sha256[:12]}, the recipe's is {tokenizer.name} "
            f"sha256 {tokenizer.fingerprint[:12]}; remove [data.tokenizer] or prepare the store again"
        )
    return store
