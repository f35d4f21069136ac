"""A document as parts in their order: words, and images by reference."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from forge_vlm.data.chat import Chat, Turn

MARKER = "<image>"
"""Where an image stands in the text of a record."""


@dataclass(frozen=True)
class Words:
    """Some text. `learned`: whether the model is trained to say it."""

    text: str
    learned: bool = True


@dataclass(frozen=True)
class Picture:
    """An image, as its reader names it."""

    reference: str


Parts = Sequence[Words | Picture]


Frames = tuple[tuple[float, str], ...]
"""(seconds, reference) of each frame of a video, in the order of their times."""


class Clip:
    """Some frames of a video.

    Attributes:
        told: whether each time stands before its frame.
    """

    def __init__(self, frames: Frames | Callable[[], Frames], told: bool = True) -> None:
        """`frames`: the frames, or a function that reads which there are when they are first asked for; it may raise `Broken`."""
        self.told = told
        self._frames = frames

    @cached_property
    def frames(self) -> Frames:
        """The frames that were chosen.

        Raises:
            Broken: the clip cannot be read.
        """
        return self._frames() if callable(self._frames) else self._frames

    def parts(self) -> Parts:
        """The frames, as a document has them. What is said of time is not learned.

        Raises:
            Broken: the clip cannot be read.
        """
        found: list[Words | Picture] = []
        for seconds, reference in self.frames:
            found += [Words(f"{seconds:.1f}s", learned=False)] if self.told else []
            found.append(Picture(reference))
        return found


class Record(dict[str, Any]):
    """A record that knows its place, for messages: its file, and its line or number there."""

    def __init__(self, fields: Mapping[str, Any], place: str) -> None:
        super().__init__(fields)
        self.place = place


class Broken(ValueError):
    """A record that makes no document; says why."""


@dataclass(frozen=True)
class Fields:
    """Which fields of a record are read.

    Attributes:
        text: a field of text, `MARKER` where an image stands; without one, all images stand before the text.
        messages: a field of turns, read where a record has it: `{"role", "content"}`, or `{"from", "value"}` as LLaVA has them. A
            content is text, or a list of `{"type": "text", "text"}` and `{"type": "image"}`.
        images: a field with the reference of an image, or a list of them. A record without it is text.
    """

    text: str = "text"
    messages: str = "messages"
    images: str = "image"


class Examples(Protocol):
    """Records with images, in a fixed order, readable as often as needed.

    Attributes:
        what: for messages.
        fingerprint: changes with the records; whether an image changed is seen when it is read.
    """

    what: str

    @property
    def fingerprint(self) -> str: ...

    def __iter__(self) -> Iterator[tuple[str, "Mapping[str, Any] | Broken"]]:
        """(name, record) of each; its field of images has references or a `Clip`. `Broken` is one that cannot be read, and says
        where it is; a `Record` knows its place."""
        ...

    def fetch(self, reference: str) -> bytes:
        """The file of an image.

        Raises:
            DataError: it is not there; names it.
        """
        ...


def parts_of(record: "Mapping[str, Any] | Broken", fields: Fields, chat: Chat) -> list[Words | Picture]:
    """The parts of a record's document.

    Raises:
        Broken: it is broken, has neither text nor turns, or other markers than images.
    """
    if isinstance(record, Broken):
        raise record
    if not isinstance(record, Mapping):
        raise Broken("is not a record")
    images = _references(record.get(fields.images), fields.images)
    turns = record.get(fields.messages)
    if turns is not None:
        words = [Words(text, learned) for text, learned in chat.render(_turns(turns, fields.messages))]
    else:
        text = record.get(fields.text)
        if not isinstance(text, str):
            raise Broken(f"has neither turns in {fields.messages!r} nor text in {fields.text!r}")
        words = [Words(text)]
    if images and not any(MARKER in each.text for each in words):
        words = [Words(MARKER * len(images), learned=False), *words]
    found = list(_placed(words, images))
    if not any(isinstance(part, Words) and part.learned for part in found):
        raise Broken("has no text to learn")
    return found


def _placed(words: Sequence[Words], images: Sequence[Parts]) -> Iterator[Words | Picture]:
    """Words cut at the markers, an image in the place of each, or the frames of a clip."""
    markers = sum(each.text.count(MARKER) for each in words)
    if markers != len(images):
        raise Broken(f"has {markers} {MARKER} and {len(images)} images")
    left = iter(images)
    for each in words:
        for place, text in enumerate(each.text.split(MARKER)):
            if place:
                yield from next(left)
            if text:
                yield Words(text, each.learned)


def _references(value: Any, field: str) -> list[Parts]:
    """What stands in the place of each marker."""
    found = [] if value is None else [value] if isinstance(value, str | Clip) else value
    if not isinstance(found, list) or not all(isinstance(each, str | Clip) and each for each in found):
        raise Broken(f"has in {field!r} {value!r}; expected the name of an image, or a list of names")
    return [each.parts() if isinstance(each, Clip) else [Picture(each)] for each in found]


def _turns(value: Any, field: str) -> list[Turn]:
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise Broken(f"has in {field!r} no list of turns")
    return [_turn(turn, field) for turn in value]


def _turn(turn: Mapping[str, Any], field: str) -> Turn:
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    role = {"human": "user", "gpt": "assistant"}.get(role, role) if isinstance(role, str) else None
    if isinstance(content, list):
        content = "".join(_piece(piece, field) for piece in content)
    if role is None or not isinstance(content, str):
        raise Broken(f"has in {field!r} a turn without role or content: {str(dict(turn))[:80]}")
    return Turn(role, content)


def _piece(piece: Any, field: str) -> str:
    kind = piece.get("type") if isinstance(piece, dict) else None
    if kind == "image":
        return MARKER
    if kind == "text" and isinstance(piece.get("text"), str):
        return piece["text"]
    raise Broken(f"has in {field!r} a piece that is neither text nor an image: {str(piece)[:80]}")
