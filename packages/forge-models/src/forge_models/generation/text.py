"""The text of new tokens, which depends on the tokens before them, and stop texts in it.

decode(prompt + new) is not decode(prompt) + decode(new): decoders take a space from where a text begins, and the bytes of one
character may be several tokens. So new tokens are decoded behind the prompt, and the text of the prompt is taken away.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

BROKEN = "\ufffd"
"""What decoders write for bytes that are no character."""

_CONTEXT = 32
"""Tokens of the prompt that are decoded with the new ones, at least: decoders look back no further than to the last word."""


class NewText:
    """decode(prompt + new) without the beginning that it shares with decode(prompt): what new tokens add to a text."""

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        size = _CONTEXT
        while True:  # control tokens have no text, so that the beginning of a text may lie behind many of them
            self._context = [int(token) for token in prompt[-size:]]
            self._before = decode(self._context)
            if self._before or size >= len(prompt):
                return
            size *= 2

    def __call__(self, new: Sequence[int]) -> str:
        """The text that `new` adds."""
        whole = self._decode([*self._context, *(int(token) for token in new)])
        return whole[_shared(self._before, whole) :]


class Pieces:
    """The text of new tokens in pieces which, joined, are that text: none of them is taken back later.

    A character whose bytes are not complete is held back, and so is what a byte without a character would change: some decoders
    make a whole sequence of bytes unreadable by one that does not fit.

    Args:
        broken: an id whose bytes are no character by themselves, where the tokenizer has one; see `broken_id`.
    """

    def __init__(self, text: NewText, stops: Sequence[str] = (), broken: int | None = None) -> None:
        self._text, self._stops, self._broken = text, tuple(stops), broken
        self._shown = ""
        self.stopped = False

    def add(self, new: Sequence[int]) -> str:
        """What can be shown now of all new tokens, which was not yet; `stopped` says whether it ended at a stop text."""
        whole = self._text(new)
        end = before_stop(whole, self._stops)
        if len(end) < len(whole):
            self.stopped = True
            return self._show(end)
        decided = whole.rstrip(BROKEN)
        if self._broken is not None:
            decided = decided[: _shared(decided, self._text([*new, self._broken]))]
        return self._show(decided[: self._open_stop(decided)])

    def rest(self, new: Sequence[int]) -> str:
        """What is left to show when no token follows."""
        return self._show(before_stop(self._text(new), self._stops))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._shown += piece
        return piece

    def _open_stop(self, text: str) -> int:
        """Where the beginning of a stop text begins that the end of `text` may be."""
        sizes = (
            size for stop in self._stops for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])
        )
        return len(text) - max(sizes, default=0)


def broken_id(decode: Decode, vocab_size: int) -> int | None:
    """An id that is a byte of a longer character, or None: of tokenizers of words or characters."""
    return next((index for index in range(vocab_size) if decode([index]) == BROKEN), None)


def before_stop(text: str, stop: str | Sequence[str]) -> str:
    """`text` up to where the first of the stop texts begins."""
    places = [text.find(end) for end in texts_of(stop)]
    return text[: min((place for place in places if place >= 0), default=len(text))]


def texts_of(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop text or several, as a tuple."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _shared(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    if other.startswith(one):
        return len(one)
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
