"""Pieces of one text, some of which may hold control tokens, and the place of each id in them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ids of a text, and the characters [start, stop) of each; all (N,) int64."""


class Pieces:
    """The concatenation of (text, trusted) pieces.

    Attributes:
        text: of all pieces.
        cuts: characters before which something stands that is not text, ascending.
        runs: the longest stretches [start, stop) of trusted characters that no cut parts.
    """

    def __init__(self, pieces: Sequence[tuple[str, bool]], cuts: Sequence[int] = ()) -> None:
        """`cuts` are numbers of pieces: something that is not text stands before each."""
        self.text = "".join(text for text, _ in pieces)
        self._ends = np.cumsum([len(text) for text, _ in pieces], dtype=np.int64)
        self._trusted = [trusted for _, trusted in pieces]
        starts = [0, *self._ends.tolist()]
        self.cuts = sorted({starts[cut] for cut in cuts})
        self.runs = list(self._runs())

    def places(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """The first and the last piece of each stretch of characters [start, stop).

        Args:
            starts, stops: (N,) int64.

        Returns:
            (N, 2) int64. An empty stretch lies where the next character does.
        """
        if not len(self._ends):
            return np.zeros((len(starts), 2), dtype=np.int64)
        last = len(self._ends) - 1
        first_pieces = np.searchsorted(self._ends, starts, side="right")
        last_pieces = np.searchsorted(self._ends, np.maximum(starts, stops - 1), side="right")
        return np.minimum(np.stack([first_pieces, last_pieces], axis=1), last)

    def trusted(self, start: int, stop: int) -> bool:
        """Whether characters [start, stop) are all in trusted pieces, and nothing stands between them."""
        return any(begin <= start and stop <= end for begin, end in self.runs)

    def encode(self, controls: Mapping[str, int], encode: Callable[[str], Encoded]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and places of the text, for a tokenizer that encodes the text between two control tokens by itself.

        Args:
            controls: id of every spelling, which counts in trusted pieces only; the longest wins.
            encode: encodes ordinary text.
        """
        spelled = re.compile("|".join(map(re.escape, sorted(filter(None, controls), key=len, reverse=True))) or "(?!)")
        found = [match.span() for begin, end in self.runs for match in spelled.finditer(self.text, begin, end)]
        parts: list[Encoded] = []
        done = 0
        for start, stop in sorted([*found, *((cut, cut) for cut in self.cuts), (len(self.text), len(self.text))]):
            if start > done:
                ids, starts, stops = encode(self.text[done:start])
                parts.append((ids, starts + done, stops + done))
            if stop > start:
                parts.append((np.array([controls[self.text[start:stop]]]), np.array([start]), np.array([stop])))
            done = stop
        nothing = np.empty(0, dtype=np.int64)
        parts.append((nothing, nothing, nothing))
        ids, starts, stops = map(np.concatenate, zip(*parts, strict=True))
        return ids, self.places(starts, stops)

    def _runs(self) -> Iterator[tuple[int, int]]:
        begin = start = 0
        for end, trusted in zip(self._ends.tolist(), self._trusted, strict=True):
            if not trusted and end > start:
                yield from self._parted(begin, start)
                begin = end
            start = end
        yield from self._parted(begin, start)

    def _parted(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for cut in (*(cut for cut in self.cuts if begin < cut < end), end):
            if cut > begin:
                yield begin, cut
            begin = cut


def characters_of(text: str, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The characters [start, stop) that ids of `sizes` bytes each cover, in UTF-8: a part of a character counts as the whole."""
    stops = np.cumsum(sizes, dtype=np.int64)
    starts = stops - sizes
    if text.isascii():
        return starts, stops
    data = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    character = np.cumsum((data & 0xC0) != 0x80) - 1
    padded = np.append(character, len(text))
    return padded[starts], padded[np.maximum(stops - 1, 0)] + 1
