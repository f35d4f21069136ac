"""Documents with images to a store: tokens, placeholders and what is learned; every image is decoded once, so none is a surprise.

A record that makes no document, or whose image cannot be decoded, is broken: it is named, counted, and left out while `skip`
allows it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from forge_core.durable import publish, sync, sync_path, write_file
from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext, Tokenizer
from forge_data.sources.records.parts import Skips, in_split
from forge_data.storage.partial import Partial
from forge_data.storage.workspace_lock import locked
from forge_data.store.writer import StoreWriter, dtype_for
from forge_vlm.data.chat import Chat
from forge_vlm.data.documents import Broken, Examples, Fields, Picture, Words, parts_of
from forge_vlm.data.inputs import ImageInputs, identity
from forge_vlm.data.store import FACTS, FILES, TOKENS, VERSION, Facts, IllustratedStore
from forge_vlm.images.decoding import ImageError, decode

_AHEAD = 64
"""Documents that are worked on at a time, for each thread."""
_EVERY = 10_000
"""Documents between two messages."""


@dataclass(frozen=True)
class Wanted:
    """What is made of the records.

    Attributes:
        fields: of a record.
        chat: how turns are written.
        inputs: what the model takes of an image.
        split, held_out: see `forge_data.sources.records.parts.in_split`.
        skip: broken records that may be left out.
    """

    fields: Fields
    chat: Chat
    inputs: ImageInputs
    split: str = "all"
    held_out: float = 0.05
    skip: int = 0


def prepared(examples: Examples, wanted: Wanted, context: SourceContext, name: str) -> IllustratedStore:
    """The store of these records in the workspace; made when it is not there yet.

    Raises:
        DataError: no tokenizer, no document, too many broken records, or a workspace that cannot be written.
    """
    tokenizer = context.tokenizer
    if tokenizer is None:
        raise DataError(f"source {name!r} has text and needs a tokenizer; add [data.tokenizer] with name = 'bpe' or 'bytes'")
    made = f"{wanted.fields} {wanted.chat.template!r} {identity(wanted.inputs)} {wanted.split} {wanted.held_out}"
    key = sha256(f"{VERSION} {examples.fingerprint} {tokenizer.fingerprint} {made}".encode()).hexdigest()[:16]
    path = context.workspace / "stores" / f"{name}-{key}"
    if not (path / FACTS).exists():
        with locked(context.workspace):
            if not (path / FACTS).exists():
                _write(examples, wanted, tokenizer, path, name, context.workers, context.report)
    vocab_size = max(tokenizer.vocab_size, wanted.inputs.placeholder + 1)
    store = IllustratedStore(path, wanted.inputs, examples.fetch, tokenizer.fingerprint, vocab_size)
    if store.facts.skipped > wanted.skip:
        raise DataError(f"{store.facts.skipped} records of {examples.what} are broken, and `skip` allows {wanted.skip}")
    return store


@dataclass(frozen=True)
class Encoded:
    """One document: ids, which of them are learned, where each tile begins; references, digests and tiles of its images."""

    ids: np.ndarray
    learned: np.ndarray
    places: list[int]
    references: list[str]
    digests: list[int]
    tiles: list[int]


def encode(parts: "list[Words | Picture]", tokenizer: Tokenizer, inputs: ImageInputs, fetch: Callable[[str], bytes]) -> Encoded:
    """A document's tokens; each text is encoded alone, and each tile of an image is some placeholders. Its end is learned where
    its last words are.

    Raises:
        Broken: an image cannot be decoded, or is too long, or text holds the placeholder.
        DataError: an image is missing.
    """
    ids: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    places: list[int] = []
    references, digests, tiles = [], [], []
    length = 0
    for part in parts:
        if isinstance(part, Words):
            found = np.asarray(tokenizer.encode(part.text), dtype=np.int64)
            if (found == inputs.placeholder).any():
                raise Broken(f"has text that the tokenizer writes with id {inputs.placeholder}, the placeholder of images")
        else:
            content = fetch(part.reference)
            try:
                image = decode(content, inputs.channels, part.reference)
                counts = inputs.placeholders(*image.size)
            except ImageError as error:
                raise Broken(str(error)) from error
            except ValueError as error:
                raise Broken(f"{part.reference}: {error}; raise patches of the encoder") from error
            found = np.full(sum(counts), inputs.placeholder, dtype=np.int64)
            places += [length + before for before in accumulate(counts[:-1], initial=0)]
            references.append(part.reference)
            digests.append(xxhash.xxh3_64_intdigest(content))
            tiles.append(len(counts))
        ids.append(found)
        learned.append(np.full(len(found), isinstance(part, Words) and part.learned))
        length += len(found)
    if tokenizer.eos is not None:
        ids.append(np.array([tokenizer.eos], dtype=np.int64))
        learned.append(np.array([next(part.learned for part in reversed(parts) if isinstance(part, Words))]))
    return Encoded(np.concatenate(ids), np.concatenate(learned), places, references, digests, tiles)


def _write(
    examples: Examples,
    wanted: Wanted,
    tokenizer: Tokenizer,
    path: Path,
    name: str,
    workers: int,
    report: Callable[[str], None],
) -> None:
    try:
        owned = Partial(path, directory=True)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}; choose another workspace") from error
    try:
        facts = _write_files(examples, wanted, tokenizer, owned.path, name, workers, report)
        write_file(owned.path / FACTS, facts.as_json().encode())
        sync_path(owned.path)
        publish(owned.path, path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}; make room or choose another workspace") from error
    finally:
        owned.close()
    left = f", {facts.skipped} broken records left out" if facts.skipped else ""
    report(f"prepared {name}: {facts.images:,} images in {facts.tiles:,} tiles{left}, to {path}")


class _Files:
    """The files of a store but its tokens, and their checksums."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._files: dict[str, IO[bytes]] = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in FILES}
        self._digests = {name: xxhash.xxh3_128() for name in FILES}
        self.sizes = dict.fromkeys(FILES, 0)

    def add(self, name: str, values: "np.ndarray | list[int]") -> None:
        """Appends values."""
        data = np.asarray(values).astype(FILES[name]).tobytes()
        self._files[name].write(data)
        self._digests[name].update(data)
        self.sizes[name] += len(data)

    def finish(self) -> dict[str, str]:
        """Flushes all to the disk; checksums of what was written, but for the references: an image may move."""
        for file in self._files.values():
            sync(file)
        hidden = ("references", "ends")
        return {name: digest.hexdigest() for name, digest in self._digests.items() if name not in hidden}


