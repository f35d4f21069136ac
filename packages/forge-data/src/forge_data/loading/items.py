"""Loads the items of documents, such as images, into the extras of batches: in threads, one step ahead."""

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
"""A row as (number of its packing, number of the row in it); a negative packing means a filler row."""


Loaded = tuple[np.ndarray, np.ndarray | None]
"""Items (n, ...) float32, and a number of each (n,) float32 if the source has them."""


class Items:
    """Loads the items of rows as `extras` of their batches; a context manager that ends its threads.

    Attributes:
        names: names of the extras, see `SourceWithItems`; None if no source has items.
    """

    def __init__(self, packings: Sequence[Any], workers: int | None = None) -> None:
        """
        Args:
            packings: packing of each source; packings of streams have no items.
            workers: number of threads; by default one per usable core.

        Raises:
            DataError: two sources have items of different kinds or shapes.
        """
        self._packings: list[Packing] = list(packings)
        sources: list[Any] = [packing.source for packing in packings]
        self._sources = [source if isinstance(source, SourceWithItems) else None for source in sources]
        with_items: list[Any] = [source for source in self._sources if source is not None]
        kinds = {(source.extras, tuple(source.item_shape)): source.name for source in with_items}
        if len(kinds) > 1:
            (first_kind, second_kind), (first, second) = list(kinds)[:2], list(kinds.values())[:2]
            raise DataError(
                f"{first} has {first_kind[0][0]} of shape {first_kind[1]}, but {second} has {second_kind[0][0]} of shape "
                f"{second_kind[1]}; one batch cannot hold both"
            )
        self.names: tuple[str, ...] | None = with_items[0].extras if with_items else None
        self._pool = ThreadPoolExecutor(workers or usable_cores(), "forge-items") if with_items else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, rows: Sequence[Named]) -> "Loading":
        """Starts to load the items of some rows in threads."""
        loads: list[list[Future[Loaded]]] = []
        for place, number in rows:
            source = self._sources[place] if place >= 0 else None
            if self._pool is None or source is None:
                loads.append([])
                continue
            spans = self._packings[place].items(number)
            loads.append([self._pool.submit(load_items, source, first, stop) for first, stop in spans])
        return Loading(self.names, loads)


class Loading:
    """Items of some rows while threads load them."""

    def __init__(self, names: tuple[str, ...] | None, loads: list[list["Future[Loaded]"]]) -> None:
        self._names, self._loads = names, loads

    def extras(self, start: int, stop: int, pin: bool = False) -> "Mapping[str, Tensor]":
        """Waits for the items of rows [start, stop) and returns them as extras; empty if no row has an item.

        Raises:
            DataError: an item cannot be loaded.
        """
        items = [[load.result() for load in row] for row in self._loads[start:stop]]
        extras = {} if self._names is None else stacked(self._names, items)
        return {name: tensor.pin_memory() for name, tensor in extras.items()} if pin else extras


def names_of(sources: Iterable[Any]) -> frozenset[str]:
    """Returns the names of the extras in batches of these sources."""
    with_items = (source for source in sources if isinstance(source, SourceWithItems))
    return frozenset(
        name for source in with_items if source.items_before(np.array([source.tokens])).any() for name in source.extras
    )


def load_items(source: SourceWithItems, first: int, stop: int) -> Loaded:
    """Returns items [first, stop) of a source, and their numbers if the source has a third extra."""
    values: Any = getattr(source, "item_values", None)
    return source.load(first, stop), values(first, stop) if len(source.extras) > 2 else None


def stacked(names: tuple[str, ...], rows: Sequence[Sequence[Loaded]]) -> "dict[str, Tensor]":
    """Returns the items of some rows as extras: all items (n, ...) float32, the item numbers of each row (B, M) int64, padded
    with -1, and, with a third name, the number of each item (n,) float32; empty if there are no items."""
    counts = [sum(len(items) for items, _ in row) for row in rows]
    if not sum(counts):
        return {}
    import torch

    numbers = np.full((len(counts), max(counts)), -1, dtype=np.int64)
    for row, (count, after) in enumerate(zip(counts, np.cumsum(counts).tolist(), strict=True)):
        numbers[row, :count] = np.arange(after - count, after)
    arrays = [np.concatenate([items for row in rows for items, _ in row]), numbers]
    if len(names) > 2:
        arrays.append(np.concatenate([values for row in rows for _, values in row if values is not None]))
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}


class StepItems:
    """Adds the items of each step to its batches, and starts to load the items of the next step."""

    def __init__(self, items: Items, rows_of: Callable[[int], Sequence[Named]], steps: int | None, pin: bool) -> None:
        """
        Args:
            items: loads the items; at least one source has some.
            rows_of: returns this rank's rows of a step.
            steps: number of steps; None if endless.
            pin: whether to copy items to page-locked memory.
        """
        self._items, self._rows_of, self._steps, self._pin = items, rows_of, steps, pin
        self._begun: dict[int, Loading] = {}

    def add(self, step: int, batches: list[Batch]) -> list[Batch]:
        """Returns the batches of a step with their items."""
        loading = self._begun.pop(step, None) or self._items.begin(self._rows_of(step))
        if self._steps is None or step + 1 < self._steps:
            self._begun = {step + 1: self._items.begin(self._rows_of(step + 1))}
        with_items, row = [], 0
        for batch in batches:
            count = len(batch.tokens)
            with_items.append(replace(batch, extras=loading.extras(row, row + count, self._pin)))
            row += count
        return with_items
