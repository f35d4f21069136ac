"""The token store: its files, its manifest, and the source that reads it through memory maps.

    manifest.json      describes the files of the store
    shard-00000.bin    token ids, raw little-endian, of the manifest's dtype
    shard-00000.doc.npy  uint64 ends of the shard's documents, counted from the shard's start
    shard-00000.learned.bin  a byte per token, 1 if it is trained; only in stores with a loss mask. In a store of labeled texts,
                       1 + the number of the document's label
    counts.npy         uint64 counts of every token id; with a loss mask, of the trained ones
    tokenizer.json     copy of the tokenizer, if the writer had one

Documents never cross a shard. The manifest is written last: a directory without one is not a store. Opening a store reads
the manifest, the sizes of all files, and samples of their content.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.storage import npy
from forge_data.storage.checksums import TOKEN_BLOCK, TOKEN_BLOCKS, Checksum, edge_ranges, fault_of, sampled_ranges
from forge_data.storage.files import File, read_bytes
from forge_data.storage.shards import Ends, Listed, Shard, Shards, map_file

FORMAT = "forge-token-store"
VERSION = 1
MASKED = 2
"""Version of stores with a loss mask, which older versions of Forge would train on everywhere."""
LABELED = 3
"""Version of stores of labeled texts."""
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
COUNTS = "counts.npy"
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
"""Dtypes of stored ids. Ids of signed dtypes are never negative; converted files keep their dtype."""
_BLOCK = 1 << 24
_ADVICE = "write the store again"
_U8 = np.dtype("<u8")


@dataclass(frozen=True)
class FileEntry:
    """A file of the store: name, size in bytes and XXH3-128 of its content."""

    file: str
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class ShardEntry:
    """Tokens, document ends and loss mask of one shard; `max_id` is its largest token id."""

    tokens: int
    documents: int
    max_id: int
    data: FileEntry
    ends: FileEntry
    learned: FileEntry | None = None


@dataclass(frozen=True)
class MaskEntry:
    """The loss mask of a store: which tokens are trained.

    Attributes:
        layout: `rows`: each document is trained on its own; `pairs`: documents 2 p and 2 p + 1 are the chosen and the rejected
            answer of pair p; `labels`: each document has one of the `labels`.
        trained: number of trained tokens.
        turns: number of trained turns of an assistant; 0 if unknown.
        ended: number of trained turns that end with a stop token.
        stops: id of each stop token -> [number of trained ones, number in the store].
        pad: id of the tokenizer's pad token, or None if it has none.
        labels: names of the labels, in the order of their numbers.
        documents: number of documents of each label.
    """

    layout: str = "rows"
    trained: int = 0
    turns: int = 0
    ended: int = 0
    stops: dict[str, list[int]] = field(default_factory=dict)
    pad: int | None = None
    labels: tuple[str, ...] = ()
    documents: tuple[int, ...] = ()

    def fault(self) -> str:
        """Returns why a model trained on the store would not learn to stop; empty if it would."""
        if not self.stops or any(trained for trained, _ in self.stops.values()):
            return ""
        listed = ", ".join(f"{index} ({total:,} in the store)" for index, (_, total) in self.stops.items())
        if self.pad is not None and str(self.pad) in self.stops:
            return (
                f"no document trains a stop token: {listed}; {self.pad} is also the pad token, and whatever made the mask masked "
                "both; mask padding by its position, or give the tokenizer a pad token of its own, and write the store again"
            )
        return f"no document trains a stop token: {listed}, so a model would not learn to stop; write the store with them trained"


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer of a store. `add_special_tokens`: whether documents have the tokenizer's prefix and suffix."""

    name: str
    sha256: str
    vocab_size: int
    eos: int | None
    add_special_tokens: bool = False


