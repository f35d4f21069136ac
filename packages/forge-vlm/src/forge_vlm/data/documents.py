"""Documents as sequences of words and image references. `RecordTexts` yields only the text, for training a tokenizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from math import inf
from typing import Any, Protocol

from forge_core.errors import DataError
from forge_data.chat.conversation import Chat, Turn
from forge_data.sources.records import in_split, text_of

MARKER = "<image>"
"""Marks the place of an image in the text of a record."""


@dataclass(frozen=True)
class Words:
    """Text. `learned`: the model is trained to produce it; `trusted`: it may contain control tokens."""

    text: str
    learned: bool = True
    trusted: bool = False


@dataclass(frozen=True)
class Picture:
    """An image, by its reader's reference. `token`: the chat template wrote the image token at this position; `seconds`: time of
    a frame of a clip, None for other images."""

    reference: str
    token: bool = False
    seconds: float | None = None


Parts = Sequence[Words | Picture]
Frames = tuple[tuple[float, str], ...]
"""(seconds, reference) of each frame of a video, in the order of time."""


class Clip:
    """Selected frames of a video.

    Attributes:
        told: the time of each frame is written before the frame.
    """

    def __init__(self, frames: Frames | Callable[[], Frames], told: bool = True) -> None:
        """`frames`: the frames, or a function that finds them on first use and may raise `BrokenRecord`."""
        self.told = told
        self._frames = frames

    @cached_property
    def frames(self) -> Frames:
        """The selected frames.

        Raises:
            BrokenRecord: the clip cannot be read.
        """
        return self._frames() if callable(self._frames) else self._frames

    def parts(self) -> Parts:
        """Returns the frames as parts of a document. Times are not learned.

        Raises:
            BrokenRecord: the clip cannot be read.
        """
        parts: list[Words | Picture] = []
        for seconds, reference in self.frames:
            parts += [Words(f"{seconds:.1f}s", learned=False)] if self.told else []
            parts.append(Picture(reference, seconds=seconds))
        return parts


class Record(dict[str, Any]):
    """A record with its place (file, and line or number) for messages."""

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
        messages: field with turns, which takes precedence over `text`: `{"role", "content"}`, or LLaVA's `{"from", "value"}`. A
            content is text, or a list of `{"type": "text", "text"}` and of images: `{"type": "image"}` for the next image of the
            field `images`, or `{"type": "image", "path"}` and `{"type": "image_url", "image_url": {"url"}}`, which name their
            own, and may have `seconds`, the time of a frame.
        images: field with the reference of an image, or a list of them. A record without it is text.
        pieces: whether a chat template that renders pieces gets images in text contents as pieces, and so writes what belongs
            around them.
    """

    text: str = "text"
    messages: str = "messages"
    images: str = "image"
    pieces: bool = field(default=False, repr=False)  # `repr` is a part of the names of stores


class Examples(Protocol):
    """Records with images, in a fixed order. They can be read repeatedly.

    The optional method `is_there(reference) -> bool` says whether the file of an image exists, without reading it; a run checks
    the images of held-out sets with it before it begins.

    Attributes:
        what: name for messages.
        fingerprint: changes with the records. A changed image is only noticed when it is read.
    """

    what: str

    @property
    def fingerprint(self) -> str: ...

    def __iter__(self) -> Iterator[tuple[str, "Mapping[str, Any] | BrokenRecord"]]:
        """Yields (name, record); the record's image field has references or a `Clip`. A record that cannot be read is a
        `BrokenRecord` whose message contains its place."""
        ...

    def fetch(self, reference: str) -> bytes:
        """Returns the content of an image file.

        Raises:
            DataError: the file does not exist; the message names it.
        """
        ...


def is_conversation(record: "Mapping[str, Any] | BrokenRecord", fields: Fields) -> bool:
    """Whether a chat template renders the record, including special tokens."""
    return isinstance(record, Mapping) and record.get(fields.messages) is not None


def parts_of(record: "Mapping[str, Any] | BrokenRecord", fields: Fields, chat: Chat) -> list[Words | Picture]:
    """Returns the parts of a record's document.

    Raises:
        BrokenRecord: the record is broken, has neither text nor turns, has a different number of markers and images, or has text
            that is not valid Unicode.
        DataError: the chat template refuses the turns.
    """
    if isinstance(record, BrokenRecord):
        raise record
    if not isinstance(record, Mapping):
        raise BrokenRecord("is not a JSON object")
    images = _references(record.get(fields.images), fields.images)
    if is_conversation(record, fields):
        turns = _turns(record[fields.messages], fields.messages)
        tools = record.get("tools")
        found = _conversation(turns, images, fields.messages, lambda made: chat.spans(made, _listed(tools)), chat, fields.pieces)
    else:
        text = record.get(fields.text)
        if not isinstance(text, str):
            raise BrokenRecord(f"has neither turns in {fields.messages!r} nor text in {fields.text!r}")
        found = _illustrated([Words(text)], images)
    if not any(isinstance(part, Words) and part.learned for part in found):
        raise BrokenRecord("has no text to train on")
    return found


