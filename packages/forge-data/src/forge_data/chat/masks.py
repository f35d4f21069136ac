"""Encodes examples: token ids, and which of them are trained.

What the assistant says is found from the template: by its `{% generation %}` tags, or, without tags, by rendering the
conversation up to each turn of the assistant (see `conversation`). The stop token that ends a trained turn is always trained,
also if the tags leave it out. Text that the template writes after a stop token, such as a line feed, is not trained unless the
tags contain it. Everything else is context.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.chat.conversation import ASSISTANT, Chat, TextSpan, Turn, UnstableTemplate
from forge_data.chat.formats import Example


@dataclass(frozen=True)
class EncodedExample:
    """One document.

    Attributes:
        ids: (n,) int64 token ids.
        learned: (n,) bool, whether each token is trained.
        turns: number of trained turns.
        ended: number of trained turns that end with a stop token.
    """

    ids: np.ndarray
    learned: np.ndarray
    turns: int
    ended: int


class ExampleEncoder:
    """Encodes examples with one template and one tokenizer. Safe to use from several threads."""

    def __init__(self, chat: Chat | None, tokenizer: Tokenizer, stops: Sequence[int]) -> None:
        """
        Args:
            chat: the chat template; only plain text needs none.
            tokenizer: encodes the text.
            stops: ids of the tokens at which generation stops.
        """
        self._chat, self._tokenizer, self._stops = chat, tokenizer, tuple(stops)
        self._written = {"user", ASSISTANT}  # roles that the template is known to write

    def encode(self, example: Example) -> EncodedExample:
        """Returns the tokens of an example. The ids of a conversation are those of transformers' `apply_chat_template`.

        Raises:
            DataError: the template refuses the turns, leaves one of them out, or does not show which text is the assistant's.
        """
        if example.completion is not None:
            return _plain(example, self._tokenizer, self._stops)
        if self._chat is None:
            raise DataError("a conversation needs a chat template; set template to the folder of a transformers tokenizer")
        spans = _spans(example, self._chat, self._written)
        ids, places = self._tokenizer.encode_pieces([(span.text, span.trusted) for span in spans])
        learned, foreign = (
            _overlaps(places, flags) for flags in ([span.learned for span in spans], [not span.trusted for span in spans])
        )
        return _ended(ids, learned, foreign, np.isin(ids, self._stops), self._is_text if self._chat.marks else None)

    def _is_text(self, ids: np.ndarray) -> bool:
        """Whether ids have no control token: these would not come back from their text."""
        again = self._tokenizer.encode(self._tokenizer.decode(ids.tolist()))
        return again.tolist() == ids.tolist()


def _plain(example: Example, tokenizer: Tokenizer, stops: Sequence[int]) -> EncodedExample:
    """Encodes a prompt and its completion as one text, with what the tokenizer adds around a text. The end is trained."""
    if tokenizer.eos is None:
        raise DataError(f"tokenizer {tokenizer.name!r} has no end-of-document token, which ends a completion")
    text, places = tokenizer.encode_pieces([(example.prompt, False), (str(example.completion), False)])
    closing = [*tokenizer.suffix, tokenizer.eos]
    ids = np.concatenate([np.array(tokenizer.prefix, dtype=np.int64), text, np.array(closing, dtype=np.int64)])
    learned = np.zeros(len(ids), dtype=bool)
    learned[len(tokenizer.prefix) : len(ids) - len(closing)] = _overlaps(places, [False, True])
    learned[len(ids) - len(closing) :] = True
    return EncodedExample(ids, learned, 1, int(tokenizer.eos in stops))


def _overlaps(places: np.ndarray, flags: Sequence[bool]) -> np.ndarray:
    """Returns (n,) bool: whether a token overlaps a piece with the flag; `places` are those of `encode_pieces`."""
    counts = np.cumsum([0, *flags])
    return counts[places[:, 1] + 1] > counts[places[:, 0]]


def _ended(
    ids: np.ndarray, learned: np.ndarray, foreign: np.ndarray, stop: np.ndarray, is_text: Callable[[np.ndarray], bool] | None
) -> EncodedExample:
    """Returns the example with the stop tokens of its trained turns trained.

    Args:
        ids, learned: (n,) ids, and whether each token holds text of the assistant.
        foreign: (n,) bool, whether each token holds text that the template did not write.
        stop: (n,) bool, whether each token is a stop token.
        is_text: whether ids hold no control token, if the tags of the template determined `learned`; otherwise None.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], learned, [False]]).astype(np.int8)))
    trained, ended = learned.copy(), 0
    for begin, end in edges.reshape(-1, 2).tolist():
        said = np.flatnonzero(foreign[begin:end])
        after = begin + int(said[-1]) + 1 if len(said) else begin
        inside = np.flatnonzero(stop[after:end])
        if len(inside):
            ended += 1
            if is_text is None:
                trained[after + int(inside[0]) + 1 : end] = False
            continue
        until = end
        while until < len(ids) and not (foreign[until] or learned[until] or stop[until]):
            until += 1
        reached = until < len(ids) and stop[until] and not learned[until]
        if is_text is not None and reached and is_text(ids[end:until]):
            trained[end : until + 1] = True
            ended += 1
    return EncodedExample(ids, trained, len(edges) // 2, ended)


def _spans(example: Example, chat: Chat, written: set[str]) -> list[TextSpan]:
    """Renders a conversation, and checks that the template writes all of it; `written` are roles that it is known to write."""
    turns = [_fitted(turn, chat) for turn in example.turns]
    try:
        spans = chat.spans(turns, example.tools, example.trained)
        text = "".join(span.text for span in spans)
        if (decoded := _decoded(turns, text)) is not None:
            turns, spans = decoded, chat.spans(decoded, example.tools, example.trained)
            text = "".join(span.text for span in spans)
    except UnstableTemplate as error:
        raise DataError(f"{error}; or set train = 'each', which makes a row of every answer") from error
    _refuse_omissions(turns, example, chat, text, written)
    return spans


def _fitted(turn: Turn, chat: Chat) -> Turn:
    """Returns a turn with its pieces of text joined, unless the template renders pieces."""
    if isinstance(turn.content, list) and not chat.takes_pieces:
        return replace(turn, content="".join(piece["text"] for piece in turn.content))
    if isinstance(turn.content, str) and chat.takes_pieces and not chat.takes_text:
        return replace(turn, content=[{"type": "text", "text": turn.content}])
    return turn


def _decoded(turns: Sequence[Turn], text: str) -> list[Turn] | None:
    """Returns the turns with the arguments of tool calls as objects, if they are JSON in text that the template encodes again.

    OpenAI writes arguments as JSON in text. Most templates expect objects, and would write quotes and backslashes around them.
    """
    calls = [call for turn in turns for call in turn.more.get("tool_calls") or () if isinstance(call, Mapping)]
    written = [arguments for call in calls if isinstance(arguments := _function(call).get("arguments"), str)]
    if not any(json.dumps(each, ensure_ascii=False) in text or json.dumps(each) in text for each in written):
        return None
    return [
        replace(turn, more={**turn.more, "tool_calls": [_with_object(call) for call in turn.more["tool_calls"]]})
        if turn.more.get("tool_calls")
        else turn
        for turn in turns
    ]


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def _with_object(call: Any) -> Any:
    function = _function(call) if isinstance(call, Mapping) else {}
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        function = {**function, "arguments": json.loads(function["arguments"])}
    except ValueError:  # the template wrote the text of the record, and goes on doing so
        return call
    return {**call, "function": function} if "function" in call else function


def _refuse_omissions(turns: Sequence[Turn], example: Example, chat: Chat, text: str, written: set[str]) -> None:
    """Refuses a template that leaves out a turn, the tools, a call of a tool, or the reasoning of a trained turn.

    Raises:
        DataError: the message names what is left out.
    """
    for number, turn in enumerate(turns):
        where = f"turn {number + 1} ({turn.role})"
        doubtful = _words(turn.content) not in text or turn.role not in written
        if doubtful and _words(turn.content) and _same(chat, turns, number, example.tools, text):
            raise DataError(
                f"the chat template leaves out {where}: it does not know the role {turn.role!r}, or ignores it here; rename the "
                "role, remove the turn, or use a template that writes it"
            )
        written.add(turn.role)
        for call in turn.more.get("tool_calls") or ():
            name = _function(call).get("name") if isinstance(call, Mapping) else None
            if not isinstance(name, str) or name not in text:
                raise DataError(f"the chat template leaves out the tool call {name!r} of {where}; use a template with tools")
        if number in example.trained and (reasoning := _reasoning(turn)) and reasoning not in text:
            raise DataError(
                f"the chat template leaves out the reasoning of {where}, so the model would learn to answer without it; set "
                "train = 'each', which makes a row of every answer, or remove the reasoning from the data"
            )
    if example.tools and text == "".join(span.text for span in _without(chat, turns, None)):
        raise DataError("the chat template leaves out the tools; use a template with tools, or remove them from the data")


def _without(chat: Chat, turns: Sequence[Turn], tools: Any) -> list[TextSpan]:
    return chat.spans(turns, tools, frozenset())


def _same(chat: Chat, turns: Sequence[Turn], number: int, tools: Any, text: str) -> bool:
    """Whether the conversation has the same text without a turn."""
    try:
        rest = _without(chat, [turn for place, turn in enumerate(turns) if place != number], tools)
    except DataError:  # the template looks at the turn
        return False
    return "".join(span.text for span in rest) == text


def _words(content: Any) -> str:
    return "".join(piece["text"] for piece in content).strip() if isinstance(content, list) else (content or "").strip()


def _reasoning(turn: Turn) -> str:
    """Returns the reasoning of a turn: of a field of its own, or before `</think>` in the content."""
    for name in ("reasoning_content", "thinking", "reasoning"):
        if isinstance(value := turn.more.get(name), str) and value.strip():
            return value.strip()
    before, mark, _ = _words(turn.content).partition("</think>")
    return before.rpartition("<think>")[2].strip() if mark else ""