@dataclass(frozen=True)
class StoreManifest:
    """The content of `manifest.json`. `text_bytes`: size of the tokenized text; `request`: the options of `data prepare`."""

    dtype: str
    tokens: int
    documents: int
    text_bytes: int | None
    tokenizer: TokenizerEntry | None
    shards: tuple[ShardEntry, ...]
    counts: FileEntry
    source: str
    creator: str
    request: dict[str, str] | None = None
    mask: MaskEntry | None = None

    @property
    def max_id(self) -> int:
        return max((shard.max_id for shard in self.shards), default=-1)

    @property
    def fingerprint(self) -> str:
        """Digest of tokens, borders and tokenizer; it does not depend on the location of the store or how it was written."""
        parts = [self.dtype, self.tokenizer.sha256 if self.tokenizer else ""]
        parts += [f"{shard.data.xxh3} {shard.ends.xxh3}" for shard in self.shards]
        if self.mask is not None:
            parts += [self.mask.layout, *self.mask.labels, *(shard.learned.xxh3 for shard in self.shards if shard.learned)]
        return sha256("\n".join(parts).encode()).hexdigest()

    def as_json(self) -> str:
        content = asdict(self)
        if self.tokenizer is not None and not self.tokenizer.add_special_tokens:
            del content["tokenizer"]["add_special_tokens"]  # as in stores that predate the key
        if self.mask is None:  # as in stores that predate masks
            del content["mask"]
            for shard in content["shards"]:
                del shard["learned"]
        elif not self.mask.labels:  # as in stores that predate labels
            del content["mask"]["labels"], content["mask"]["documents"]
        version = VERSION if self.mask is None else LABELED if self.mask.labels else MASKED
        return json.dumps({"format": FORMAT, "version": version, **content}, indent=1) + "\n"


