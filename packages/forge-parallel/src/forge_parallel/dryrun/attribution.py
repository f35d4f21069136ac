"""Says which of the repeated blocks an operator or an allocation of a step belongs to, so that a record can be unrolled.

Whatever happens while a block runs forward or backward belongs to this block. Elsewhere, such as in an optimizer, an operator
belongs to the block whose tensors it takes: tensors that were named, or that operators of this block created. An operator that
takes tensors of several blocks has to create its results from them one by one, by concatenation or element by element; anything
else is irregular.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from forge_parallel.dryrun.record import Shares, Unit
from forge_parallel.torch_private import schema, tree_leaves

Segments = tuple[tuple[Unit | None, int], ...]
"""Owner and bytes of each stretch of a storage, from its beginning."""

Place = tuple[int, int, Unit | None]
"""First byte of a stretch of a storage, its bytes, and its owner."""


class Attribution:
    """The owners of storages by number, and the unit to which what happens now belongs.

    Attributes:
        unit: the unit of the block that runs; elsewhere that of the operator that runs.
        inside: whether a block runs.
        irregular: why a step cannot be unrolled; None if it can.
    """

    def __init__(self, edges: frozenset[Unit] = frozenset()) -> None:
        """`edges` are the first and the last unit of each run."""
        self.unit: Unit | None = None
        self.inside = False
        self.irregular: str | None = None
        self._edges = edges
        self._running: tuple[str, bool] | None = None
        self._segments: dict[int, Segments] = {}
        self._named: set[int] = set()

    def begin(self, path: str, unit: Unit | None, *, forward: bool) -> None:
        """A block begins its forward or backward; the backward of another block ends."""
        if self.inside and self._running is not None and self._running[1]:
            self.irregular = "blocks run inside blocks"
        self.unit, self.inside, self._running = unit, True, (path, forward)

    def end(self, path: str, *, forward: bool) -> None:
        """The forward or backward of a block ends, if it is the running one."""
        if self.inside and self._running == (path, forward):
            self.inside, self.unit = False, None

    def end_any(self) -> None:
        """No block runs any more: the backward of a block whose input needs no gradient has no other end."""
        self.inside, self.unit = False, None

    def claim(self, number: int, size: int, segments: Segments | None = None) -> None:
        """Records the owners of a new storage; None: it belongs to what happens now."""
        self._segments[number] = ((self.unit, size),) if segments is None else segments

    def name(self, number: int, size: int, places: Iterable[Place]) -> None:
        """Records the owners of a storage that lasts longer than a step, from the tensors in it."""
        self._named.add(number)
        self._segments[number] = segments_of(size, places)

    def shares(self, number: int, size: int) -> tuple[Unit | None, Shares]:
        """Returns the unit of a change of a storage by `size` bytes; for one of several units None and their shares."""
        if self.inside:
            return self.unit, ()
        return shares_of(self._segments.get(number, ((None, abs(size)),)), size)

    def look(
        self, func: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor], number_of: Callable[[torch.Tensor], int | None]
    ) -> list[Segments]:
        """Notes which units' tensors an operator outside of blocks takes; `tensors` are all those in its arguments. Returns the
        owners of each tensor if there are several units; an empty list otherwise."""
        covers = [self._cover(tensor, number_of(tensor)) for tensor in tensors]
        units = {unit for cover in covers for unit, _ in cover} - {None}
        if len(units) > 1:  # numbers of the whole step, such as a factor, lie among the results of the last block
            large = {u for tensor, cover in zip(tensors, covers, strict=True) if tensor.numel() > 1 for u, _ in cover} - {None}
            units = large or units
        self.unit = next(iter(units)) if len(units) == 1 else None
        for tensor in written(func, args) if units else ():
            self._write(func, tensor, number_of(tensor))
        return covers if len(units) > 1 else []

    def results(
        self, func: Any, tensors: Sequence[torch.Tensor], covers: Sequence[Segments], results: Sequence[torch.Tensor]
    ) -> list[Segments]:
        """Returns the owners of the results of an operator that takes tensors of several units."""
        if not results:
            return []
        if len(results) > 1:
            lists = [index for index in range(len(tensors)) if index + len(results) <= len(tensors)]
            for start in lists:
                if all(covers[start + at] and _alike(tensors[start + at], result) for at, result in enumerate(results)):
                    owned = [covers[start + at] for at in range(len(results))]
                    return [_scaled(cover, tensors[start + at], results[at]) for at, cover in enumerate(owned)]
        else:
            (result,) = results
            joint = [at for at, tensor in enumerate(tensors) if len(covers[at]) > 1 and tensor.numel() == result.numel()]
            if joint:
                return [_scaled(covers[joint[0]], tensors[joint[0]], result)]
            if sum(tensor.numel() for tensor in tensors) == result.numel():
                return [
                    tuple(
                        segment
                        for tensor, cover in zip(tensors, covers, strict=True)
                        for segment in (_scaled(cover, tensor, result, part=True) if cover else ((None, _bytes(tensor, result)),))
                    )
                ]
            if result.numel() == 1 or all(unit is None or unit in self._edges for cover in covers for unit, _ in cover):
                return [((None, result.nbytes),)]
        self.irregular = f"{func} takes tensors of several blocks and returns others"
        return [((None, result.nbytes),) for result in results]

    def _cover(self, tensor: torch.Tensor, number: int | None) -> Segments:
        """Returns the owners of the elements of a tensor; an empty tuple if they are not known."""
        segments = self._segments.get(number, ()) if number is not None else ()
        if len(segments) < 2 or not tensor.is_contiguous():
            return segments
        start = int(tensor.storage_offset()) * tensor.element_size()
        end, found, at = start + tensor.numel() * tensor.element_size(), list[tuple[Unit | None, int]](), 0
        for unit, size in segments:
            if (inside := min(end, at + size) - max(start, at)) > 0:
                found.append((unit, inside))
            at += size
        return tuple(found)

    def _write(self, func: Any, tensor: torch.Tensor, number: int | None) -> None:
        """Notes that tensors of units are written into a tensor. A unit that fills the whole of one of unknown owner gets it; if
        several do, or it fills a part, the size may depend on the number of blocks."""
        if number is None or number in self._named or any(unit is not None for unit, _ in self._cover(tensor, number)):
            return
        size = tensor.untyped_storage().nbytes()
        if self.unit is not None and tensor.nbytes == size:
            self._segments[number] = ((self.unit, size),)
        elif size > tensor.element_size():
            self.irregular = f"{func} writes tensors of blocks into one of unknown owner"


def written(func: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the positional arguments that an operator changes, without those in lists."""
    return [args[place] for place in _writes(func) if place < len(args) and isinstance(args[place], torch.Tensor)]


