"""What tests of the loader share: steps of a run as plain tuples, over any number of ranks, workers and micro-batches."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from forge_core.batch import Batch
from forge_core.protocols.data import SourceComponent, SourceContext
from forge_data.loading.stream import open_stream
from forge_data.order.cursor import merge_cursors
from forge_data.section import Data

Row = tuple[Any, ...]


def opened(data: Data, *, batch: int, ranks: int = 1, rank: int = 0, micro: int = 1, workspace: Path = Path("unused")) -> Any:
    labels = getattr(data.sources[0], "labels", ())
    model = SimpleNamespace(labels=labels) if labels else None  # the model of labeled texts has their labels
    shape = {"global_batch": batch, "micro_batch": micro, "rank": rank, "ranks": ranks}
    return open_stream(data, workspace=workspace, seed=5, model=model, **shape)


def rows_of(batches: list[Batch]) -> list[Row]:
    """Every row with its sample number, all that a model sees, and its source where there are several."""
    rows = []
    for batch in batches:
        names = None if batch.sources is None else [batch.sources.names[number] for number in batch.sources.rows.tolist()]
        for index, sample in enumerate(batch.samples):
            parts = (batch.tokens, batch.labels, batch.positions, batch.documents)
            seen = (None if part is None else tuple(part[index].tolist()) for part in parts)
            rows.append((sample, *seen, names[index] if names else None))
    return rows


def steps_of(
    data: Data,
    steps: int,
    *,
    batch: int,
    ranks: int = 1,
    micro: int = 1,
    workers: int = 0,
    cursor: Any = None,
    workspace: Path = Path("unused"),
) -> tuple[list[list[Row]], Any]:
    """The rows of each step over all ranks, in rank order, and the cursor after the last one, as a checkpoint keeps it."""
    data = dataclasses.replace(data, loader_workers=workers)
    shares, cursors = [], []
    for rank in range(ranks):
        stream = opened(data, batch=batch, ranks=ranks, rank=rank, micro=micro, workspace=workspace)
        reading = stream.from_cursor(cursor or stream.start())
        found = [(rows_of(batches), after) for batches, after in itertools.islice(reading, steps)]
        reading.close()
        shares.append([rows for rows, _ in found])
        cursors.append(found[-1][1] if found else cursor or stream.start())
    together = [[row for rank in range(ranks) for row in shares[rank][step]] for step in range(len(shares[0]))]
    return together, merge_cursors(cursors)


@dataclass(frozen=True, kw_only=True)
class Drip(SourceComponent):
    """A stream of documents that can only be read in order; each token tells its shard and document."""

    shards: int = 4
    documents: int = 9
    longest: int = 12
    fails_at: int | None = None

    def build(self, context: SourceContext) -> "DripSource":
        return DripSource(self)


class DripSource:
    vocab_size, max_id, tokenizer = None, None, None

    def __init__(self, component: Drip) -> None:
        self.name = "drip"
        self.component = component
        self.shards = component.shards
        self.fingerprint = f"drip-{component.shards}-{component.documents}-{component.longest}"

    def stream(self, shard: int, start: int = 0) -> Iterator[np.ndarray]:
        for number in range(start, self.component.documents + shard % 3):
            if self.component.fails_at == number:
                raise ValueError(f"record {number} of shard {shard} is broken")
            yield self.document(shard, number)

    def document(self, shard: int, number: int) -> np.ndarray:
        """Length from 0 to `longest`: shard and number in every token, the last one 0."""
        length = (shard * 7 + number * 5) % (self.component.longest + 1)
        ids = 1000 * (shard + 1) + 10 * number + np.arange(length) % 10 + 1
        return np.append(ids[:-1], 0).astype(np.uint32) if length else np.empty(0, np.uint32)
