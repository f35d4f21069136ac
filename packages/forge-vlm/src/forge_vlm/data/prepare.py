"""Documents with images to a store: tokens, placeholders and what is learned; every image is decoded once, so none is a surprise.

A record that makes no document, whose image cannot be decoded, or whose document is longer than a row is broken: it is named,
counted, and left out while `skip` allows it. What is known without an image is known before any image is decoded.
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
from forge_data.sources.records.parts import Skips, in_split, name_skipped, skipped_file
from forge_data.storage.partial import Partial
from forge_data.storage.workspace_lock import locked
from forge_data.store.writer import StoreWriter, dtype_for
from forge_vlm.data.chat import Chat
from forge_vlm.data.documents import Broken, Clip, Examples, Fields, Picture, Words, parts_of
from forge_vlm.data.inputs import ImageInputs, identity
from forge_vlm.data.store import FACTS, FILES, TOKENS, VERSION, Facts, IllustratedStore
from forge_vlm.images.decoding import ImageError, decode

_AHEAD = 64
"""Documents that are worked on at a time, for each thread."""
_ADDED = 16
"""Tokens that a tokenizer adds to a document at most, such as the one of its end."""
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
        longest: tokens that a document may have, those of a row.
        too_long: what becomes of a longer one: "error" counts it as broken, "skip" leaves it out, "truncate" cuts it.
    """

    fields: Fields
    chat: Chat
    inputs: ImageInputs
    split: str = "all"
    held_out: float = 0.05
    skip: int = 0
    longest: int = 1 << 62
    too_long: str = "error"


class TooLong(Broken):
    """A document that fits no row."""


def prepared(examples: Examples, wanted: Wanted, context: SourceContext, name: str) -> IllustratedStore:
    """The store of these records in the workspace; made when it is not there yet.

    Raises:
        DataError: no tokenizer, no document, too many broken records, or a workspace that cannot be written.
    """
    tokenizer = context.tokenizer
    if tokenizer is None:
        raise DataError(f"source {name!r} has text and needs a tokenizer; add [data.tokenizer] with name = 'bpe' or 'bytes'")
    made = f"{wanted.fields} {wanted.chat.template!r} {identity(wanted.inputs)} {wanted.split} {wanted.held_out}"
    known = f"{VERSION} {examples.fingerprint} {tokenizer.fingerprint} {made}"
    # A store whose documents all fit is the same for every longer row and needs no name of its own.
    whole, fitted = (
        context.workspace / "stores" / f"{name}-{sha256(f'{known}{more}'.encode()).hexdigest()[:16]}"
        for more in ("", f" {wanted.longest} {wanted.too_long}")
    )
    vocab_size = max(tokenizer.vocab_size, wanted.inputs.placeholder + 1)

    def found() -> IllustratedStore | None:
        for path in (whole, fitted):
            if (path / FACTS).exists():
                store = IllustratedStore(path, wanted.inputs, examples.fetch, tokenizer.fingerprint, vocab_size)
                if store.longest <= wanted.longest:
                    return store
        return None

    store = found()
    if store is None:
        with locked(context.workspace):
            store = found()
            if store is None:
                _write(examples, wanted, tokenizer, (whole, fitted), name, context.workers, context.report)
                store = found()
    assert store is not None, "it was just written"
    if store.facts.skipped > wanted.skip:
        raise DataError(
            f"{store.facts.skipped} records of {examples.what} are broken, and `skip` allows {wanted.skip}; "
            f"{skipped_file(store.path)} names them"
        )
    return store


@dataclass(frozen=True)
class Encoded:
    """One document: ids, which of them are learned, where each tile begins; references, digests and tiles of its images; whether
    its end was cut off."""

    ids: np.ndarray
    learned: np.ndarray
    places: list[int]
    references: list[str]
    digests: list[int]
    tiles: list[int]
    cut: bool = False


