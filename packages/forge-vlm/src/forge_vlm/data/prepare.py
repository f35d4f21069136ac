"""Writes documents with images to a store: tokens, placeholders, and which tokens are learned. Decodes every image once.

A record is broken if it cannot become a document, if an image cannot be decoded, or if its document is longer than a row. Broken
records are listed and counted, and skipped as long as `skip` allows it. Faults that can be found without images are reported
before any image is decoded.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_core.files import publish, sync, sync_path, write_file
from forge_core.protocols.data import SourceContext, Tokenizer
from forge_data.chat.conversation import Chat
from forge_data.sources.records import Skips, in_split, name_skipped, skipped_file
from forge_data.sources.store_writer import StoreWriter, dtype_for
from forge_data.storage.workspace import Partial, locked
from forge_data.tokenizers.control import identity_of
from forge_vlm.data.documents import MARKER, BrokenRecord, Clip, Examples, Fields, Picture, Words, is_conversation, parts_of
from forge_vlm.data.inputs import ImageInputs, identity_of_inputs
from forge_vlm.data.processor_inputs import Made, ProcessorInputs
from forge_vlm.data.store import FACTS, NO_TIME, TOKENS, VERSION, IllustratedStore, ImageStoreFacts, files_of
from forge_vlm.images.pixels import ImageError, decode

ENCODING = 2
"""Version of the rules that turn a document into ids. Stores of other versions are not reused."""
_DOCUMENTS_IN_FLIGHT = 64
"""Documents in progress per thread."""
_MAX_ADDED_TOKENS = 16
"""Maximum number of tokens that a tokenizer adds to a document, such as its end."""
_REPORT_EVERY = 10_000
"""Documents between two progress messages."""


@dataclass(frozen=True)
class Preparation:
    """How records become documents.

    Attributes:
        fields: the fields of a record that are read.
        chat: template of conversations.
        inputs: how an image becomes placeholders and pixels.
        split, held_out: see `forge_data.sources.records.in_split`.
        skip: maximum number of broken records to skip.
        longest: maximum number of tokens of a document, which is the length of a row.
        too_long: "error" counts a longer document as broken, "skip" skips it, "truncate" truncates it.
    """

    fields: Fields
    chat: Chat
    inputs: "ImageInputs | ProcessorInputs"
    split: str = "all"
    held_out: float = 0.05
    skip: int = 0
    longest: int = 1 << 62
    too_long: str = "error"


class DocumentTooLong(BrokenRecord):
    """A document that does not fit into a row."""


def prepare(examples: Examples, wanted: Preparation, context: SourceContext, name: str) -> IllustratedStore:
    """Returns the store of these records in the workspace, and writes it if it does not exist.

    Raises:
        DataError: there is no tokenizer, no document, or too many broken records, or the workspace cannot be written.
    """
    tokenizer = context.tokenizer
    if tokenizer is None:
        raise DataError(f"source {name!r} needs a tokenizer for its text; add [data.tokenizer] with name = 'bpe' or 'bytes'")
    made = (
        f"{wanted.fields} {wanted.chat.identity} {identity_of_inputs(wanted.inputs)} {wanted.split} {wanted.held_out} {ENCODING}"
    )
    known = f"{VERSION} {examples.fingerprint} {identity_of(tokenizer)} {made}"
    # If all documents fit, the store is the same for every longer row, so its name does not depend on the row.
    whole, fitted = (
        context.workspace / "stores" / f"{name}-{sha256(f'{known}{more}'.encode()).hexdigest()[:16]}"
        for more in ("", f" {wanted.longest} {wanted.too_long}")
    )
    vocab_size = max(tokenizer.vocab_size, wanted.inputs.placeholder + 1)

    def existing() -> IllustratedStore | None:
        for path in (whole, fitted):
            if (path / FACTS).exists():
                is_there = getattr(examples, "is_there", None)
                store = IllustratedStore(path, wanted.inputs, examples.fetch, tokenizer.fingerprint, vocab_size, is_there)
                if store.longest <= wanted.longest:
                    return store
        return None

    store = existing()
    if store is None:
        with locked(context.workspace):
            store = existing()
            if store is None:
                _write(examples, wanted, tokenizer, (whole, fitted), name, context.workers, context.report)
                store = existing()
    assert store is not None, "the store was just written"
    if store.facts.skipped > wanted.skip:
        raise DataError(
            f"{store.facts.skipped} records of {examples.what} are broken, but skip allows {wanted.skip}; fix the records listed "
            f"in {skipped_file(store.path)}, or raise skip"
        )
    return store


@dataclass(frozen=True)
class Encoded:
    """One document: ids, which ids are learned, and where each tile begins; references, digests, tile counts and seconds of its
    images (negative for images that are no frames); whether it was truncated."""

    ids: np.ndarray
    learned: np.ndarray
    places: list[int]
    references: list[str]
    digests: list[int]
    tiles: list[int]
    times: list[float]
    cut: bool = False


def encode(
    parts: "list[Words | Picture]",
    tokenizer: Tokenizer,
    inputs: "ImageInputs | ProcessorInputs",
    fetch: Callable[[str], bytes] | None,
    bare: bool = True,
    closed: bool = True,
) -> Encoded:
    """Returns a document's tokens: its text, encoded as a whole, and placeholders for each tile of an image.

    The end of the document is learned if its last words are.

    Args:
        parts: parts of the document.
        tokenizer: encodes the text.
        inputs: how an image becomes placeholders.
        fetch: reads an image; if None, every image counts as the shortest possible image.
        bare: the text contains no special tokens, so the tokenizer's prefix and suffix are added. Other text gets the
            end-of-document token only if it is missing.
        closed: adds the end of the document; False for a prompt that a model continues.

    Raises:
        BrokenRecord: an image cannot be decoded or is too elongated, or the text contains the placeholder.
        DataError: an image is missing.
    """
    if isinstance(inputs, ProcessorInputs):
        return _encode_with_processor(parts, tokenizer, inputs, fetch, bare, closed)
    pictures = [_picture(part, inputs, fetch) for part in parts if isinstance(part, Picture)]
    ids, learned, before = _text_of(parts, tokenizer, inputs.placeholder)
    prefix, closing, last = _ends(parts, ids, tokenizer, bare, closed, len(ids) in before)
    sizes = [sum(counts) for _, _, counts in pictures]
    # An image that stands before id n of the text starts after n ids and the placeholders of earlier images.
    starts = np.array(before, dtype=np.int64) + np.cumsum([0, *sizes], dtype=np.int64)[:-1] + len(prefix)
    at = np.repeat(before, sizes).astype(np.int64)
    text = np.insert(ids, at, inputs.placeholder)
    said = np.insert(learned, at, False)
    return Encoded(
        np.concatenate([np.array(prefix, dtype=np.int64), text, np.array(closing, dtype=np.int64)]),
        np.concatenate([np.zeros(len(prefix), dtype=bool), said, np.full(len(closing), last)]),
        [start + tile for start, (_, _, counts) in zip(starts.tolist(), pictures, strict=True) for tile in _tile_starts(counts)],
        [reference for reference, _, _ in pictures],
        [digest for _, digest, _ in pictures],
        [len(counts) for _, _, counts in pictures],
        [NO_TIME if part.seconds is None else part.seconds for part in parts if isinstance(part, Picture)],
    )


def _ends(
    parts: "Sequence[Words | Picture]", ids: np.ndarray, tokenizer: Tokenizer, bare: bool, closed: bool, open_end: bool
) -> tuple[Sequence[int], list[int], bool]:
    """Returns the ids in front of the text of a document and behind it, and whether those behind it are learned.

    Args:
        parts: parts of the document.
        ids: ids of the text.
        tokenizer: encodes the text.
        bare, closed: see `encode`.
        open_end: whether the document ends with an image.
    """
    prefix, suffix = (tokenizer.prefix, tokenizer.suffix) if bare else ((), ())
    ended = not bare and bool(len(ids)) and ids[-1] == tokenizer.eos and not open_end
    closing = [*suffix, *([] if tokenizer.eos is None or ended else [tokenizer.eos])] if closed else []
    return prefix, closing, next((part.learned for part in reversed(parts) if isinstance(part, Words)), False)


def _encode_with_processor(
    parts: "list[Words | Picture]",
    tokenizer: Tokenizer,
    inputs: ProcessorInputs,
    fetch: Callable[[str], bytes] | None,
    bare: bool,
    closed: bool,
) -> Encoded:
    """See `encode`: the processor of a class of transformers writes the placeholders."""
    digests: list[int] = []

    def made(part: Picture) -> Made:
        assert fetch is not None
        content = fetch(part.reference)
        digests.append(xxhash.xxh3_64_intdigest(content))
        try:
            return inputs.made(decode(content, inputs.channels, part.reference))
        except ImageError as error:
            raise BrokenRecord(str(error)) from error

    ids, learned, starts = inputs.encode(parts, tokenizer, None if fetch is None else made)
    prefix, closing, last = _ends(parts, ids, tokenizer, bare, closed, isinstance(parts[-1], Picture) if parts else False)
    pictures = [part for part in parts if isinstance(part, Picture)]
    return Encoded(
        np.concatenate([np.array(prefix, dtype=np.int64), ids, np.array(closing, dtype=np.int64)]),
        np.concatenate([np.zeros(len(prefix), dtype=bool), learned, np.full(len(closing), last)]),
        [len(prefix) + start for own in starts for start in own],
        [part.reference for part in pictures],
        digests if fetch is not None else [0] * len(pictures),
        [len(own) for own in starts],
        [NO_TIME] * len(pictures),
    )


def _tile_starts(counts: list[int]) -> list[int]:
    return list(accumulate(counts[:-1], initial=0))


def _picture(part: Picture, inputs: ImageInputs, fetch: Callable[[str], bytes] | None) -> tuple[str, int, list[int]]:
    """Returns reference and digest of an image, and the number of placeholders of each of its tiles."""
    if fetch is None:
        return part.reference, 0, [inputs.fewest]
    content = fetch(part.reference)
    try:
        image = decode(content, inputs.channels, part.reference)
        counts = inputs.placeholders(*image.size)
    except ImageError as error:
        raise BrokenRecord(str(error)) from error
    except ValueError as error:
        raise BrokenRecord(f"{part.reference}: {error}; raise encoder.patches") from error
    return part.reference, xxhash.xxh3_64_intdigest(content), list(counts)


def _text_of(parts: "list[Words | Picture]", tokenizer: Tokenizer, placeholder: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Returns the ids of a document's text, which ids are learned, and the index of the id that each image precedes.

    If the tokenizer has a token for images, that token is written in place of each image (here or by the chat template) and then
    removed. Otherwise an image splits the text as such a token would.

    Raises:
        BrokenRecord: the text contains the placeholder, or the chat template does not write it once for each image.
    """
    by_token = [isinstance(part, Picture) and part.token for part in parts]
    spelled = any(isinstance(part, Picture) and not part.token for part in parts) and _spells(tokenizer, placeholder)
    pieces = [(MARKER if spelled else "", True) if isinstance(part, Picture) else (part.text, part.trusted) for part in parts]
    pieces = [("", True) if token else piece for piece, token in zip(pieces, by_token, strict=True)]
    stands = [number for number, part in enumerate(parts) if isinstance(part, Picture) and not part.token]
    ids, places = tokenizer.encode_pieces(pieces, () if spelled else stands)
    kinds = np.cumsum([0, *(isinstance(part, Words) and part.learned for part in parts)])
    learned = kinds[places[:, 1] + 1] > kinds[places[:, 0]]
    taken = ids == placeholder
    held = np.flatnonzero(taken)
    if any(by_token):
        if len(held) != sum(by_token) or stands:
            raise BrokenRecord(
                f"has {sum(by_token)} images, but the template writes the placeholder token {placeholder} {len(held)} times; "
                f"set `placeholder` to the id that the template writes, or write {MARKER} in the template"
            )
        before = held - np.arange(len(held))
    elif spelled and sorted(places[held, 0].tolist()) == stands:
        before = held - np.arange(len(held))
    elif len(held):
        raise BrokenRecord(f"has text that the tokenizer encodes as id {placeholder}, the placeholder of images")
    else:
        before = np.searchsorted(places[:, 0], stands)
    return ids[~taken], learned[~taken], before.tolist()


