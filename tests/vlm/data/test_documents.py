"""Records to parts: where images stand, and what a record that makes no document is told."""

from typing import Any

import pytest

from forge_data.chat.conversation import TEMPLATES, Chat
from forge_vlm.data.documents import BrokenRecord, Fields, Picture, Words, parts_of

CHAT = Chat(TEMPLATES["plain"])


def parts(record: dict[str, Any], fields: Fields | None = None) -> list[Any]:
    return parts_of(record, fields or Fields(), CHAT)


def test_images_stand_where_their_markers_are() -> None:
    found = parts({"text": "a <image> b <image><image>", "image": ["1", "2", "3"]})
    assert found == [Words("a "), Picture("1"), Words(" b "), Picture("2"), Picture("3")]


def test_without_markers_all_images_stand_first() -> None:
    assert parts({"text": "two", "image": ["1", "2"]}) == [Picture("1"), Picture("2"), Words("two")]
    assert parts({"text": "one", "image": "1"}) == [Picture("1"), Words("one")]
    assert parts({"text": "none", "image": None}) == parts({"text": "none"}) == [Words("none")]


def test_conversations_of_three_kinds_are_the_same() -> None:
    asked = [Words("User: ", False, True), Picture("a"), Words(" Who?", False, False), Words("\nAssistant:", False, True)]
    wanted = [*asked, Words(" ", True, True), Words("Me.", True, False), Words("\n", True, True)]
    plain = [{"role": "user", "content": "<image> Who?"}, {"role": "assistant", "content": "Me."}]
    pieces = [{"type": "image"}, {"type": "text", "text": " Who?"}]
    assert parts({"messages": plain, "image": "a", "text": "unused"}) == wanted
    assert parts({"messages": [{"role": "user", "content": pieces}, plain[1]], "image": ["a"]}) == wanted
    llava = [{"from": "human", "value": "<image> Who?"}, {"from": "gpt", "value": "Me."}]
    assert parts({"conversations": llava, "image": "a"}, Fields(messages="conversations")) == wanted


def test_fields_have_names() -> None:
    fields = Fields(text="caption", images="files")
    assert parts({"caption": "c", "files": "f", "image": "x"}, fields) == [Picture("f"), Words("c")]


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({}, "neither turns in 'messages' nor text in 'text'"),
        ({"text": 7}, "neither turns"),
        ({"text": "<image>"}, "has 1 <image> and 0 images"),
        ({"text": "<image> a", "image": ["1", "2"]}, "has 1 <image> and 2 images"),
        ({"text": "a", "image": 7}, "expected the name of an image"),
        ({"text": "a", "image": [""]}, "expected the name of an image"),
        ({"text": "", "image": "1"}, "has no text to train on"),
        ({"messages": []}, "no list of turns"),
        ({"messages": "hello"}, "no list of turns"),
        ({"messages": [{"content": "x"}]}, "a turn without role or content"),
        ({"messages": [{"role": "user"}]}, "a turn without role or content"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "neither text nor an image"),
        ({"messages": [{"role": "user", "content": "only a question"}]}, "has no text to train on"),
        ({"text": "half \ud83d"}, r"text that holds the lone surrogate U\+D83D at character 5"),
        ({"messages": [{"role": "\udc00", "content": "a"}, {"role": "assistant", "content": "b"}]}, r"lone surrogate U\+DC00"),
        ({"text": "a", "image": "\ud83d.png"}, r"names the image '\\ud83d\.png', which holds the lone surrogate"),
        ({"text": "a", "image": ["a\0.png"]}, r"names the image 'a\\x00\.png', which contains a NUL"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "path": "\0"}]}]}, "which contains a NUL"),
    ],
)
def test_broken_records_say_why(record: dict[str, Any], fault: str) -> None:
    with pytest.raises(BrokenRecord, match=fault):
        parts(record)
