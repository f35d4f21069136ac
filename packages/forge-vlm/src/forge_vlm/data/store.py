"""A token store whose documents have images, as a directory:

    images.json          counts, checksums and identity; written last
    tokens/              a token store, with placeholders in place of images
    learned.bin          a byte for each token: whether it is predicted
    places.bin           uint64 token at which each tile begins, ascending
    firsts.bin           uint64 first tile of each image, then the number of tiles
    digests.bin          uint64 xxh3 of the file of each image
    references.bin       references of the images, UTF-8
    ends.bin             uint64 end of each reference in references.bin
    times.bin            float32 seconds of each image, -1 if it is no frame of a clip; only if the model receives times

Images stay where they are. A run reads them there and refuses an image that has changed since it was prepared.
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
from forge_data.sources.store import StoreSource
from forge_data.storage.checksums import Checksum
from forge_vlm.data.inputs import ImageInputs
from forge_vlm.data.processor_inputs import ProcessorInputs
from forge_vlm.images.pixels import decode

VERSION = 1
FACTS = "images.json"
TOKENS = "tokens"
FILES = {"learned": "u1", "places": "<u8", "firsts": "<u8", "digests": "<u8", "references": "u1", "ends": "<u8"}
EXTRAS = ("images", "image_rows")
"""The inputs that `forge_vlm.model.VisionLanguageModel` takes."""
TIMES = "image_times"
"""The input of times, for a model that adds them."""
NO_TIME = -1.0
"""Time of an image that is no frame of a clip."""


def files_of(timed: bool) -> dict[str, str]:
    """Returns the dtype of each file of a store with or without times."""
    return FILES | ({"times": "<f4"} if timed else {})


@dataclass(frozen=True)
class ImageStoreFacts:
    """The content of `images.json`.

    Attributes:
        version: version of the format.
        images, tiles: number of images and of tiles.
        text: number of documents without an image.
        sizes: bytes of each file.
        checksums: xxh3 of each file, hexadecimal.
        identity: identity of the model's image inputs.
        skipped: number of broken records that were skipped.
        counts: id -> how often it is predicted.
        too_long: number of documents that were truncated or skipped because they were longer than a row.
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
        """Returns the content of the file."""
        return json.dumps(asdict(self), indent=1)


