"""Records every allocation and release of a step, in order, so that the peak can be found and explained afterwards.

Counts the bytes that tensors request, not memory that kernels allocate themselves or that an allocator rounds up or cannot reuse.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from forge_parallel.dryrun.attribution import Attribution, Place, Segments, segments_of, shares_of
from forge_parallel.dryrun.record import TOUCHED, WORK, Call, Shares, StepEvent, StepRecord, Unit
from forge_parallel.dryrun.traffic import SCATTERED, Flow
from forge_parallel.placement.boxes import plain
from forge_parallel.torch_private import TorchDispatchMode, around_shapes, local_part, schema, storage_key, tree_leaves


class Ledger(TorchDispatchMode):
    """Context that records the storages that operators allocate, resize and free, each under a number.

    Attributes:
        attribution: says which of the repeated blocks an entry belongs to; None if blocks do not matter.
    """

    def __init__(self, attribution: Attribution | None = None) -> None:
        super().__init__()
        self.attribution = attribution
        self._paused = False
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._sizes: list[int] = []
        self._classes: dict[int, str] = {}
        self._events: list[tuple[Unit | None, int | str | Call, int, Shares]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor of tensors, such as DTensor: operators on its parts are recorded
        if self._paused:
            return func(*args, **(kwargs or {}))
        attribution, owners = self.attribution, None
        if attribution is None or attribution.inside:
            out = func(*args, **(kwargs or {}))
            fresh = _fresh(func, args, kwargs, out)
        else:
            taken = _plain((args, kwargs))
            covers = attribution.look(func, args, taken, self._number)
            if attribution.unit is not None:
                self._events.append((attribution.unit, TOUCHED, 0, ()))
            out = func(*args, **(kwargs or {}))
            fresh = _fresh(func, args, kwargs, out)
            if covers and fresh:
                owners = iter(attribution.results(func, taken, covers, fresh))
        if func.namespace == "c10d":
            self.name("communication", _plain((args, kwargs)))
        else:
            for leaf in fresh:
                self._note(leaf.untyped_storage(), None if owners is None else next(owners))
        if attribution is not None and not attribution.inside:
            attribution.unit = None
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
            with self, around_shapes(self._pause):
                yield self
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Context that records nothing."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def name(self, kind: str, tensors: Iterable[torch.Tensor], *, anew: bool = False) -> None:
        """Classifies the storages of `tensors`; a storage keeps its first class unless `anew` is set."""
        for tensor in tensors:
            number = self._note(local(tensor).untyped_storage())
            if anew or number not in self._classes:
                self._classes[number] = kind

    def own(self, kind: str, owned: Iterable[tuple[Unit | None, torch.Tensor]]) -> None:
        """Classifies storages that outlive the step, like `name`, and records the units that they belong to."""
        for storage, places in places_of(owned).values():
            address = storage_key(storage)
            if self.attribution is not None and address not in self._numbers:
                self.attribution.name(len(self._sizes), storage.nbytes(), places)
            number = self._note(storage, (), kept=True)
            self._classes.setdefault(number, kind)

    def attribute(self, owned: Iterable[tuple[Unit | None, torch.Tensor]]) -> None:
        """Records the units that known storages belong to, such as those of gradients."""
        for address, (storage, places) in places_of(owned).items() if self.attribution is not None else ():
            if (number := self._numbers.get(address)) is not None:
                self.attribution.name(number, storage.nbytes(), places)  # type: ignore[union-attr]

    def know(self, tensor: torch.Tensor, units: Sequence[Unit | None]) -> None:
        """Records the owner of each number of a contiguous vector, which is not counted."""
        if self.attribution is not None and storage_key(tensor.untyped_storage()) not in self._numbers:
            number, size = len(self._sizes), tensor.element_size()
            self._numbers[_address(tensor)] = number
            self._sizes.append(0)
            self.attribution.name(number, tensor.nbytes, [(index * size, size, unit) for index, unit in enumerate(units)])

    def call(self, flow: Flow, ranks: int, tensors: Sequence[torch.Tensor]) -> None:
        """Records a collective; `tensors` are its payload."""
        attribution, unit, shares = self.attribution, None, ()
        if attribution is not None and attribution.inside:
            unit = attribution.unit
        elif attribution is not None:
            covers = attribution.look(None, (), tensors, self._number)
            unit, attribution.unit = attribution.unit, None
            if covers:
                segments = tuple(segment for cover in covers for segment in cover)
                unit, shares = shares_of(segments, flow.payload)
                if flow.kind in SCATTERED:
                    attribution.irregular = f"{flow.kind} over {flow.axis} exchanges tensors of several blocks"
        self._events.append((unit, Call(flow, ranks), flow.payload, shares))

    def name_rest(self, kind: str) -> None:
        """Classifies all living storages that have no class yet."""
        for number in self._alive:
            if self._sizes[number]:
                self._classes.setdefault(number, kind)

    def here(self) -> int:
        """Returns the current position in the sequence of events."""
        return len(self._events)

    def record(self) -> StepRecord:
        """Returns what was recorded so far."""
        classes = self._classes
        return StepRecord(
            [
                StepEvent(unit, classes.get(what, WORK) if isinstance(what, int) else what, size, shares)
                for unit, what, size, shares in self._events
            ]
        )

    def _number(self, tensor: torch.Tensor) -> int | None:
        return self._numbers.get(_address(tensor))

    def _note(self, storage: torch.UntypedStorage, owners: Segments | None = None, *, kept: bool = False) -> int:
        address = storage_key(storage)
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._sizes)
            self._sizes.append(0)
            self._alive[number] = weakref.ref(storage, partial(self._gone, address, number))
            if self.attribution is not None and not kept:
                self.attribution.claim(number, storage.nbytes(), owners)
        self._change(number, storage.nbytes())
        return number

    def _change(self, number: int, size: int) -> None:
        if change := size - self._sizes[number]:
            unit, shares = (None, ()) if self.attribution is None else self.attribution.shares(number, change)
            self._events.append((unit, number, change, shares))
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
    return sum(size for _, size in held_by((None, tensor) for tensor in tensors))


def held_by(owned: Iterable[tuple[Unit | None, torch.Tensor]]) -> list[tuple[Unit | None, int]]:
    """Returns the bytes of the storages of tensors by unit, in any number of summands; see `held`."""
    return [part for storage, places in places_of(owned).values() for part in segments_of(storage.nbytes(), places)]


def places_of(owned: Iterable[tuple[Unit | None, torch.Tensor]]) -> dict[int, tuple[torch.UntypedStorage, list[Place]]]:
    """Returns each storage of tensors once, with the places of the tensors in it."""
    storages: dict[int, tuple[torch.UntypedStorage, list[Place]]] = {}
    for unit, tensor in owned:
        part = local(tensor)
        first = int(part.storage_offset()) * part.element_size()
        place = first, part.numel() * part.element_size(), unit
        storages.setdefault(_address(part), (part.untyped_storage(), []))[1].append(place)
    return storages


@cache
def _allocates(func: Any) -> bool:
    """Whether an operator returns something other than its arguments or views of them."""
    return any(result.alias_info is None for result in schema(func).returns)


def _fresh(func: Any, args: Any, kwargs: Any, out: Any) -> list[torch.Tensor]:
    """Returns the results that an operator may have allocated. Some, such as `to`, return a view or a copy."""
    results = [leaf for leaf in _plain(out) if leaf.device.type != "meta"]
    if not results or _allocates(func):
        return results
    taken = {_address(tensor) for tensor in _plain((args, kwargs))}
    return [leaf for leaf in results if _address(leaf) not in taken]


def _plain(tree: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not hasattr(type(leaf), "__tensor_flatten__")]


def _address(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())
