"""Held-out data: every row is read exactly once, with the same number of batches on every rank; and questions.

A question is a held-out document: the tokens before its first learned token are the prompt, the learned tokens the answer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_core.batch import Batch
from forge_core.errors import DataError
from forge_core.protocols.data import Source, SourceWithItems, SourceWithMask, StreamedSource, Tokenizer
from forge_data import accelerator
from forge_data.loading.items import Items, load_items, stacked
from forge_data.loading.rows import Assembler, Buffers, TokenRows
from forge_data.loading.sources import LoadSpec, Marks, Report, build_source, context_of, open_packing, refuse_tokenizers, silent
from forge_data.order.phases import too_long_of
from forge_data.section import Data
from forge_data.sources.store import StoreSource
from forge_data.tokenizers.dump import tokenizer_of

if TYPE_CHECKING:
    from forge_data.loading.stream import TrainingStream


def evaluation(
    data: Data,
    *,
    workspace: Path,
    report: Report = silent,
    vocab_size: int | None = None,
    model: Any = None,
    tokenizer: Tokenizer | None = None,
    pairs: bool | None = False,
) -> dict[str, "HeldOut"]:
    """Opens the held-out sets of `[data.evaluation]`, by name; rows are built in the same way as training rows.

    `tokenizer` is the tokenizer of the training stream; sets of another tokenizer are refused. `pairs` is as for `open_stream`.

    Raises:
        DataError: as `open_stream`; or a set is a stream, on whose end the ranks could not agree.
    """
    if not data.evaluation:
        return {}
    spec = LoadSpec(data, workspace, vocab_size=vocab_size, model=model, pairs=pairs)
    context = context_of(spec, report)
    sources = {name: build_source(component, name, context, vocab_size) for name, component in data.evaluation.items()}
    if streamed := next((name for name, source in sources.items() if isinstance(source, StreamedSource)), None):
        raise DataError(f"evaluation set {streamed!r} is a stream, which is not supported; prepare it into a store")
    refuse_tokenizers(sources, context.tokenizer or tokenizer)
    coder = context.tokenizer or tokenizer
    keys = data.evaluation
    return {name: HeldOut(name, source, spec, report, coder, too_long_of(keys[name])) for name, source in sources.items()}


def training_sets(stream: "TrainingStream") -> "Iterator[HeldOut]":
    """Yields the training sources of a stream as sets of which every row is read exactly once."""
    order, spec = stream.order, stream.reader.spec
    for label, source, too_long in zip(order.labels, order.sources, order.too_long, strict=True):
        yield HeldOut(label, source, spec, silent, stream.tokenizer, too_long)  # type: ignore[arg-type] (refuses streams)


class HeldOut:
    """The `EvaluationSet` of one source, packed like training data.

    Every token except the first of a document or row is predicted once. The last row may be short. Its padding has no
    labels; rows that only fill up the last batches have no labels and the sample number -1.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        spec: LoadSpec,
        report: Callable[[str], None],
        tokenizer: Tokenizer | None = None,
        too_long: str | None = None,
    ) -> None:
        if source.tokens < 2:
            raise DataError(f"evaluation set {name!r} ({source.name}) has {source.tokens} tokens: nothing to predict")
        self.name = name
        self.source = source
        self.tokens = source.tokens
        self.text_bytes: int | None = getattr(source, "text_bytes", None)
        self._tokenizer = tokenizer_of(source, tokenizer) or tokenizer if isinstance(source, StoreSource) else tokenizer
        self._packing = open_packing(spec, name, source, spec.data.sequence_length, report, too_long)
        self.rows = self._packing.ragged
        self._assembler = Assembler([self._packing], spec, spec.data.sequence_length)
        self._buffers = Buffers()
        self._marks: Marks = "documents" if spec.masked else "mask"  # every packing pads the last row
        self._workers = spec.data.workers

    def predicted(self) -> tuple[int, int] | None:
        """Returns the number of predicted tokens and the UTF-8 bytes of their text, or None.

        All tokens except the first of each document are predicted. None if the size of the text or the tokenizer is unknown,
        or if the source itself marks the learned tokens.
        """
        if self.text_bytes is None or self._tokenizer is None or isinstance(self.source, SourceWithMask):
            return None
        ends = self.source.ends().astype(np.int64)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[ends < self.tokens]])
        first, times = np.unique(self.source.windows(starts, 1), return_counts=True)
        sizes = [_text_bytes(self._tokenizer.decode([index])) for index in first.tolist()]
        return self.tokens - len(starts), self.text_bytes - sum(map(mul, sizes, times.tolist()))

    def batches(self, rank: int, ranks: int, micro_batch: int) -> Iterator[Batch]:
        """Yields this rank's batches in order; batch b of all n ranks holds rows [b n m, (b + 1) n m), m = `micro_batch`."""
        together = ranks * micro_batch
        pin = accelerator.is_used()
        with Items([self._packing], self._workers) as items:
            for batch, full in self._token_batches(rank, together, micro_batch, pin):
                extras = items.begin([(0, number) for number in full.tolist()] + [(-1, 0)] * (micro_batch - len(full)))
                yield replace(batch, extras=extras.extras(0, micro_batch, pin)) if items.names else batch
                del batch

    def _token_batches(self, rank: int, together: int, micro_batch: int, pin: bool) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yields each batch without its items, and the numbers of its full rows."""
        for first in range(0, self.rows, together):
            numbers = np.arange(first + rank * micro_batch, first + (rank + 1) * micro_batch)
            full = numbers[numbers < self._packing.rows]
            rows = TokenRows.take(self._buffers, micro_batch, self._assembler.length, self._marks)
            self._assembler.fill(rows, 0, np.zeros_like(full), full)
            for row in range(len(full), micro_batch):
                filled = 0
                if numbers[row] < self.rows:
                    cut, labeled = self._assembler.cut_last(0)
                    rows.fill(np.array([row]), cut)
                    filled = labeled + 1
                rows.pad(row, filled)
            samples = tuple(number if number < self.rows else -1 for number in numbers.tolist())
            batch = rows.batch(0, micro_batch, samples, pin=pin)
            del rows  # so that the next batch can reuse its memory
            yield batch, full
            del batch


def _text_bytes(text: str) -> int:
    """Returns the UTF-8 bytes of one token's text; each replacement character counts as one byte."""
    return sum(1 if letter == "\ufffd" else len(letter.encode()) for letter in text)