def _write_files(
    examples: Examples,
    wanted: Wanted,
    tokenizer: Tokenizer,
    folder: Path,
    name: str,
    workers: int,
    report: Callable[[str], None],
) -> Facts:
    skips = Skips(wanted.skip)
    images = tiles = tokens = text = named = documents = 0
    counts: Counter[int] = Counter()
    dtype = dtype_for(max(tokenizer.vocab_size, wanted.inputs.placeholder + 1))
    with ExitStack() as stack:
        files = _Files(folder, stack)
        store = stack.enter_context(StoreWriter(folder / TOKENS, dtype=dtype, source=examples.what))
        files.add("firsts", [0])
        for found in _encoded(examples, wanted, tokenizer, skips, workers):
            store.add(found.ids, np.array([len(found.ids)]))
            files.add("learned", found.learned)
            files.add("places", [tokens + place for place in found.places])
            files.add("digests", np.array(found.digests, dtype=np.uint64))
            for reference, count in zip(found.references, found.tiles, strict=True):
                data = np.frombuffer(reference.encode(), dtype=np.uint8)
                tiles, named = tiles + count, named + len(data)
                files.add("references", data)
                files.add("ends", [named])
                files.add("firsts", [tiles])
            counts.update(found.ids[found.learned].tolist())
            tokens, images, text = tokens + len(found.ids), images + len(found.tiles), text + (not found.tiles)
            documents += 1
            if documents % _EVERY == 0:
                report(f"preparing {name}: {documents:,} documents, {images:,} images")
        if not documents:
            raise DataError(f"{examples.what} has no document in the split {wanted.split!r}")
        store.commit()
        checksums = files.finish()
    if skips.count:
        report(f"left out {skips.count} broken records; the first: {skips.first}")
    return Facts(
        version=VERSION,
        images=images,
        tiles=tiles,
        text=text,
        sizes=files.sizes,
        checksums=checksums,
        identity=identity(wanted.inputs),
        skipped=skips.count,
        counts={str(token): count for token, count in sorted(counts.items())},
    )


def _encoded(examples: Examples, wanted: Wanted, tokenizer: Tokenizer, skips: Skips, workers: int) -> Iterator[Encoded]:
    """Documents in their order; threads decode and encode them."""

    def one(name: str, record: Mapping[str, Any] | Broken) -> Encoded | str:
        """The document, or what is wrong with it."""
        place = getattr(record, "place", name)
        try:
            return encode(parts_of(record, wanted.fields, wanted.chat), tokenizer, wanted.inputs, examples.fetch)
        except Broken as broken:
            return str(broken) if broken is record else f"{place}: {broken}"
        except DataError as error:
            return f"{place}: {error}"

    waiting: deque[Future[Encoded | str]] = deque()
    with ThreadPoolExecutor(workers, "forge-images") as pool:
        try:
            for name, record in examples:
                if not in_split(name, wanted.split, wanted.held_out):
                    continue
                waiting.append(pool.submit(one, name, record))
                while len(waiting) >= _AHEAD * workers:
                    yield from _good(waiting.popleft().result(), skips)
            while waiting:
                yield from _good(waiting.popleft().result(), skips)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _good(found: Encoded | str, skips: Skips) -> Iterator[Encoded]:
    if isinstance(found, str):
        skips.broken(found)
    else:
        yield found