def read_manifest(directory: Path) -> StoreManifest:
    """Reads the manifest of a store.

    Raises:
        DataError: the directory has no manifest, or this version cannot read it.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "is not a token store: it has no manifest.json" if directory.is_dir() else "does not exist"
        raise DataError(f"{directory} {what}; write one with `data prepare`") from None
    except NotADirectoryError:
        raise DataError(f"{directory} is a file, not a token store; read a file of tokens with source 'tokens'") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    try:
        return _parse_manifest(content, path)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__} {error}; write the store again") from error


def _parse_manifest(content: dict[str, Any], path: Path) -> StoreManifest:
    if content["format"] != FORMAT or content["version"] not in (VERSION, MASKED, LABELED):
        actual = f"{content['format']} version {content['version']}"
        raise DataError(f"{path} has format {actual}; this Forge reads {FORMAT} version {VERSION} to {LABELED}")
    masked = content["version"] in (MASKED, LABELED)
    if content["dtype"] not in DTYPES:
        raise DataError(f"{path}: unknown dtype {content['dtype']!r}; known: {', '.join(DTYPES)}")
    counts = [content["tokens"], content["documents"]]
    for shard in content["shards"]:
        counts += [shard[name] for name in ("tokens", "documents", "max_id")]
    if wrong := [count for count in counts if type(count) is not int or count < 0]:
        raise DataError(f"{path} is damaged: {wrong[0]!r} is not a number of tokens, documents or an id; write the store again")
    for shard in [*content["shards"], {"data": content["counts"], "ends": content["counts"]}]:
        for name in (shard[kind]["file"] for kind in ("data", "ends", "learned") if kind in shard):
            if Path(name).name != name:
                raise DataError(f"{path} names the file {name!r}, which is not inside the store")
    tokenizer = content["tokenizer"]
    return StoreManifest(
        dtype=content["dtype"],
        tokens=content["tokens"],
        documents=content["documents"],
        text_bytes=content["text_bytes"],
        tokenizer=TokenizerEntry(**tokenizer) if tokenizer else None,
        shards=tuple(
            ShardEntry(
                tokens=shard["tokens"],
                documents=shard["documents"],
                max_id=shard["max_id"],
                data=FileEntry(**shard["data"]),
                ends=FileEntry(**shard["ends"]),
                learned=FileEntry(**shard["learned"]) if masked else None,
            )
            for shard in content["shards"]
        ),
        counts=FileEntry(**content["counts"]),
        source=content["source"],
        creator=content["creator"],
        request=content.get("request"),
        mask=_mask_of(content["mask"]) if masked else None,
    )


def _mask_of(entry: dict[str, Any]) -> MaskEntry:
    listed = {name: tuple(entry[name]) for name in ("labels", "documents") if name in entry}
    return MaskEntry(**{**entry, **listed})


class StoreSource:
    """A store as a `Source`. A shard is mapped at its first read. A store with a loss mask is a `SourceWithMask`."""

    def __init__(self, path: Path) -> None:
        """Opens the store at `path`.

        Raises:
            DataError: `path` is not a store, or the size of a file differs from the manifest.
        """
        self.path = path
        self.name = str(path)
        self.document_name: Callable[[int], str] | None = None  # name by number, if the corpus is known
        self.manifest: StoreManifest = read_manifest(path)
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
        self.pairs = self.manifest.mask is not None and self.manifest.mask.layout == "pairs"
        if self.manifest.mask is not None:
            masks = [(shard.learned, shard.tokens) for shard in self.manifest.shards if shard.learned]
            self._mask = Shards([Shard(self._file(entry), tokens) for entry, tokens in masks], np.dtype(np.uint8))
            self.learned = self._learned  # only stores with a mask have the method
        self.labels = self.manifest.mask.labels if self.manifest.mask is not None else ()
        self.fingerprint = self._sampled()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns token ids [start, stop): a view of the mapped file if they lie in one shard."""
        return self._tokens.read(start, stop)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns (N, length) token ids: one window from each of `starts`."""
        return self._tokens.windows(starts, length)

    def ends(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the document ends e with start < e <= stop, ascending uint64."""
        return self._documents.ends(start, self.tokens if stop is None else min(stop, self.tokens))

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the document ends inside many windows; see `Source.borders`."""
        return self._documents.borders(starts, length)

    @property
    def borders_checked(self) -> bool:
        """Whether all document ends used so far come from completely checked tables."""
        return self._documents.checked

    def place(self, token: int) -> str:
        """Returns file and byte offset of a token, for messages."""
        return self._tokens.place(token)

    def counts(self) -> np.ndarray:
        """Returns (ids,) int64 counts of every token id, as the writer recorded them.

        Raises:
            DataError: the file is damaged.
        """
        return npy.load(self._file(self.manifest.counts), _U8, _ADVICE).astype(np.int64)

    def _learned(self, start: int, stop: int) -> np.ndarray:
        """See `SourceWithMask.learned`; True for all tokens of labeled texts."""
        return self._mask.read(start, stop).astype(bool)

    def classes(self, start: int, stop: int) -> np.ndarray:
        """Returns (stop - start,) uint8, for a store of labeled texts: 1 + the number of the label of each token's document.

        Raises:
            DataError: the file is damaged.
        """
        found = self._mask.read(start, stop)
        if len(found) and not 1 <= int(found.min()) <= int(found.max()) <= len(self.labels):
            raise DataError(f"{self.path}: a token has no label, or an unknown one; {_ADVICE}")
        return found

    def verify(self) -> list[str]:
        """Compares all content with the manifest; returns one message per fault, with file and offset."""
        faults: list[str] = []
        counts = np.zeros(self.manifest.max_id + 1, dtype=np.int64)
        for number, shard in enumerate(self.manifest.shards):
            for entry in _files_of(shard):
                faults += self._verify_checksum(entry)
            if not faults:
                faults += self._verify_shard(number, shard, counts)
        faults += self._verify_checksum(self.manifest.counts)
        if not faults and not np.array_equal(counts, self.counts()):
            faults.append(f"{self.path / self.manifest.counts.file}: counts differ from the tokens")
        return faults

    def _sampled(self) -> str:
        """Returns a digest of the manifest's checksums and of samples of the files."""
        digest = sha256(self.manifest.fingerprint.encode())
        for start, stop in sampled_ranges(self.tokens, TOKEN_BLOCK, TOKEN_BLOCKS):
            digest.update(self._tokens.peek(start, stop).tobytes())
        for shard in self.manifest.shards[:: max(1, len(self.manifest.shards) // TOKEN_BLOCKS)]:
            file = self._file(shard.ends)
            for start, stop in edge_ranges(file.size):
                digest.update(read_bytes(file, start, stop))
        return digest.hexdigest()

    def checksums(self) -> list[Checksum]:
        """Returns the checksums of all shard files, in the order of the stream."""
        shards = zip(self._tokens.firsts, self.manifest.shards, strict=False)
        return [Checksum(first, self.path / entry.file, entry.xxh3) for first, shard in shards for entry in _files_of(shard)]

    def _verify_checksum(self, entry: FileEntry) -> list[str]:
        fault = fault_of(self.path / entry.file, entry.xxh3)
        return [fault] if fault else []

    def _verify_shard(self, number: int, shard: ShardEntry, counts: np.ndarray) -> list[str]:
        """Compares one shard with the manifest, and adds the counts of its tokens to `counts`."""
        faults = self._table(number).faults(whole=True)
        data = map_file(self._file(shard.data), self.dtype, shard.tokens)
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK]
            high = int(block.max())
            if high > shard.max_id:
                offset = (start + int(np.argmax(block > shard.max_id))) * self.dtype.itemsize
                faults.append(f"{self.path / shard.data.file} at byte {offset}: id above max_id = {shard.max_id}")
                break
            if self.manifest.mask is not None:
                first = int(self._tokens.firsts[number]) + start
                block = block[self._learned(first, first + len(block))]
            counts += np.bincount(block, minlength=len(counts))
        return faults

    def _check_sizes(self) -> None:
        for what in ("tokens", "documents"):
            stated, total = getattr(self.manifest, what), sum(getattr(shard, what) for shard in self.manifest.shards)
            if stated != total:
                raise DataError(f"{self.path}: the manifest says {stated} {what}, its shards hold {total}; write the store again")
        for shard in self.manifest.shards:
            if shard.tokens * self.dtype.itemsize != shard.data.bytes:
                raise DataError(
                    f"{self.path}: the manifest lists {shard.data.file} with {shard.data.bytes} bytes for {shard.tokens} tokens, "
                    f"which do not match {self.dtype.name}; {_ADVICE}"
                )
            if shard.learned is not None and shard.learned.bytes != shard.tokens:
                raise DataError(
                    f"{self.path}: {shard.learned.file} must have a byte for each of {shard.tokens} tokens; {_ADVICE}"
                )
            for entry in _files_of(shard):
                self._check_size(entry)
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
        """Maps the document ends of one shard."""
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


def _files_of(shard: ShardEntry) -> list[FileEntry]:
    return [shard.data, shard.ends, *([shard.learned] if shard.learned else [])]


def open_store(path: str | Path, tokenizer: Tokenizer | None = None) -> StoreSource:
    """Opens a store; if a tokenizer is given, refuses a store that was written with another one.

    Raises:
        DataError: see `StoreSource`; or the tokenizers differ, or the path is empty.
    """
    if not str(path).strip():
        raise DataError("the path of the store is empty; use '.' for the working directory")
    store = StoreSource(Path(path))
    entry = store.manifest.tokenizer
    if tokenizer is not None and entry is not None and entry.sha256 != tokenizer.fingerprint:
        raise DataError(
            f"{path} was written with tokenizer {entry.name} sha256 {entry.sha256[:12]}, but the recipe uses {tokenizer.name} "
            f"sha256 {tokenizer.fingerprint[:12]}; remove [data.tokenizer] or prepare the store again"
        )
    return store