def _spells(tokenizer: Tokenizer, placeholder: int) -> bool:
    """Whether the tokenizer encodes the marker of records as one token, the placeholder of images."""
    return tokenizer.encode_pieces([(MARKER, True)])[0].tolist() == [placeholder]


def truncate(document: Encoded, longest: int, placeholder: int) -> Encoded:
    """Returns the first `longest` tokens of a document, without an image that does not fit completely.

    Raises:
        TooLong: no remaining token is learned.
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
        raise DocumentTooLong(f"has no text to train on in its first {longest} tokens")
    return Encoded(
        document.ids[:stop],
        document.learned[:stop],
        document.places[:tiles],
        document.references[:images],
        document.digests[:images],
        document.tiles[:images],
        document.times[:images],
        cut=True,
    )


def _write(
    examples: Examples,
    wanted: Preparation,
    tokenizer: Tokenizer,
    paths: tuple[Path, Path],
    name: str,
    workers: int,
    report: Callable[[str], None],
) -> None:
    """Writes the store to the first of `paths` if all documents fit into a row, otherwise to the second."""
    path, fitted = paths
    try:
        owned = Partial(path, directory=True)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}; set another workspace") from error
    skips = Skips(wanted.skip)
    try:
        facts = _write_files(examples, wanted, tokenizer, owned.path, name, workers, report, skips)
        path = fitted if facts.too_long or (path / FACTS).exists() else path
        if skips.messages:
            name_skipped(_what_was_left_out(facts, wanted), skips.messages, path, report)
        write_file(owned.path / FACTS, facts.as_json().encode())
        sync_path(owned.path)
        publish(owned.path, path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}; free space or set another workspace") from error
    finally:
        owned.close()
    cut = (
        f", {facts.too_long} documents cut to {wanted.longest} tokens" if facts.too_long and wanted.too_long == "truncate" else ""
    )
    left = f", {_what_was_left_out(facts, wanted)} left out" if skips.messages else ""
    report(f"prepared {name}: {facts.images:,} images in {facts.tiles:,} tiles{cut}{left}, to {path}")


def _what_was_left_out(facts: ImageStoreFacts, wanted: Preparation) -> str:
    broken = f"{facts.skipped} broken records"
    return (
        broken if wanted.too_long != "skip" else f"{broken} and {facts.too_long} documents of more than {wanted.longest} tokens"
    )


class _Files:
    """The files of a store except its tokens, and their checksums."""

    def __init__(self, folder: Path, stack: ExitStack, timed: bool) -> None:
        self._dtypes = files_of(timed)
        self._files: dict[str, IO[bytes]] = {
            name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in self._dtypes
        }
        self._digests = {name: xxhash.xxh3_128() for name in self._dtypes}
        self.sizes = dict.fromkeys(self._dtypes, 0)

    def add(self, name: str, values: "np.ndarray | list[int] | list[float]") -> None:
        """Appends values."""
        data = np.asarray(values).astype(self._dtypes[name]).tobytes()
        self._files[name].write(data)
        self._digests[name].update(data)
        self.sizes[name] += len(data)

    def finish(self) -> dict[str, str]:
        """Flushes all files to disk and returns their checksums; references have none, because images may move."""
        for file in self._files.values():
            sync(file)
        hidden = ("references", "ends")
        return {name: digest.hexdigest() for name, digest in self._digests.items() if name not in hidden}


def _write_files(
    examples: Examples,
    wanted: Preparation,
    tokenizer: Tokenizer,
    folder: Path,
    name: str,
    workers: int,
    report: Callable[[str], None],
    skips: Skips,
) -> ImageStoreFacts:
    _refuse_early(examples, wanted, tokenizer)
    images = tiles = tokens = text = named = documents = too_long = longest = 0
    counts: Counter[int] = Counter()
    dtype = dtype_for(max(tokenizer.vocab_size, wanted.inputs.placeholder + 1))
    with ExitStack() as stack:
        files = _Files(folder, stack, wanted.inputs.timed)
        store = stack.enter_context(StoreWriter(folder / TOKENS, dtype=dtype, source=examples.what))
        files.add("firsts", [0])
        for document in _encoded(examples, wanted, tokenizer, workers):
            if isinstance(document, LeftOut):
                too_long += document.too_long
                (skips.left_out if document.too_long and wanted.too_long == "skip" else skips.broken)(document.message)
                continue
            too_long, longest = too_long + document.cut, max(longest, len(document.ids))
            store.add(document.ids, np.array([len(document.ids)]))
            files.add("learned", document.learned)
            files.add("places", [tokens + place for place in document.places])
            files.add("digests", np.array(document.digests, dtype=np.uint64))
            if wanted.inputs.timed:
                files.add("times", document.times)
            for reference, count in zip(document.references, document.tiles, strict=True):
                data = np.frombuffer(reference.encode(), dtype=np.uint8)
                tiles, named = tiles + count, named + len(data)
                files.add("references", data)
                files.add("ends", [named])
                files.add("firsts", [tiles])
            counts.update(document.ids[document.learned].tolist())
            tokens, images, text = tokens + len(document.ids), images + len(document.tiles), text + (not document.tiles)
            documents += 1
            if documents % _REPORT_EVERY == 0:
                report(f"preparing {name}: {documents:,} documents, {images:,} images")
        if not documents:
            raise DataError(f"{examples.what} has no document in the split {wanted.split!r}; choose another split")
        store.commit()
        checksums = files.finish()
    return ImageStoreFacts(
        version=VERSION,
        images=images,
        tiles=tiles,
        text=text,
        sizes=files.sizes,
        checksums=checksums,
        identity=identity_of_inputs(wanted.inputs),
        skipped=skips.count,
        counts={str(token): count for token, count in sorted(counts.items())},
        too_long=too_long,
        longest=longest,
    )


@dataclass(frozen=True)
class LeftOut:
    """A record that was skipped, and why."""

    message: str
    too_long: bool


def _fault(name: str, record: Mapping[str, Any] | BrokenRecord, error: BrokenRecord | DataError) -> LeftOut:
    message = str(error) if error is record else f"{getattr(record, 'place', name)}: {error}"
    return LeftOut(message, isinstance(error, DocumentTooLong))


def _refuse_early(examples: Examples, wanted: Preparation, tokenizer: Tokenizer) -> None:
    """Counts the faults that can be found without images, before any image is decoded.

    Raises:
        DataError: there are more faults than `skip` allows.
    """
    skips = Skips(wanted.skip)
    for name, record in examples:
        if not in_split(name, wanted.split, wanted.held_out):
            continue
        if isinstance(record, Mapping) and isinstance(record.get(wanted.fields.images), Clip):
            continue  # finding the frames of a clip needs reading its file
        try:
            parts = parts_of(record, wanted.fields, wanted.chat)
            if wanted.too_long == "error":
                _refuse_long(parts, wanted, tokenizer, not is_conversation(record, wanted.fields))
        except (BrokenRecord, DataError) as error:
            skips.broken(_fault(name, record, error).message)


def _refuse_long(parts: "list[Words | Picture]", wanted: Preparation, tokenizer: Tokenizer, bare: bool) -> None:
    """Refuses a document that is too long even with the shortest images.

    Raises:
        TooLong: the document is too long.
    """
    images = sum(isinstance(part, Picture) for part in parts)
    size = sum(len(part.text.encode(errors="replace")) for part in parts if isinstance(part, Words))
    if size + images * wanted.inputs.fewest + _MAX_ADDED_TOKENS <= wanted.longest:
        return  # a token has at least one byte of text
    length = len(encode(parts, tokenizer, wanted.inputs, None, bare).ids)
    if length > wanted.longest:
        raise _too_long(length, wanted, "at least " if images and wanted.inputs.varies else "")


def _too_long(length: int, wanted: Preparation, about: str = "") -> DocumentTooLong:
    return DocumentTooLong(
        f"has {about}{length} tokens, images included, and a row has {wanted.longest}; shorten it, raise data.sequence_length, "
        "or set too_long = 'skip' or 'truncate' in the source"
    )


def _encoded(examples: Examples, wanted: Preparation, tokenizer: Tokenizer, workers: int) -> Iterator[Encoded | LeftOut]:
    """Yields documents in order; threads decode and encode them."""

    def one(name: str, record: Mapping[str, Any] | BrokenRecord) -> Encoded | LeftOut:
        """Returns the document, or its fault."""
        try:
            parts = parts_of(record, wanted.fields, wanted.chat)
            bare = not is_conversation(record, wanted.fields)
            if wanted.too_long != "truncate":
                _refuse_long(parts, wanted, tokenizer, bare)
            document = encode(parts, tokenizer, wanted.inputs, examples.fetch, bare)
            if len(document.ids) <= wanted.longest:
                return document
            if wanted.too_long == "truncate":
                return truncate(document, wanted.longest, wanted.inputs.placeholder)
            raise _too_long(len(document.ids), wanted)
        except (BrokenRecord, DataError) as error:
            return _fault(name, record, error)

    waiting: deque[Future[Encoded | LeftOut]] = deque()
    with ThreadPoolExecutor(workers, "forge-images") as pool:
        try:
            for name, record in examples:
                if not in_split(name, wanted.split, wanted.held_out):
                    continue
                waiting.append(pool.submit(one, name, record))
                while len(waiting) >= _DOCUMENTS_IN_FLIGHT * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