@dataclass(frozen=True)
class Question:
    """One held-out document as a prompt and its answer.

    Attributes:
        prompt: (n,) token ids before the first learned token, including placeholders of items.
        answer: (m,) first run of learned token ids, including the end-of-document token if it is learned.
        items: the source's items [first, stop) of the prompt.
    """

    prompt: np.ndarray
    answer: np.ndarray
    items: tuple[int, int]

    def is_answered_by(self, said: Sequence[int], end: int | None) -> bool:
        """Whether generated tokens `said` equal the answer.

        If the answer does not end with the end-of-document token `end`, as a turn inside a conversation, only as many tokens
        are compared as the answer has.
        """
        answer = self.answer.tolist()
        return list(said if answer[-1] == end else said[: len(answer)]) == answer


def questions(source: Any, count: int) -> Iterator[Question]:
    """Yields about `count` questions from evenly spaced documents; skips documents without a prompt or an answer.

    Of preference pairs, the chosen answers are asked for.
    """
    if not isinstance(source, SourceWithMask):
        return
    ends = source.ends().astype(np.int64)
    begins = np.concatenate([[0], ends[:-1]])
    step = 2 if getattr(source, "pairs", False) else 1
    for number in (step * np.unique(np.arange(count) * (len(ends) // step) // count)).tolist():
        start, stop = int(begins[number]), int(ends[number])
        learned = source.learned(start, stop)
        first = int(np.argmax(learned))
        if not first or not learned[first]:
            continue
        unlearned = np.flatnonzero(~learned[first:])
        last = first + int(unlearned[0]) if len(unlearned) else stop - start
        ids = source.read(start, stop).astype(np.int64)
        bounds = source.items_before(np.array([start, start + first])) if isinstance(source, SourceWithItems) else (0, 0)
        yield Question(ids[:first], ids[first:last], (int(bounds[0]), int(bounds[1])))


def inputs_of(source: Any, asked: Sequence[Question]) -> dict[str, Any]:
    """Returns the model inputs besides the prompts: stacked items (n, ...) float32, and the item numbers of each row (B, M)
    int64; empty if no question has items.

    Raises:
        DataError: an item cannot be loaded.
    """
    if not isinstance(source, SourceWithItems):
        return {}
    loaded = ([load_items(source, *asks.items)] if asks.items[0] < asks.items[1] else [] for asks in asked)
    return stacked(source.extras, list(loaded))