def segments_of(size: int, places: Iterable[Place]) -> Segments:
    """Returns the owners of a storage of `size` bytes from the tensors in it."""
    ordered = sorted(set(places), key=lambda place: place[:2])
    if len(units := {unit for _, _, unit in ordered}) == 1:
        return ((units.pop(), size),)
    found, at = list[tuple[Unit | None, int]](), 0
    for first, count, unit in ordered:
        if first > at:
            found.append((None, first - at))
        found.append((unit, first + count - max(first, at)))
        at = first + count
    return (*found, (None, size - at)) if size > at else tuple(found)


def shares_of(segments: Segments, size: int) -> tuple[Unit | None, Shares]:
    """Returns the unit of `size` bytes that are divided like `segments`; for several units None and their shares."""
    units = {unit for unit, _ in segments}
    if len(units) == 1:
        return units.pop(), ()
    whole, summed = sum(part for _, part in segments), dict[Unit, int]()
    for unit, part in segments:
        if unit is not None:
            summed[unit] = summed.get(unit, 0) + part * size // whole
    return None, tuple(sorted(summed.items()))


def _scaled(cover: Segments, tensor: torch.Tensor, result: torch.Tensor, *, part: bool = False) -> Segments:
    """Returns the owners of a result, or of a part of it, made from the elements of a tensor one by one."""
    if len({unit for unit, _ in cover}) == 1:
        return ((cover[0][0], _bytes(tensor, result) if part else result.nbytes),)
    return tuple((unit, size * result.element_size() // tensor.element_size()) for unit, size in cover)


def _alike(tensor: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a result of a list is made from one tensor: it has its shape, or is a scalar."""
    return result.shape == tensor.shape or result.numel() == 1


def _bytes(tensor: torch.Tensor, result: torch.Tensor) -> int:
    return tensor.numel() * result.element_size()


def follow(block: nn.Module, path: str, unit: Unit | None, attribution: Callable[[], Attribution | None]) -> None:
    """Tells an attribution when a block runs, forward and backward; None outside of recorded steps."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        if (now := attribution()) is not None:
            now.begin(path, unit, forward=True)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: now.end(path, forward=False))

    def arrive(_: nn.Module, __: Any, output: Any) -> None:
        if (now := attribution()) is not None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: now.begin(path, unit, forward=False))

    def leave(*_: Any) -> None:
        if (now := attribution()) is not None:
            now.end(path, forward=True)

    # Around the hooks of strategies, which gather and free parameters.
    block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    block.register_forward_hook(arrive, prepend=True)
    block.register_forward_hook(leave)


@cache
def _writes(func: Any) -> tuple[int, ...]:
    """The places of the arguments that an operator changes."""
    arguments = () if func is None else schema(func).arguments
    return tuple(at for at, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write)
