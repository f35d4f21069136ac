"""Held-out documents as questions: what stands before the first learned token is given, and what is learned is to be said."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_core.protocols.data import SourceWithItems
from forge_data.loading.items.load import stacked


@dataclass(frozen=True)
class Question:
    """One document.

    Attributes:
        prompt: (n,) token ids before the first learned one, placeholders of items included.
        answer: (m,) learned token ids up to the first that is not, with the end of the document if it is learned.
        items: the source's items [first, stop) of the prompt.
    """

    prompt: np.ndarray
    answer: np.ndarray
    items: tuple[int, int]

    def is_answered_by(self, said: Sequence[int], end: int | None) -> bool:
        """Whether new tokens are exactly the answer. One that does not end with the end of a document, such as a turn of a
        conversation that goes on, is compared as far as it goes, since nothing in it says that it ends."""
        answer = self.answer.tolist()
        return list(said if answer[-1] == end else said[: len(answer)]) == answer


def questions(source: Any, count: int) -> Iterator[Question]:
    """About `count` of them, from documents at equal distances; a document without prompt or answer is left out."""
    if not isinstance(source, SourceWithItems):
        return
    ends = source.ends().astype(np.int64)
    begins = np.concatenate([[0], ends[:-1]])
    for number in np.unique(np.arange(count) * len(ends) // count).tolist():
        start, stop = int(begins[number]), int(ends[number])
        learned = source.learned(start, stop)
        first = int(np.argmax(learned))
        if not first or not learned[first]:
            continue
        unlearned = np.flatnonzero(~learned[first:])
        last = first + int(unlearned[0]) if len(unlearned) else stop - start
        ids = source.read(start, stop).astype(np.int64)
        bounds = source.items_before(np.array([start, start + first]))
        yield Question(ids[:first], ids[first:last], (int(bounds[0]), int(bounds[1])))


def inputs_of(source: SourceWithItems, asked: Sequence[Question]) -> dict[str, Any]:
    """What a model takes besides the prompts: items stacked (n, ...) float32, and the numbers of each row's (B, M) int64; empty
    where there is none.

    Raises:
        DataError: an item cannot be loaded.
    """
    return stacked(
        source.extras, [[source.load(*question.items)] if question.items[0] < question.items[1] else [] for question in asked]
    )
