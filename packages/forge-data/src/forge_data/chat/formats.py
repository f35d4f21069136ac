"""Records of conversations in the formats that tools write, as examples: turns, tools, and which turns are trained.

| format | a record |
|---|---|
| `messages` | `{"messages": [{"role", "content", ...}], "tools": [...]}`, as OpenAI and transformers write it |
| `sharegpt` | `{"conversations": [{"from": "human" or "gpt", "value"}], "system", "tools"}` |
| `alpaca` | `{"instruction", "input", "output", "system", "history": [[question, answer], ...]}` |
| `prompt_completion` | `{"prompt", "completion"}`: two texts, or two lists of messages |
| `preference` | `{"prompt", "chosen", "rejected"}`: texts or lists of messages; lists may repeat the prompt instead |

The format is declared. It is recognized only to say which one a record has instead.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forge_data.chat.conversation import ASSISTANT, Turn
from forge_data.sources.records import text_of

FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion", "preference")
KEYS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
}
"""Keys that every record of a format has."""
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Roles of ShareGPT."""


class UnusableRecord(ValueError):
    """A record that cannot become an example; the message says why."""


@dataclass(frozen=True)
class Example:
    """What becomes one document.

    Attributes:
        turns: turns of a conversation; empty for plain text.
        tools: descriptions of tools, as JSON, or None.
        trained: numbers of the turns that are trained.
        prompt, completion: plain text that no template renders; only the completion is trained. None for a conversation.
    """

    turns: tuple[Turn, ...] = ()
    tools: Any = None
    trained: frozenset[int] = frozenset()
    prompt: str = ""
    completion: str | None = None


def examples_of(record: Any, form: str, train: str = "all", field: str | None = None) -> list[Example]:
    """Returns the examples of a record: one, or one per trained turn, or the two of a preference pair (the chosen one first).

    Args:
        record: a JSON object.
        form: one of `FORMATS`.
        train: `all`, `last` or `each`; see `forge_data.Conversations`.
        field: key of the conversation, for `messages` and `sharegpt`.

    Raises:
        UnusableRecord: the record has another format, no turn to train on, or an invalid turn.
    """
    if not isinstance(record, Mapping):
        raise UnusableRecord("is not a JSON object")
    absent = [key for key in ((field,) if field else KEYS[form]) if record.get(key) is None]
    if absent:
        other = next((name for name in FORMATS if all(record.get(key) is not None for key in KEYS[name])), None)
        hint = f"; it looks like format = {other!r}" if other not in (None, form) else f"; it has {', '.join(map(repr, record))}"
        raise UnusableRecord(f"has no {absent[0]!r}, which format = {form!r} requires{hint}")
    tools = _tools(record.get("tools"))
    match form:
        case "messages":
            return _trained(_messages(record[field or "messages"], field or "messages"), tools, train)
        case "sharegpt":
            turns = [*_system(record), *_spoken(record[field or "conversations"], field or "conversations")]
            return _trained(turns, tools, train)
        case "alpaca":
            return _trained(_instructed(record), tools, train)
        case "prompt_completion":
            return _trained_after(*_parted(record, "completion"), tools, train)
    chosen, rejected = (_parted(record, key) for key in ("chosen", "rejected"))
    if "prompt" not in record and isinstance(chosen[1], list) and isinstance(rejected[1], list):
        shared = 0
        for one, other in zip(chosen[1], rejected[1], strict=False):
            if one != other:
                break
            shared += 1
        chosen, rejected = ((turns[:shared], turns[shared:]) for turns in (chosen[1], rejected[1]))
    if chosen[1] == rejected[1]:
        raise UnusableRecord("has equal answers in 'chosen' and 'rejected', so it prefers nothing")
    return [example for pair in (chosen, rejected) for example in _trained_after(*pair, tools, train)]


def _trained(turns: Sequence[Turn], tools: Any, train: str, first: int = 0) -> list[Example]:
    """Returns the examples of a conversation whose turns from number `first` on may be trained."""
    if not turns:
        raise UnusableRecord("has an empty conversation")
    weights = [_weight(turn, number) for number, turn in enumerate(turns, 1)]
    trained = [number for number, turn in enumerate(turns) if number >= first and turn.role == ASSISTANT and weights[number]]
    if not trained:
        roles = ", ".join(dict.fromkeys(turn.role for turn in turns))
        raise UnusableRecord(f"has no turn of the assistant to train on; its turns are of {roles}")
    kept = tuple(replace(turn, more={key: value for key, value in turn.more.items() if key != "weight"}) for turn in turns)
    if train == "each":
        return [Example(kept[: number + 1], tools, frozenset((number,))) for number in trained]
    return [Example(kept, tools, frozenset(trained if train == "all" else trained[-1:]))]


def _trained_after(prompt: Any, answer: Any, tools: Any, train: str) -> list[Example]:
    if isinstance(answer, str):
        if not answer:
            raise UnusableRecord("has an empty answer, so there is nothing to train on")
        return [Example(prompt=prompt, completion=answer)]
    return _trained([*prompt, *answer], tools, train, len(prompt))


