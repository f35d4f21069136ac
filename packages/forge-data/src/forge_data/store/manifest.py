"""What a token store says about itself: `manifest.json`, the only file that is read when a store is opened.

    manifest.json      this
    shard-00000.bin    token ids, raw little-endian, of the manifest's dtype
    shard-00000.doc.npy  uint64 ends of the shard's documents, counted from the shard's start
    counts.npy         uint64 occurrences of every token id
    tokenizer.json     copy of the tokenizer, where the writer had one

Documents never cross a shard. The manifest is written last: a directory without one is not a store.
"""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from forge_core.errors import DataError

FORMAT = "forge-token-store"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
COUNTS = "counts.npy"
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
"""What ids may be stored as. Signed ones hold no negative id; they are kept for files that came with them."""


@dataclass(frozen=True)
class FileEntry:
    """A file of the store: name, size in bytes and XXH3-128 of its content."""

    file: str
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class ShardEntry:
    """Tokens and document ends of one shard; `max_id` is its largest token id."""

    tokens: int
    documents: int
    max_id: int
    data: FileEntry
    ends: FileEntry


@dataclass(frozen=True)
class TokenizerEntry:
    """Which tokenizer made the tokens. `add_special_tokens`: whether documents have its own prefix and suffix."""

    name: str
    sha256: str
    vocab_size: int
    eos: int | None
    add_special_tokens: bool = False


@dataclass(frozen=True)
class Manifest:
    """All that is known about a store. `text_bytes` is the size of the text behind the tokens; `request`, what `data prepare`
    was asked for."""

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

    @property
    def max_id(self) -> int:
        return max((shard.max_id for shard in self.shards), default=-1)

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens, borders and tokenizer, wherever the store lies and however it was made."""
        parts = [self.dtype, self.tokenizer.sha256 if self.tokenizer else ""]
        parts += [f"{shard.data.xxh3} {shard.ends.xxh3}" for shard in self.shards]
        return sha256("\n".join(parts).encode()).hexdigest()

    def as_json(self) -> str:
        content = asdict(self)
        if self.tokenizer is not None and not self.tokenizer.add_special_tokens:
            del content["tokenizer"]["add_special_tokens"]  # as in stores that were written before there was the key
        return json.dumps({"format": FORMAT, "version": VERSION, **content}, indent=1) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a store.

    Raises:
        DataError: there is none, or it is not one that this version reads.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "is not a token store: it has no manifest.json" if directory.is_dir() else "does not exist"
        raise DataError(f"{directory} {what}; write one with `data prepare`") from None
    except NotADirectoryError:
        raise DataError(f"{directory} is a file, not a token store; a single file of tokens is source 'tokens'") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    try:
        return _parse(content, path)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__} {error}; write the store again") from error


def _parse(content: dict[str, Any], path: Path) -> Manifest:
    if content["format"] != FORMAT or content["version"] != VERSION:
        found = f"{content['format']} version {content['version']}"
        raise DataError(f"{path} is of {found}; this Forge reads {FORMAT} version {VERSION}")
    if content["dtype"] not in DTYPES:
        raise DataError(f"{path}: unknown dtype {content['dtype']!r}; known: {', '.join(DTYPES)}")
    counts = [content["tokens"], content["documents"]]
    for shard in content["shards"]:
        counts += [shard[name] for name in ("tokens", "documents", "max_id")]
    if wrong := [count for count in counts if type(count) is not int or count < 0]:
        raise DataError(f"{path} is damaged: {wrong[0]!r} is not a number of tokens, documents or an id; write the store again")
    for shard in [*content["shards"], {"data": content["counts"], "ends": content["counts"]}]:
        for name in (shard["data"]["file"], shard["ends"]["file"]):
            if Path(name).name != name:
                raise DataError(f"{path} names the file {name!r}, which is not inside the store")
    tokenizer = content["tokenizer"]
    return Manifest(
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
            )
            for shard in content["shards"]
        ),
        counts=FileEntry(**content["counts"]),
        source=content["source"],
        creator=content["creator"],
        request=content.get("request"),
    )
