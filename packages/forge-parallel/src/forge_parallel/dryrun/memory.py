"""Records every allocation and release of a step, in order, so that the peak can be found and explained afterwards.

Counts the bytes that tensors request, not memory that kernels allocate themselves or that an allocator rounds up or cannot reuse.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from forge_parallel.placement.boxes import plain
from forge_parallel.torch_private import TorchDispatchMode, local_part, schema, storage_key, tree_leaves

WORK = "activations and work"
"""Class of all storages that are not classified."""

GRADIENTS = "gradients"
"""Class of the memory that a step leaves to the optimizer; a loss head may compute some of it in its forward."""


class Ledger(TorchDispatchMode):
    """Context that records the storages that operators allocate, resize and free, each under a number."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._sizes: list[int] = []
        self._classes: dict[int, str] = {}
        self._events: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor of tensors, such as DTensor: operators on its parts are recorded
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.name("communication", _plain((args, kwargs)))
        elif _allocates(func):
            for leaf in _plain(out):
                if leaf.device.type != "meta":
                    self._note(leaf.untyped_storage())
        return out

    @contextmanager
    def open(self) -> Iterator["Ledger"]:
        """Enters the ledger and also records resized storages: shards free gathered parameters in this way."""
        original = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            self._classes.setdefault(self._note(storage), "communication")
            return out

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    def name(self, kind: str, tensors: Iterable[torch.Tensor], *, anew: bool = False) -> None:
        """Classifies the storages of `tensors`; a storage keeps its first class unless `anew` is set."""
        for tensor in tensors:
            number = self._note(local(tensor).untyped_storage())
            if anew or number not in self._classes:
                self._classes[number] = kind

    def name_rest(self, kind: str) -> None:
        """Classifies all living storages that have no class yet."""
        for number in self._alive:
            if self._sizes[number]:
                self._classes.setdefault(number, kind)

    def here(self) -> int:
        """Returns the current position in the sequence of events."""
        return len(self._events)

    def peak(self, first: int = 0, last: int | None = None) -> dict[str, int]:
        """Returns the bytes by class at the moment between two positions when the total is largest."""
        totals = list(accumulate((change for _, change in self._events), initial=0))
        last = len(self._events) if last is None else last
        return self.at(max(range(first, last + 1), key=totals.__getitem__))

    def at(self, place: int) -> dict[str, int]:
        """Returns the bytes by class at one position."""
        sizes: Counter[str] = Counter()
        for number, change in self._events[:place]:
            sizes[self._classes.get(number, WORK)] += change
        return {kind: size for kind, size in sizes.items() if size}

    def growth(self, first: int, last: int) -> int:
        """Returns the bytes of activations, work and gradients allocated between two positions and not freed by the second."""
        before, after = self.at(first), self.at(last)
        return sum(after.get(kind, 0) - before.get(kind, 0) for kind in (WORK, GRADIENTS))

    def rise(self, first: int, last: int) -> int:
        """Returns how far the total rises above that at the first position before the second."""
        return sum(self.peak(first, last).values()) - sum(self.at(first).values())

    def _note(self, storage: torch.UntypedStorage) -> int:
        address = storage_key(storage)
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._sizes)
            self._sizes.append(0)
            self._alive[number] = weakref.ref(storage, partial(self._gone, address, number))
        self._change(number, storage.nbytes())
        return number

    def _change(self, number: int, size: int) -> None:
        if size != self._sizes[number]:
            self._events.append((number, size - self._sizes[number]))
            self._sizes[number] = size

    def _gone(self, address: int, number: int, _: Any) -> None:
        self._change(number, 0)
        self._alive.pop(number, None)
        if self._numbers.get(address) == number:
            del self._numbers[address]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, with its storage."""
    return plain(local_part(tensor)) if isinstance(tensor, DTensor) else tensor


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of the storages of `tensors` on this rank, each storage once, including padding of uneven shards."""
    storages = {_address(part): part.untyped_storage().nbytes() for part in map(local, tensors)}
    return sum(storages.values())


@cache
def _allocates(func: Any) -> bool:
    """Whether an operator returns something other than its arguments or views of them."""
    return any(result.alias_info is None for result in schema(func).returns)


def _plain(tree: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not hasattr(type(leaf), "__tensor_flatten__")]


def _address(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())
