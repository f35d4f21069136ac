"""Held-out rows, each read exactly once, with the same number of batches on every rank."""

from collections.abc import Iterator

import numpy as np

from forge_core.batch import IGNORE, Batch
from forge_core.errors import DataError
from forge_core.protocols.data import Source
from forge_data.assembling import Assembler
from forge_data.packing import Concatenated


class HeldOut:
    """The `EvaluationSet` of one source: every token but the first is predicted once, except across documents.

    The last row may be short; what it lacks, and rows that only fill up the last batches, carry no label and have the
    sample number -1 when they are nothing but filler.
    """

    def __init__(self, name: str, source: Source, length: int, masked: bool, vocab_size: int | None) -> None:
        if source.tokens < 2:
            raise DataError(f"evaluation set {name!r} ({source.name}) has {source.tokens} tokens: nothing to predict")
        self.name = name
        self.source = source
        self.tokens = source.tokens
        self.text_bytes: int | None = getattr(source, "text_bytes", None)
        self._packing = Concatenated(source, length)
        self.rows = self._packing.ragged
        self._assembler = Assembler([self._packing], length, masked, vocab_size)

    def batches(self, rank: int, ranks: int, micro_batch: int) -> Iterator[Batch]:
        """This rank's share, in order; batch b of all ranks together holds rows [b n m, (b + 1) n m)."""
        together = ranks * micro_batch
        for first in range(0, self.rows, together):
            numbers = np.arange(first + rank * micro_batch, first + (rank + 1) * micro_batch)
            full = numbers[numbers < self._packing.rows]
            rows = self._assembler.rows(np.zeros_like(full), full, micro_batch)
            for row in range(len(full), micro_batch):
                if numbers[row] < self.rows:
                    cut, labelled = self._assembler.cut_last(0)
                    rows.fill(row, cut)
                    rows.labels[row, labelled:] = IGNORE
                else:
                    rows.clear(row)
            samples = tuple(number if number < self.rows else -1 for number in numbers.tolist())
            yield rows.batch(0, micro_batch, samples)