def prompt_of(text: str, images: Sequence[str]) -> list[Words | Picture]:
    """Returns the parts of a text that a model continues, equal to `parts_of` of a record with this text and these images.

    Raises:
        BrokenRecord: the text has a different number of markers and images, or is not valid Unicode.
    """
    return _illustrated([Words(text)] if text else [], [[_picture(each)] for each in images])


def chat_prompt_of(turns: Sequence[Turn], images: Sequence[str], chat: Chat) -> list[Words | Picture]:
    """Returns the parts of a conversation and of the opening of the assistant's turn, as `parts_of` does for a record.

    A content may be a list of pieces, which name their own images. `images` replace the markers of the first turn. Without
    markers, they precede its content if the template renders images itself, and otherwise all text, as in a record. In other text
    a marker is ordinary text.

    Raises:
        BrokenRecord: the first turn has a different number of markers and images, or some text is not valid Unicode.
        DataError: the chat template refuses the turns.
    """
    first, *rest = turns
    content: Any = first.content
    if images and chat.takes_pieces and isinstance(content, str) and MARKER not in content:
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": content}]
    hidden = _unused(turns)
    made = [
        replace(turn, content=turn.content.replace(MARKER, hidden)) if isinstance(turn.content, str) else turn
        for turn in (rest if images else turns)
    ]
    made = [replace(first, content=content), *made] if images else made
    pictures = [[_picture(each)] for each in images]
    found = _conversation(made, pictures, "the prompt", lambda shown: chat.prompt_spans(shown), chat)
    return [replace(each, text=each.text.replace(hidden, MARKER)) if isinstance(each, Words) else each for each in found]


def _conversation(
    turns: Sequence[Turn],
    images: Sequence[Parts],
    field: str,
    written: Callable[[list[Turn]], Sequence[tuple[str, bool, bool]]],
    chat: Chat,
    by_pieces: bool = False,
) -> list[Words | Picture]:
    """Returns the parts of a conversation. `written` renders turns with the chat template to (text, learned, trusted)."""
    left = iter(images)
    placed: list[Parts] = []
    made = []
    hidden = _unused(turns) if _marks_by_pieces(turns, images, field) else MARKER
    for turn in turns:
        content = turn.content
        if isinstance(content, list):
            pieces = [_piece(piece, field) for piece in content]
            for own in (each for each in pieces if isinstance(each, Picture)):
                placed += [[own]] if own.reference else islice(left, 1)
            pieces = [each if isinstance(each, Picture) else each.replace(MARKER, hidden) for each in pieces]
            if chat.takes_pieces:
                content = [{"type": "image"} if isinstance(each, Picture) else {"type": "text", "text": each} for each in pieces]
            else:
                content = "".join(MARKER if isinstance(each, Picture) else each for each in pieces)
        elif isinstance(content, str):
            placed += islice(left, content.count(MARKER))
            if chat.takes_pieces and (not chat.takes_text or (by_pieces and MARKER in content)):
                content = _as_pieces(content)
        made.append(replace(turn, content=content))
    words = [Words(*span) for span in written(made)]
    tokens = bool(placed) and not any(MARKER in each.text for each in words)
    found = _illustrated(words, [*placed, *left], tokens)
    return [replace(each, text=each.text.replace(hidden, MARKER)) if isinstance(each, Words) else each for each in found]


def _marks_by_pieces(turns: Sequence[Turn], images: Sequence[Parts], field: str) -> bool:
    """Whether contents have image pieces, and these pieces and the markers in text contents place every image; then a marker in a
    text piece is ordinary text."""
    pieces = [_piece(piece, field) for turn in turns if isinstance(turn.content, list) for piece in turn.content]
    pictures = [each for each in pieces if isinstance(each, Picture)]
    markers = sum(turn.content.count(MARKER) for turn in turns if isinstance(turn.content, str))
    return bool(pictures) and len(images) <= markers + sum(not each.reference for each in pictures)


def _unused(turns: Sequence[Turn]) -> str:
    """Returns a private-use character that no turn contains."""
    text = str([turn.message() for turn in turns])  # `str` escapes private-use characters
    return next(each for each in map(chr, range(0xE000, 0xF900)) if repr(each)[1:-1] not in text)


