"""Byte-level tokenizers by words that were seen before: the same ids as their library gives, several times as fast.

Such a tokenizer cuts text into words by a pattern and encodes each word by itself. Natural text has few different words, so
their ids are kept, and only the cutting is left to do. It is done here for ASCII, where every class of the pattern is a list of
characters that cannot be disputed; other text is left to the library. A text may be parted between a printable ASCII character
and a line feed: no word reaches across, and what precedes depends on nothing behind, since the pattern looks ahead only from
white space.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_WORD = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
"""What `ByteLevel` of the tokenizers library cuts by, that of GPT-2 (Radford et al., 2019), for ASCII."""
PARTING = re.compile(r"(?<=[!-~])(?=\n)")
"""Where a text can be cut so that the ids of its parts are those of the whole."""
_MOST = 1 << 18
"""Words whose ids are kept, about 40 MB."""
_LONGEST = 64
"""Longer words are hardly ever met again."""


def cuts_into_words(content: Mapping[str, Any]) -> bool:
    """Whether a parsed `tokenizer.json` describes a tokenizer of this kind, with nothing that looks beyond a word."""
    before, model = content.get("pre_tokenizer") or {}, content.get("model") or {}
    return (
        content.get("normalizer") is None
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True) is True
        and before.get("add_prefix_space") is False
        and model.get("type") == "BPE"
        and not model.get("dropout")
        and all(token.get("special") is True for token in content.get("added_tokens") or ())
    )


class Words:
    """Encodes by words; safe to use from several threads."""

    def __init__(self, backend: "Backend") -> None:
        """`backend` is such a tokenizer, which takes special tokens in a text for ordinary text."""
        self._backend = backend
        self._ids: dict[str, bytes] = {}

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) int64, without special tokens."""
        if text.isascii():
            return np.frombuffer(self._ascii(text), dtype=np.uint32).astype(np.int64)
        parts = b"".join(self._ascii(part) if ascii_only else self._library(part) for part, ascii_only in _parts(text))
        return np.frombuffer(parts, dtype=np.uint32).astype(np.int64)

    def _ascii(self, text: str) -> bytes:
        """Ids as uint32."""
        words = _WORD.findall(text)
        try:
            return b"".join(map(self._ids.__getitem__, words))
        except KeyError:
            known = dict(self._learned(set(words)))
            return b"".join(map(known.__getitem__, words))

    def _learned(self, words: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """(word, ids) of each word; keeps those that are new."""
        unknown = []
        for word in words:
            if (ids := self._ids.get(word)) is None:
                unknown.append(word)
            else:
                yield word, ids
        if len(self._ids) + len(unknown) > _MOST:
            self._ids = {}
        for word, encoding in zip(unknown, self._backend.encode_batch_fast(unknown, add_special_tokens=False), strict=True):
            ids = _bytes(encoding.ids)
            if len(word) <= _LONGEST:
                self._ids[word] = ids
            yield word, ids

    def _library(self, text: str) -> bytes:
        return _bytes(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The text in order, cut into longest stretches of lines that are ASCII and of lines that are not."""
    for ascii_only, lines in groupby(PARTING.split(text), key=str.isascii):
        yield "".join(lines), ascii_only


def _bytes(ids: list[int]) -> bytes:
    return np.array(ids, dtype=np.uint32).tobytes()