class IllustratedStore:
    """A prepared store as a `Source` whose documents have images; see `forge_core.protocols.data.SourceWithItems`."""

    borders_checked = True

    def __init__(
        self,
        path: Path,
        inputs: "ImageInputs | ProcessorInputs",
        fetch: Callable[[str], bytes],
        tokenizer: str | None,
        vocab_size: int,
        is_there: Callable[[str], bool] | None = None,
    ) -> None:
        """Opens the store at `path`.

        Args:
            path: of the store.
            inputs: how an image becomes placeholders and pixels.
            fetch: reads the file of an image by its reference.
            tokenizer: fingerprint of the tokenizer.
            vocab_size: number of ids, including the placeholder.
            is_there: says whether the file of a reference exists without reading it, if possible.

        Raises:
            DataError: a file is missing, or has another size than when it was written.
        """
        self.path, self.name = path, str(path)
        self.tokenizer = tokenizer
        self.vocab_size: int | None = vocab_size
        self.item_shape: tuple[int, ...] = inputs.shape
        self.extras: tuple[str, ...] = (*EXTRAS, TIMES) if inputs.timed else EXTRAS
        self._inputs, self._fetch, self._is_there = inputs, fetch, is_there
        self.facts = _facts(path)
        self._store = StoreSource(path / TOKENS)
        self.tokens, self.max_id, self.dtype = self._store.tokens, self._store.max_id, self._store.dtype
        self.documents = self._store.documents
        self._learned, self._places, self._firsts, self._digests, self._references, self._ends = (
            self._mapped(name, dtype) for name, dtype in FILES.items()
        )
        self._times = self._mapped("times", files_of(True)["times"]) if inputs.timed else None
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
        """Returns the document of a token by its number and its first image, for messages."""
        number = int(np.searchsorted(self.ends(), np.uint64(token), side="right"))
        begin, end = self.ends()[number - 1] if number else 0, self.ends()[min(number, self.documents - 1)]
        first, after = self.items_before(np.array([begin, end], dtype=np.int64)).tolist()
        image = int(np.searchsorted(self._firsts, np.uint64(first), side="right")) - 1
        return f"document {number + 1} of {self.path}" + (f", with the image {self.reference(image)}" if first < after else "")

    @property
    def longest(self) -> int:
        """Number of tokens of the longest document."""
        if self.facts.longest is not None:
            return self.facts.longest
        return int(np.diff(self.ends().astype(np.int64), prepend=0).max(initial=0))

    def checksums(self) -> list[Checksum]:
        """Returns the checksums of the token files, in the order of the stream."""
        return self._store.checksums()

    def counts(self) -> np.ndarray:
        """Returns (ids,) int64: how often each token id is predicted. Placeholders and questions are not predicted."""
        counts = np.zeros(1 + max(map(int, self.facts.counts), default=0), dtype=np.int64)
        for token, count in self.facts.counts.items():
            counts[int(token)] = count
        return counts

    def learned(self, start: int, stop: int) -> np.ndarray:
        """See `SourceWithItems`."""
        return self._learned[start:stop].astype(bool)

    def items_before(self, tokens: np.ndarray) -> np.ndarray:
        """See `SourceWithItems`."""
        return np.searchsorted(self._places, tokens.astype(np.uint64), side="left").astype(np.int64)

    def load(self, first: int, stop: int) -> np.ndarray:
        """Returns (stop - first, *item_shape) float32 tiles.

        Raises:
            DataError: an image is missing, damaged, or has changed since the store was prepared; the message names it.
        """
        loaded = np.empty((stop - first, *self.item_shape), dtype=np.float32)
        done = first
        while done < stop:
            image = int(np.searchsorted(self._firsts, np.uint64(done), side="right")) - 1
            begin, after = int(self._firsts[image]), int(self._firsts[image + 1])
            tiles = self._tiles(image, after - begin)
            until = min(after, stop)
            loaded[done - first : until - first] = tiles[done - begin : until - begin]
            done = until
        return loaded

    def item_values(self, first: int, stop: int) -> np.ndarray:
        """Returns (stop - first,) float32: seconds of each tile's image; see `SourceWithItems`."""
        assert self._times is not None, "the store has times"
        return self._times[np.searchsorted(self._firsts, np.arange(first, stop, dtype=np.uint64), side="right") - 1]

    def missing(self) -> list[str]:
        """Returns the references of images whose files do not exist any more, if this can be checked without reading them."""
        if self._is_there is None:
            return []
        names = dict.fromkeys(self.reference(image) for image in range(len(self._ends)))
        return [name for name in names if not self._is_there(name)]

    def picture(self, item: int) -> bytes:
        """Returns a tile as PNG, for viewing.

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
        """Returns the reference of an image."""
        start = int(self._ends[image - 1]) if image else 0
        return self._references[start : int(self._ends[image])].tobytes().decode()

    def _tiles(self, image: int, count: int) -> np.ndarray:
        whole = decode(self._content(image), self._inputs.channels, self.reference(image))
        tiles = self._inputs.pixels(whole)
        if len(tiles) != count:
            raise DataError(f"{self.reference(image)} now has {len(tiles)} tiles instead of {count}; remove {self.path}")
        return tiles

    def _content(self, image: int) -> bytes:
        """Returns the file of an image, checked against its digest."""
        name = self.reference(image)
        content = self._fetch(name)
        if xxhash.xxh3_64_intdigest(content) != int(self._digests[image]):
            raise DataError(f"{name} has changed since it was prepared; restore it, or remove {self.path} to prepare it again")
        return content

    def _mapped(self, name: str, dtype: str) -> np.ndarray:
        path = self.path / f"{name}.bin"
        size = self.facts.sizes[name]
        try:
            actual = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; remove {self.path} to prepare it again") from error
        if actual != size:
            raise DataError(f"{path} has {actual} bytes instead of {size}; remove {self.path} to prepare it again")
        return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)


def _facts(path: Path) -> ImageStoreFacts:
    try:
        values: dict[str, Any] = json.loads((path / FACTS).read_text(encoding="utf-8"))
        facts = ImageStoreFacts(**values)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a store with images: {error}; remove it to prepare it again") from error
    if facts.version != VERSION:
        raise DataError(
            f"{path} has format version {facts.version}, but this Forge reads {VERSION}; remove it to prepare it again"
        )
    return facts