def _illustrated(words: Sequence[Words], images: Sequence[Parts], tokens: bool = False) -> list[Words | Picture]:
    """Returns words with their images. `tokens`: the template wrote an image token for each image.

    Raises:
        BrokenRecord: the numbers of markers and images differ, or text is not valid Unicode.
    """
    if fault := next((fault for each in words if (fault := text_of(each.text)[1])), ""):
        raise BrokenRecord(f"has text that {fault}")
    if tokens:
        return [*map(_token, images), *words]
    if images and not any(MARKER in each.text for each in words):
        words = [Words(MARKER * len(images), learned=False), *words]
    return list(_placed(words, images))


def _listed(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) else None


def _as_pieces(text: str) -> list[dict[str, str]]:
    """Returns text with markers as a list of pieces, which some templates need."""
    pieces: list[dict[str, str]] = []
    for place, part in enumerate(text.split(MARKER)):
        pieces += [{"type": "image"}] if place else []
        pieces += [{"type": "text", "text": part}] if part else []
    return pieces


def _placed(words: Sequence[Words], images: Sequence[Parts]) -> Iterator[Words | Picture]:
    """Yields the words between the markers, and an image, or the frames of a clip, in place of each marker."""
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
            f"has a clip at an image token of the chat template, which stands for one image; write {MARKER} in the text instead"
        )
    return replace(image[0], token=True)


def _references(value: Any, field: str) -> list[Parts]:
    """Returns the parts that replace each marker."""
    values = [] if value is None else [value] if isinstance(value, str | Clip) else value
    if not isinstance(values, list) or not all(isinstance(each, str | Clip) and each for each in values):
        raise BrokenRecord(f"has {value!r} in the field {field!r}; expected the name of an image, or a list of names")
    return [each.parts() if isinstance(each, Clip) else [_picture(each)] for each in values]


def _picture(reference: str) -> Picture:
    """Returns the image with this name, which must be a valid file name."""
    if fault := text_of(reference)[1]:
        raise BrokenRecord(f"names the image {reference!r}, which {fault}")
    if "\0" in reference:
        raise BrokenRecord(f"names the image {reference!r}, which contains a NUL character")
    if reference.startswith("data:"):
        raise BrokenRecord(f"contains image data ({reference[:30]!r}...) instead of a file name; write the image to a file")
    return Picture(reference)


def _turns(value: Any, field: str) -> list[Turn]:
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise BrokenRecord(f"has no list of turns in the field {field!r}")
    return [_turn(turn, field) for turn in value]


def _turn(turn: Mapping[str, Any], field: str) -> Turn:
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    role = {"human": "user", "gpt": "assistant"}.get(role, role) if isinstance(role, str) else None
    more = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value") and value is not None}
    if role is None or not (isinstance(content, str | list) or (content is None and more)):
        raise BrokenRecord(f"has a turn without role or content in the field {field!r}: {str(dict(turn))[:80]}")
    return Turn(role, content, more)


def _piece(piece: Any, field: str) -> str | Picture:
    """Returns the text of a piece, or its image; an empty name is the next image of the record's image field."""
    kind = piece.get("type") if isinstance(piece, dict) else None
    if kind == "text" and isinstance(piece.get("text"), str):
        return piece["text"]
    if kind in ("image", "image_url"):
        named = [piece[name] for name in ("image", "path", "url", "image_url") if piece.get(name) is not None]
        named = [each.get("url") if isinstance(each, dict) else each for each in named]
        if not named and kind == "image":
            return Picture("")
        if len(named) == 1 and isinstance(named[0], str) and named[0]:
            return replace(_picture(named[0]), seconds=_seconds(piece, field))
    raise BrokenRecord(f"has a piece that is neither text nor an image in the field {field!r}: {str(piece)[:80]}")


def _seconds(piece: Mapping[str, Any], field: str) -> float | None:
    """Returns the time of an image that is a frame of a clip."""
    seconds = piece.get("seconds")
    if seconds is not None and (type(seconds) not in (int, float) or not 0 <= seconds < inf):
        raise BrokenRecord(f"has an image at seconds {seconds!r} in the field {field!r}; write a number of 0 or more")
    return None if seconds is None else float(seconds)


@dataclass(frozen=True)
class RecordTexts:
    """The text of documents without their images, as `Texts`. Broken records are skipped; preparing the source reports them."""

    examples: Examples
    fields: Fields
    chat: Chat
    split: str
    held_out: float

    @property
    def fingerprint(self) -> str:
        """Changes with the records and the way they are read."""
        made = f"{self.fields} {self.chat.identity} {self.split} {self.held_out}"
        return sha256(f"{self.examples.fingerprint} {made}".encode()).hexdigest()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yields (name, text) of every document."""
        for name, record in self.examples:
            if in_split(name, self.split, self.held_out):
                with suppress(BrokenRecord, DataError):
                    parts = parts_of(record, self.fields, self.chat)
                    yield name, "".join(part.text for part in parts if isinstance(part, Words))
