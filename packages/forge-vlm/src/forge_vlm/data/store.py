"""A token store whose documents have images too, as a directory:

    images.json          counts, checksums and identity; written last
    tokens/              a token store, placeholders where images are
    learned.bin          a byte for each token: whether it is predicted
    places.bin           uint64 token at which each tile begins, ascending
    firsts.bin           uint64 first tile of each image, and behind the last one
    digests.bin          uint64 xxh3 of the file of each image
    references.bin       how the reader names each image, UTF-8
    ends.bin             uint64 where each of these names ends

Images themselves stay where they are: a run reads them there, and refuses one that is not what was prepared.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_data.store.checksums import Checksum
from forge_data.store.reader import StoreSource
from forge_vlm.data.inputs import ImageInputs
from forge_vlm.images.pixels import decode

VERSION = 1
FACTS = "images.json"
TOKENS = "tokens"
FILES = {"learned": "u1", "places": "<u8", "firsts": "<u8", "digests": "<u8", "references": "u1", "ends": "<u8"}
EXTRAS = ("images", "image_rows")
"""What `forge_vlm.model.VisionLanguageModel` takes."""


@dataclass(frozen=True)
class Facts:
    """What `images.json` says.

    Attributes:
        version: of the format.
        images, tiles: how many there are.
        text: documents without an image.
        sizes: bytes of each file.
        checksums: xxh3 of each file, hexadecimal.
        identity: of what the model takes of an image.
        skipped: broken records that were left out.
        counts: of each id that is predicted, how often: index -> number.
        too_long: documents that were cut or left out because they were longer than a row.
        longest: tokens of the longest document; None in a store of an older Forge.
    """

    version: int
    images: int
    tiles: int
    text: int
    sizes: dict[str, int]
    checksums: dict[str, str]
    identity: str
    skipped: int
    counts: dict[str, int]
    too_long: int = 0
    longest: int | None = None

    def as_json(self) -> str:
        """The file."""
        return json.dumps(asdict(self), indent=1)


class IllustratedStore:
    """A prepared store as a `Source` whose documents have images; see `forge_core.protocols.data.SourceWithItems`."""

    extras: tuple[str, str] = EXTRAS
    borders_checked = True

    def __init__(
        self, path: Path, inputs: ImageInputs, fetch: Callable[[str], bytes], tokenizer: str | None, vocab_size: int
    ) -> None:
        """Opens the store at `path`.

        Args:
            path: of the store.
            inputs: what the model takes of an image.
            fetch: the file of an image by its reference.
            tokenizer: fingerprint of what made the tokens.
            vocab_size: ids of the text and of the placeholder.

        Raises:
            DataError: a file is missing, or not as long as when it was written.
        """
        self.path, self.name = path, str(path)
        self.tokenizer = tokenizer
        self.vocab_size: int | None = vocab_size
        self.item_shape: tuple[int, ...] = inputs.shape
        self._inputs, self._fetch = inputs, fetch
        self.facts = _facts(path)
        self._store = StoreSource(path / TOKENS)
        self.tokens, self.max_id, self.dtype = self._store.tokens, self._store.max_id, self._store.dtype
        self.documents = self._store.documents
        self._learned, self._places, self._firsts, self._digests, self._references, self._ends = (
            self._mapped(name, dtype) for name, dtype in FILES.items()
        )
        known = (self.facts.version, self.facts.identity, *self.facts.checksums.items())
        digest = sha256(f"{self._store.fingerprint} {known!r}".encode())
        self.fingerprint = digest.hexdigest()

    def ends(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """See `Source`."""
        return self._store.ends(start, stop)

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Source`."""
        return self._store.borders(starts, length)

    def read(self, start: int, stop: int) -> np.ndarray:
        """See `Source`."""
        return self._store.read(start, stop)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """See `Source`."""
        return self._store.windows(starts, length)

    def place(self, token: int) -> str:
        """The document of a token by its number and its first image, for messages."""
        number = int(np.searchsorted(self.ends(), np.uint64(token), side="right"))
        begin, end = self.ends()[number - 1] if number else 0, self.ends()[min(number, self.documents - 1)]
        first, after = self.items_before(np.array([begin, end], dtype=np.int64)).tolist()
        image = int(np.searchsorted(self._firsts, np.uint64(first), side="right")) - 1
        return f"document {number + 1} of {self.path}" + (f", with the image {self.reference(image)}" if first < after else "")

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        if self.facts.longest is not None:
            return self.facts.longest
        return int(np.diff(self.ends().astype(np.int64), prepend=0).max(initial=0))

    def checksums(self) -> list[Checksum]:
        """Of the tokens' files, in the order of the stream."""
        return self._store.checksums()

    def counts(self) -> np.ndarray:
        """(ids,) int64 how often each token id is predicted: placeholders and questions are not."""
        found = np.zeros(1 + max(map(int, self.facts.counts), default=0), dtype=np.int64)
        for token, count in self.facts.counts.items():
            found[int(token)] = count
        return found

    def learned(self, start: int, stop: int) -> np.ndarray:
        """See `SourceWithItems`."""
        return self._learned[start:stop].astype(bool)

    def items_before(self, tokens: np.ndarray) -> np.ndarray:
        """See `SourceWithItems`."""
        return np.searchsorted(self._places, tokens.astype(np.uint64), side="left").astype(np.int64)

    def load(self, first: int, stop: int) -> np.ndarray:
        """(stop - first, *item_shape) float32 tiles.

        Raises:
            DataError: an image is missing, damaged, or another one than when the store was prepared; names it.
        """
        found = np.empty((stop - first, *self.item_shape), dtype=np.float32)
        done = first
        while done < stop:
            image = int(np.searchsorted(self._firsts, np.uint64(done), side="right")) - 1
            begin, after = int(self._firsts[image]), int(self._firsts[image + 1])
            tiles = self._tiles(image, after - begin)
            until = min(after, stop)
            found[done - first : until - first] = tiles[done - begin : until - begin]
            done = until
        return found

    def picture(self, item: int) -> bytes:
        """A tile as PNG, as a person sees it.

        Raises:
            DataError: see `load`.
        """
        image = int(np.searchsorted(self._firsts, np.uint64(item), side="right")) - 1
        whole = decode(self._content(image), self._inputs.channels, self.reference(image))
        tile = self._inputs.pictures(whole)[item - int(self._firsts[image])]
        content = BytesIO()
        tile.save(content, "PNG")
        return content.getvalue()

    def reference(self, image: int) -> str:
        """How the reader names an image."""
        start = int(self._ends[image - 1]) if image else 0
        return self._references[start : int(self._ends[image])].tobytes().decode()

    def _tiles(self, image: int, count: int) -> np.ndarray:
        whole = decode(self._content(image), self._inputs.channels, self.reference(image))
        tiles = self._inputs.pixels(whole)
        if len(tiles) != count:
            raise DataError(f"{self.reference(image)} has {len(tiles)} tiles, not the {count} of before; remove {self.path}")
        return tiles

    def _content(self, image: int) -> bytes:
        """The file of an image, which is the one that was prepared."""
        name = self.reference(image)
        content = self._fetch(name)
        if xxhash.xxh3_64_intdigest(content) != int(self._digests[image]):
            raise DataError(f"{name} is another image than when it was prepared; put it back, or remove {self.path}")
        return content

    def _mapped(self, name: str, dtype: str) -> np.ndarray:
        path = self.path / f"{name}.bin"
        size = self.facts.sizes[name]
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} is missing: {error.strerror}; remove {self.path}, and it is made again") from error
        if found != size:
            raise DataError(f"{path} has {found} bytes, {size} when it was written; remove {self.path}, and it is made again")
        return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)


def _facts(path: Path) -> Facts:
    try:
        values: dict[str, Any] = json.loads((path / FACTS).read_text(encoding="utf-8"))
        found = Facts(**values)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a store with images: {error}; remove it, and it is made again") from error
    if found.version != VERSION:
        raise DataError(f"{path} has format version {found.version}, this Forge reads {VERSION}; remove it, and it is made again")
    return found
