"""Every allocation and release of a step, in order, so that afterwards its peak can be read off and explained.

Counted are the bytes that tensors ask for. What a kernel takes for itself, and what an allocator rounds up or cannot
reuse, is not seen.
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
"""Class of all storages that no code has classified."""

GRADIENTS = "gradients"
"""Class of what a step leaves to the optimizer; a loss head may have made some of it in its forward."""


class Ledger(TorchDispatchMode):
    """Inside, what operators allocate is noted under a number per storage, and so is what is freed or resized."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._sizes: list[int] = []
        self._classes: dict[int, str] = {}
        self._events: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of tensors, such as DTensor: operators on its parts come by here
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
        """Enters the ledger, and notices storages that are resized: that is how shards free what they gathered."""
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
        """Says what the storages of `tensors` are; the first name stays unless it is given `anew`."""
        for tensor in tensors:
            number = self._note(local(tensor).untyped_storage())
            if anew or number not in self._classes:
                self._classes[number] = kind

    def name_rest(self, kind: str) -> None:
        """Says what all living storages are that have no name yet."""
        for number in self._alive:
            if self._sizes[number]:
                self._classes.setdefault(number, kind)

    def here(self) -> int:
        """The present place in the order of events."""
        return len(self._events)

    def peak(self, first: int = 0, last: int | None = None) -> dict[str, int]:
        """Bytes by class at the moment between two places at which they are most in all."""
        totals = list(accumulate((change for _, change in self._events), initial=0))
        last = len(self._events) if last is None else last
        return self.at(max(range(first, last + 1), key=totals.__getitem__))

    def at(self, place: int) -> dict[str, int]:
        """Bytes by class at one place."""
        held: Counter[str] = Counter()
        for number, change in self._events[:place]:
            held[self._classes.get(number, WORK)] += change
        return {kind: size for kind, size in held.items() if size}

    def growth(self, first: int, last: int) -> int:
        """Bytes of activations, work and gradients that came between two places and are still there at the second."""
        before, after = self.at(first), self.at(last)
        return sum(after.get(kind, 0) - before.get(kind, 0) for kind in (WORK, GRADIENTS))

    def rise(self, first: int, last: int) -> int:
        """How far the bytes of all classes rise above those at the first place before the second."""
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
    """What this rank holds of a tensor, with its storage."""
    return plain(local_part(tensor)) if isinstance(tensor, DTensor) else tensor


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors` on this rank, each once; padding of uneven shards is part of them."""
    storages = {_address(part): part.untyped_storage().nbytes() for part in map(local, tensors)}
    return sum(storages.values())


@cache
def _allocates(func: Any) -> bool:
    """Whether an operator returns something else than views of its arguments, or the arguments themselves."""
    return any(result.alias_info is None for result in schema(func).returns)


def _plain(tree: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not hasattr(type(leaf), "__tensor_flatten__")]


def _address(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())
