"""A document as parts in order: words, and images by reference. `RecordTexts` has only the text, to train a tokenizer on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from typing import Any, Protocol

from forge_core.errors import DataError
from forge_data.sources.records.parts import in_split
from forge_data.sources.records.values import text_of
from forge_vlm.data.chat import Chat, Turn

MARKER = "<image>"
"""Marks the place of an image in the text of a record."""


@dataclass(frozen=True)
class Words:
    """Text. `learned`: the model is trained to produce it; `trusted`: it may spell control tokens."""

    text: str
    learned: bool = True
    trusted: bool = False


@dataclass(frozen=True)
class Picture:
    """An image, by the reference of its reader. `token`: it stands where the chat template wrote the token of an image."""

    reference: str
    token: bool = False


Parts = Sequence[Words | Picture]
Frames = tuple[tuple[float, str], ...]
"""(seconds, reference) of each frame of a video, in the order of time."""


class Clip:
    """Selected frames of a video.

    Attributes:
        told: the time of each frame stands before it.
    """

    def __init__(self, frames: Frames | Callable[[], Frames], told: bool = True) -> None:
        """`frames`: the frames, or a function that finds them on first use and may raise `BrokenRecord`."""
        self.told = told
        self._frames = frames

    @cached_property
    def frames(self) -> Frames:
        """The frames that were chosen.

        Raises:
            BrokenRecord: the clip cannot be read.
        """
        return self._frames() if callable(self._frames) else self._frames

    def parts(self) -> Parts:
        """The frames as parts of a document. Times are not learned.

        Raises:
            BrokenRecord: the clip cannot be read.
        """
        parts: list[Words | Picture] = []
        for seconds, reference in self.frames:
            parts += [Words(f"{seconds:.1f}s", learned=False)] if self.told else []
            parts.append(Picture(reference))
        return parts


class Record(dict[str, Any]):
    """A record with its place for messages: file, and line or number."""

    def __init__(self, fields: Mapping[str, Any], place: str) -> None:
        super().__init__(fields)
        self.place = place


class BrokenRecord(ValueError):
    """A record that cannot become a document; the message says why."""


@dataclass(frozen=True)
class Fields:
    """The fields of a record that are read.

    Attributes:
        text: field with text, and `MARKER` in place of each image. Without markers all images stand before the text.
        messages: field with turns, which is preferred to `text`: `{"role", "content"}`, or LLaVA's `{"from", "value"}`. A content
            is text, or a list of `{"type": "text", "text"}` and of images: `{"type": "image"}` for the next image of the field
            `images`, or `{"type": "image", "path"}` and `{"type": "image_url", "image_url": {"url"}}`, which name their own.
        images: field with the reference of an image, or a list of them. A record without it is text.
    """

    text: str = "text"
    messages: str = "messages"
    images: str = "image"


class Examples(Protocol):
    """Records with images, in a fixed order. They can be read repeatedly.

    Attributes:
        what: name for messages.
        fingerprint: changes with the records. A changed image is only noticed when it is read.
    """

    what: str

    @property
    def fingerprint(self) -> str: ...

    def __iter__(self) -> Iterator[tuple[str, "Mapping[str, Any] | BrokenRecord"]]:
        """(name, record) of each; its field of images has references or a `Clip`. A record that cannot be read is a
        `BrokenRecord`, whose message has its place."""
        ...

    def fetch(self, reference: str) -> bytes:
        """The file of an image.

        Raises:
            DataError: the file does not exist; names it.
        """
        ...


def is_conversation(record: "Mapping[str, Any] | BrokenRecord", fields: Fields) -> bool:
    """Whether a chat template writes the record, special tokens included."""
    return isinstance(record, Mapping) and record.get(fields.messages) is not None


def parts_of(record: "Mapping[str, Any] | BrokenRecord", fields: Fields, chat: Chat) -> list[Words | Picture]:
    """The parts of a record's document.

    Raises:
        BrokenRecord: it is broken, has neither text nor turns, has a different number of markers and images, or text that is not
            valid Unicode.
        DataError: the chat template refuses its turns.
    """
    if isinstance(record, BrokenRecord):
        raise record
    if not isinstance(record, Mapping):
        raise BrokenRecord("is not a record")
    images = _references(record.get(fields.images), fields.images)
    tokens = False
    if is_conversation(record, fields):
        words, images, tokens = _conversation(record, fields, chat, images)
    else:
        text = record.get(fields.text)
        if not isinstance(text, str):
            raise BrokenRecord(f"has neither turns in {fields.messages!r} nor text in {fields.text!r}")
        words = [Words(text)]
    if fault := next((fault for each in words if (fault := text_of(each.text)[1])), ""):
        raise BrokenRecord(f"has text that {fault}")
    if tokens:
        parts = [*map(_token, images), *words]
    else:
        if images and not any(MARKER in each.text for each in words):
            words = [Words(MARKER * len(images), learned=False), *words]
        parts = list(_placed(words, images))
    if not any(isinstance(part, Words) and part.learned for part in parts):
        raise BrokenRecord("has no text to learn")
    return parts


def _conversation(
    record: Mapping[str, Any], fields: Fields, chat: Chat, images: Sequence[Parts]
) -> tuple[list[Words], list[Parts], bool]:
    """The words of a conversation, its images in order, and whether the template wrote a token of its own for each image."""
    left = iter(images)
    placed: list[Parts] = []
    turns = []
    for turn in _turns(record[fields.messages], fields.messages):
        content = turn.content
        if isinstance(content, list):
            pieces = [_piece(piece, fields.messages) for piece in content]
            for own in (each for each in pieces if isinstance(each, Picture)):
                placed += [[own]] if own.reference else islice(left, 1)
            if chat.takes_pieces:
                content = [{"type": "image"} if isinstance(each, Picture) else {"type": "text", "text": each} for each in pieces]
            else:
                content = "".join(MARKER if isinstance(each, Picture) else each for each in pieces)
        elif isinstance(content, str):
            placed += islice(left, content.count(MARKER))
            if chat.takes_pieces and not chat.takes_text:
                content = _as_pieces(content)
        turns.append(replace(turn, content=content))
    tools = record.get("tools")
    words = [Words(*span) for span in chat.spans(turns, tools if isinstance(tools, list) else None)]
    tokens = bool(placed) and not any(MARKER in each.text for each in words)
    return words, [*placed, *left], tokens


def _as_pieces(text: str) -> list[dict[str, str]]:
    """Text with markers as a list of pieces, which some templates need."""
    pieces: list[dict[str, str]] = []
    for place, part in enumerate(text.split(MARKER)):
        pieces += [{"type": "image"}] if place else []
        pieces += [{"type": "text", "text": part}] if part else []
    return pieces


def _placed(words: Sequence[Words], images: Sequence[Parts]) -> Iterator[Words | Picture]:
    """Words cut at the markers, with an image, or the frames of a clip, in place of each marker."""
    markers = sum(each.text.count(MARKER) for each in words)
    if markers != len(images):
        raise BrokenRecord(f"has {markers} {MARKER} and {len(images)} images")
    left = iter(images)
    for each in words:
        for place, text in enumerate(each.text.split(MARKER)):
            if place:
                yield from next(left)
            if text:
                yield replace(each, text=text)


def _token(image: Parts) -> Picture:
    if len(image) != 1 or not isinstance(image[0], Picture):
        raise BrokenRecord(
            f"has a clip where the chat template writes the token of one image; write {MARKER} in its text instead"
        )
    return replace(image[0], token=True)


def _references(value: Any, field: str) -> list[Parts]:
    """The parts that replace each marker."""
    values = [] if value is None else [value] if isinstance(value, str | Clip) else value
    if not isinstance(values, list) or not all(isinstance(each, str | Clip) and each for each in values):
        raise BrokenRecord(f"has in {field!r} {value!r}; expected the name of an image, or a list of names")
    return [each.parts() if isinstance(each, Clip) else [_picture(each)] for each in values]


def _picture(reference: str) -> Picture:
    """An image by its name, which must be the name of a file."""
    if fault := text_of(reference)[1]:
        raise BrokenRecord(f"names an image {reference!r}, which {fault}")
    if "\0" in reference:
        raise BrokenRecord(f"names an image {reference!r}, which holds a NUL")
    if reference.startswith("data:"):
        raise BrokenRecord(f"has an image inside the record, {reference[:30]!r}...; write it to a file, and its name here")
    return Picture(reference)


def _turns(value: Any, field: str) -> list[Turn]:
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise BrokenRecord(f"has in {field!r} no list of turns")
    return [_turn(turn, field) for turn in value]


def _turn(turn: Mapping[str, Any], field: str) -> Turn:
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    role = {"human": "user", "gpt": "assistant"}.get(role, role) if isinstance(role, str) else None
    more = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value") and value is not None}
    if role is None or not (isinstance(content, str | list) or (content is None and more)):
        raise BrokenRecord(f"has in {field!r} a turn without role or content: {str(dict(turn))[:80]}")
    return Turn(role, content, more)


def _piece(piece: Any, field: str) -> str | Picture:
    """The text of a piece, or its image, with an empty name for the next image of the field of images."""
    kind = piece.get("type") if isinstance(piece, dict) else None
    if kind == "text" and isinstance(piece.get("text"), str):
        return piece["text"]
    if kind in ("image", "image_url"):
        named = [piece[name] for name in ("image", "path", "url", "image_url") if piece.get(name) is not None]
        named = [each.get("url") if isinstance(each, dict) else each for each in named]
        if not named and kind == "image":
            return Picture("")
        if len(named) == 1 and isinstance(named[0], str) and named[0]:
            return _picture(named[0])
    raise BrokenRecord(f"has in {field!r} a piece that is neither text nor an image: {str(piece)[:80]}")


@dataclass(frozen=True)
class RecordTexts:
    """The text of documents, without their images, as `Texts`. Broken records are left out; preparing the source reports them."""

    examples: Examples
    fields: Fields
    chat: Chat
    split: str
    held_out: float

    @property
    def fingerprint(self) -> str:
        """Changes with the records and with how they are read."""
        made = f"{self.fields} {self.chat.identity} {self.split} {self.held_out}"
        return sha256(f"{self.examples.fingerprint} {made}".encode()).hexdigest()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(name, text) of every document."""
        for name, record in self.examples:
            if in_split(name, self.split, self.held_out):
                with suppress(BrokenRecord, DataError):
                    parts = parts_of(record, self.fields, self.chat)
                    yield name, "".join(part.text for part in parts if isinstance(part, Words))