def encode(
    parts: "list[Words | Picture]", tokenizer: Tokenizer, inputs: ImageInputs, fetch: Callable[[str], bytes] | None
) -> Encoded:
    """A document's tokens; each text is encoded alone, and each tile of an image is some placeholders. Its end is learned where
    its last words are. Without `fetch` each image is as short as an image can be.

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
        elif fetch is None:
            found = np.full(inputs.fewest, inputs.placeholder, dtype=np.int64)
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


def truncated(document: Encoded, longest: int, placeholder: int) -> Encoded:
    """The first `longest` tokens of a document, without an image that does not fit as a whole.

    Raises:
        TooLong: nothing that is left is learned.
    """
    stop, images, tiles = longest, 0, 0
    starts = [document.places[before] for before in accumulate(document.tiles[:-1], initial=0)] if document.tiles else []
    for start, count in zip(starts, document.tiles, strict=True):
        others = np.flatnonzero(document.ids[start:] != placeholder)
        after = start + int(others[0]) if len(others) else len(document.ids)
        after = min([after, *(other for other in starts[images + 1 : images + 2])])
        if after > longest:
            stop = min(stop, start)
            break
        images, tiles = images + 1, tiles + count
    if not document.learned[1:stop].any():
        raise TooLong(f"has nothing to learn in its first {longest} tokens")
    return Encoded(
        document.ids[:stop],
        document.learned[:stop],
        document.places[:tiles],
        document.references[:images],
        document.digests[:images],
        document.tiles[:images],
        cut=True,
    )


def _write(
    examples: Examples,
    wanted: Wanted,
    tokenizer: Tokenizer,
    paths: tuple[Path, Path],
    name: str,
    workers: int,
    report: Callable[[str], None],
) -> None:
    """Writes the first of `paths` where all documents fit into a row, else the second."""
    path, fitted = paths
    try:
        owned = Partial(path, directory=True)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}; choose another workspace") from error
    skips = Skips(wanted.skip)
    try:
        facts = _write_files(examples, wanted, tokenizer, owned.path, name, workers, report, skips)
        path = fitted if facts.too_long or (path / FACTS).exists() else path
        if skips.messages:
            name_skipped(_left(facts, wanted), skips.messages, path, report)
        write_file(owned.path / FACTS, facts.as_json().encode())
        sync_path(owned.path)
        publish(owned.path, path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}; make room or choose another workspace") from error
    finally:
        owned.close()
    cut = (
        f", {facts.too_long} documents cut to {wanted.longest} tokens" if facts.too_long and wanted.too_long == "truncate" else ""
    )
    left = f", {_left(facts, wanted)} left out" if skips.messages else ""
    report(f"prepared {name}: {facts.images:,} images in {facts.tiles:,} tiles{cut}{left}, to {path}")


def _left(facts: Facts, wanted: Wanted) -> str:
    broken = f"{facts.skipped} broken records"
    return (
        broken if wanted.too_long != "skip" else f"{broken} and {facts.too_long} documents of more than {wanted.longest} tokens"
    )


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
    skips: Skips,
) -> Facts:
    _refuse_early(examples, wanted, tokenizer)
    images = tiles = tokens = text = named = documents = too_long = longest = 0
    counts: Counter[int] = Counter()
    dtype = dtype_for(max(tokenizer.vocab_size, wanted.inputs.placeholder + 1))
    with ExitStack() as stack:
        files = _Files(folder, stack)
        store = stack.enter_context(StoreWriter(folder / TOKENS, dtype=dtype, source=examples.what))
        files.add("firsts", [0])
        for found in _encoded(examples, wanted, tokenizer, workers):
            if isinstance(found, Fault):
                too_long += found.too_long
                (skips.left_out if found.too_long and wanted.too_long == "skip" else skips.broken)(found.message)
                continue
            too_long, longest = too_long + found.cut, max(longest, len(found.ids))
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
        too_long=too_long,
        longest=longest,
    )


@dataclass(frozen=True)
class Fault:
    """Why a record is left out."""

    message: str
    too_long: bool


def _fault(name: str, record: Mapping[str, Any] | Broken, error: Broken | DataError) -> Fault:
    message = str(error) if error is record else f"{getattr(record, 'place', name)}: {error}"
    return Fault(message, isinstance(error, TooLong))


def _refuse_early(examples: Examples, wanted: Wanted, tokenizer: Tokenizer) -> None:
    """Counts the faults that are known without an image, so that many images are not decoded in vain.

    Raises:
        DataError: there are more than `skip` allows.
    """
    skips = Skips(wanted.skip)
    for name, record in examples:
        if not in_split(name, wanted.split, wanted.held_out):
            continue
        if isinstance(record, Mapping) and isinstance(record.get(wanted.fields.images), Clip):
            continue  # which frames a clip has is read from its file
        try:
            parts = parts_of(record, wanted.fields, wanted.chat)
            if wanted.too_long == "error":
                _refuse_long(parts, wanted, tokenizer)
        except (Broken, DataError) as error:
            skips.broken(_fault(name, record, error).message)


def _refuse_long(parts: "list[Words | Picture]", wanted: Wanted, tokenizer: Tokenizer) -> None:
    """Refuses a document that is too long whatever its images are like.

    Raises:
        TooLong: it is.
    """
    images = sum(isinstance(part, Picture) for part in parts)
    size = sum(len(part.text.encode(errors="replace")) for part in parts if isinstance(part, Words))
    if size + images * wanted.inputs.fewest + _ADDED <= wanted.longest:
        return  # a token is at least a byte of text
    length = len(encode(parts, tokenizer, wanted.inputs, None).ids)
    if length > wanted.longest:
        raise _too_long(length, wanted, "at least " if images and wanted.inputs.varies else "")


def _too_long(length: int, wanted: Wanted, about: str = "") -> TooLong:
    return TooLong(
        f"has {about}{length} tokens, images included, and a row has {wanted.longest}; shorten it, raise data.sequence_length, "
        "or set too_long = 'skip' or 'truncate' in the source"
    )


def _encoded(examples: Examples, wanted: Wanted, tokenizer: Tokenizer, workers: int) -> Iterator[Encoded | Fault]:
    """Documents in their order; threads decode and encode them."""

    def one(name: str, record: Mapping[str, Any] | Broken) -> Encoded | Fault:
        """The document, or what is wrong with it."""
        try:
            parts = parts_of(record, wanted.fields, wanted.chat)
            if wanted.too_long != "truncate":
                _refuse_long(parts, wanted, tokenizer)
            document = encode(parts, tokenizer, wanted.inputs, examples.fetch)
            if len(document.ids) <= wanted.longest:
                return document
            if wanted.too_long == "truncate":
                return truncated(document, wanted.longest, wanted.inputs.placeholder)
            raise _too_long(len(document.ids), wanted)
        except (Broken, DataError) as error:
            return _fault(name, record, error)

    waiting: deque[Future[Encoded | Fault]] = deque()
    with ThreadPoolExecutor(workers, "forge-images") as pool:
        try:
            for name, record in examples:
                if not in_split(name, wanted.split, wanted.held_out):
                    continue
                waiting.append(pool.submit(one, name, record))
                while len(waiting) >= _AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
