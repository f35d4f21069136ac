"""What accompanies the tokens of a batch where sources have items, such as images: loaded by threads, one step ahead."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from forge_core.batch import Batch
from forge_core.errors import DataError
from forge_core.machine import usable_cores
from forge_core.protocols.data import SourceWithItems
from forge_data.packing.concatenation import Packing

if TYPE_CHECKING:
    from torch import Tensor

Named = tuple[int, int]
"""A row by the number of its packing and its number there; a packing below 0 stands for filler."""


class Items:
    """Items of rows, as `extras` of their batches; a context manager that ends its threads.

    Attributes:
        names: of the two extras; None where no source has items, and `extras` gives none.
    """

    def __init__(self, packings: Sequence[Any], workers: int | None = None) -> None:
        """
        Args:
            packings: of each source; those of streams have no items.
            workers: threads; one for each usable core by default.

        Raises:
            DataError: two sources have items that do not fit one batch.
        """
        self._packings: list[Packing] = list(packings)
        sources: list[Any] = [packing.source for packing in packings]
        self._sources = [source if isinstance(source, SourceWithItems) else None for source in sources]
        with_items: list[Any] = [source for source in self._sources if source is not None]
        kinds = {(source.extras, tuple(source.item_shape)): source.name for source in with_items}
        if len(kinds) > 1:
            (one, two), (first, second) = list(kinds)[:2], list(kinds.values())[:2]
            raise DataError(
                f"{first} has {one[0][0]} of shape {one[1]}, {second} {two[0][0]} of shape {two[1]}; they do not fit one batch"
            )
        self.names: tuple[str, str] | None = with_items[0].extras if with_items else None
        self._pool = ThreadPoolExecutor(workers or usable_cores(), "forge-items") if with_items else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, rows: Sequence[Named]) -> "Loading":
        """Has threads load the items of some rows."""
        loads: list[list[Future[np.ndarray]]] = []
        for place, number in rows:
            source = self._sources[place] if place >= 0 else None
            if self._pool is None or source is None:
                loads.append([])
                continue
            spans = self._packings[place].items(number)
            loads.append([self._pool.submit(source.load, first, stop) for first, stop in spans])
        return Loading(self.names, loads)


class Loading:
    """Items of some rows that are being loaded."""

    def __init__(self, names: tuple[str, str] | None, loads: list[list["Future[np.ndarray]"]]) -> None:
        self._names, self._loads = names, loads

    def extras(self, start: int, stop: int, pin: bool = False) -> "Mapping[str, Tensor]":
        """Those of rows [start, stop), waited for; empty where no row has an item.

        Raises:
            DataError: an item cannot be loaded.
        """
        found = [[load.result() for load in row] for row in self._loads[start:stop]]
        extras = {} if self._names is None else stacked(self._names, found)
        return {name: each.pin_memory() for name, each in extras.items()} if pin else extras


def names_of(sources: Iterable[Any]) -> frozenset[str]:
    """Names of the extras that batches of these sources have."""
    with_items = (source for source in sources if isinstance(source, SourceWithItems))
    return frozenset(name for each in with_items if each.items_before(np.array([each.tokens])).any() for name in each.extras)


def stacked(names: tuple[str, str], rows: Sequence[Sequence[np.ndarray]]) -> "dict[str, Tensor]":
    """Items of some rows as extras: all of them (n, ...) float32, and the numbers of each row's (B, M) int64, -1 where a row has
    fewer; empty where there is none."""
    counts = [sum(map(len, row)) for row in rows]
    if not sum(counts):
        return {}
    import torch

    numbers = np.full((len(counts), max(counts)), -1, dtype=np.int64)
    for row, (count, after) in enumerate(zip(counts, np.cumsum(counts).tolist(), strict=True)):
        numbers[row, :count] = np.arange(after - count, after)
    items = np.concatenate([part for row in rows for part in row])
    return dict(zip(names, (torch.from_numpy(items), torch.from_numpy(numbers)), strict=True))


class StepItems:
    """Adds the items of each step to its batches, and begins with those of the next step."""

    def __init__(self, items: Items, rows_of: Callable[[int], Sequence[Named]], steps: int | None, pin: bool) -> None:
        """`rows_of` names this rank's rows of a step, of which there are `steps`."""
        self._items, self._rows_of, self._steps, self._pin = items, rows_of, steps, pin
        self._begun: dict[int, Loading] = {}

    def add(self, step: int, batches: list[Batch]) -> list[Batch]:
        """The batches of a step with their items."""
        if self._items.names is None:
            return batches
        loading = self._begun.pop(step, None) or self._items.begin(self._rows_of(step))
        if self._steps is None or step + 1 < self._steps:
            self._begun = {step + 1: self._items.begin(self._rows_of(step + 1))}
        found, row = [], 0
        for batch in batches:
            count = len(batch.tokens)
            found.append(replace(batch, extras=loading.extras(row, row + count, self._pin)))
            row += count
        return found