def _parted(record: Mapping[str, Any], key: str) -> tuple[Any, Any]:
    """Returns (prompt, answer), both as text, or both as turns."""
    prompt, answer = record.get("prompt"), record[key]
    if isinstance(answer, str):
        if prompt is not None and not isinstance(prompt, str):
            raise UnusableRecord(f"has a list in 'prompt', but text in {key!r}; write both as text or both as messages")
        return _text(prompt or "", "prompt"), _text(answer, key)
    if isinstance(prompt, str):
        raise UnusableRecord(f"has text in 'prompt', but a list in {key!r}; write both as text or both as messages")
    return _messages(prompt, "prompt") if prompt is not None else [], _messages(answer, key)


def _messages(value: Any, field: str) -> list[Turn]:
    if not isinstance(value, list):
        raise UnusableRecord(f"has {type(value).__name__} instead of a list of messages in {field!r}")
    return [_message(each, number, field) for number, each in enumerate(value, 1)]


def _message(message: Any, number: int, field: str) -> Turn:
    if isinstance(message, Mapping) and "from" in message and "role" not in message:
        raise UnusableRecord(f"has turns with 'from' and 'value' in {field!r}; set format = 'sharegpt'")
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or not role:
        raise UnusableRecord(f"has no 'role' in turn {number} of {field!r}: {str(message)[:80]}")
    more = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    return _turn(role, message.get("content"), more, number)


def _spoken(value: Any, field: str) -> list[Turn]:
    if not isinstance(value, list):
        raise UnusableRecord(f"has {type(value).__name__} instead of a list of turns in {field!r}")
    turns = []
    for number, each in enumerate(value, 1):
        if isinstance(each, Mapping) and "role" in each and "from" not in each:
            raise UnusableRecord(f"has turns with 'role' and 'content' in {field!r}; set format = 'messages'")
        speaker = each.get("from") if isinstance(each, Mapping) else None
        if speaker not in _SPEAKERS:
            known = ", ".join(_SPEAKERS)
            raise UnusableRecord(f"has the speaker {speaker!r} in turn {number} of {field!r}; rename it to one of {known}")
        more = {key: content for key, content in each.items() if key not in ("from", "value") and content is not None}
        content = each.get("value")
        if speaker == "function_call":
            more["tool_calls"], content = [{"type": "function", "function": _call(content, number)}], None
        turns.append(_turn(_SPEAKERS[speaker], content, more, number))
    return turns


def _call(value: Any, number: int) -> Any:
    try:
        call = json.loads(value)
    except (TypeError, ValueError):
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise UnusableRecord(f"has a function call in turn {number} that is not a JSON object with 'name' and 'arguments'")
    return call


def _instructed(record: Mapping[str, Any]) -> list[Turn]:
    turns = _system(record)
    for pair in record.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UnusableRecord("has a history that is not a list of [question, answer]")
        turns += [_turn("user", pair[0], {}, len(turns) + 1), _turn(ASSISTANT, pair[1], {}, len(turns) + 2)]
    asked = [_text(record["instruction"], "instruction"), _text(record.get("input") or "", "input")]
    turns.append(_turn("user", "\n\n".join(filter(None, asked)), {}, len(turns) + 1))
    return [*turns, _turn(ASSISTANT, record["output"], {}, len(turns) + 1)]


def _system(record: Mapping[str, Any]) -> list[Turn]:
    return [_turn("system", record["system"], {}, 1)] if record.get("system") else []


def _turn(role: str, content: Any, more: Mapping[str, Any], number: int) -> Turn:
    """Returns a turn after checking its content: text, pieces of text, or nothing if the turn calls a tool."""
    where = f"turn {number} ({role})"
    if isinstance(content, list):
        for piece in content:
            kind = piece.get("type") if isinstance(piece, Mapping) else None
            if kind != "text" or not isinstance(piece.get("text"), str):
                hint = "; use source 'image_jsonl' for images" if kind in ("image", "image_url") else ""
                raise UnusableRecord(f"has a piece that is not text in {where}: {str(piece)[:60]}{hint}")
            _text(piece["text"], where)
    elif content is not None:
        _text(content, where)
    if not content and not more.get("tool_calls") and role == ASSISTANT:
        raise UnusableRecord(f"has nothing in {where}; remove the turn, or set its weight to 0")
    if content is None and role != ASSISTANT:
        raise UnusableRecord(f"has no content in {where}")
    return Turn(role, content, more)


def _weight(turn: Turn, number: int) -> bool:
    """Returns whether a turn is trained, by the `weight` of its message, 0 or 1."""
    weight = turn.more.get("weight", 1)
    if weight not in (0, 1):
        raise UnusableRecord(f"has the weight {weight!r} in turn {number}, which must be 0 or 1")
    return bool(weight)


def _text(value: Any, where: str) -> str:
    text, fault = text_of(value)
    if text is None:
        raise UnusableRecord(f"{where} {fault}")
    return text


def _tools(value: Any) -> Any:
    """Returns descriptions of tools; some files hold them as JSON in text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise UnusableRecord(f"has 'tools' that are not valid JSON: {error}") from error
    if value is not None and not isinstance(value, list):
        raise UnusableRecord(f"has {type(value).__name__} instead of a list in 'tools'")
    return value or None
