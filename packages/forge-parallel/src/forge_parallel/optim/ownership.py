"""Which rank works on which whole matrix: decided by every rank for itself, from the layout, without a word exchanged.

A logical matrix is a box of a parameter: all of it, one expert of a stack, or one of several matrices that are fused. It has one
owner among the ranks that together hold its parameter, replicas included; so what is computed of whole matrices costs all ranks
together as much as it costs one process.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from forge_core.errors import PlanError
from forge_core.specs import TensorSpec
from forge_parallel.placement.boxes import Span

Cost = Callable[[int, int], int]
"""(rows, columns) -> what it costs to work on such a matrix."""


class LogicalMatrix(NamedTuple):
    """A logical matrix: where its box begins in the parameter `name`, and its size, 1 in all but the last two dimensions."""

    name: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.extent[-2], self.extent[-1]

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return self.extent[-2] * self.extent[-1]


def matrices_of(name: str, shape: Sequence[int], spec: TensorSpec) -> Iterator[LogicalMatrix]:
    """The logical matrices of a parameter, as its spec says; shapes decide nothing.

    Raises:
        PlanError: it is not made of matrices.
    """
    rows = int(spec.stacked)
    if len(shape) - rows != 2:
        raise PlanError(
            f"{name} has shape {tuple(shape)}, of which its spec makes no matrices; set `stacked` in its TensorSpec if dimension "
            "0 stacks them, or put it into another group, such as 'vector'"
        )
    sizes = spec.fused or (shape[rows],)
    for stacked in range(shape[0]) if spec.stacked else (None,):
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            lead = () if stacked is None else (stacked,)
            yield LogicalMatrix(name, (*lead, start, 0), (*(1 for _ in lead), size, shape[-1]))


def overlap(matrix: LogicalMatrix, held: Span) -> Span | None:
    """What a rank holds of a matrix, in the coordinates of the parameter."""
    begin = tuple(map(max, matrix.offset, held.offset))
    ends = (
        min(a + size, b + length)
        for a, size, b, length in zip(matrix.offset, matrix.extent, held.offset, held.extent, strict=True)
    )
    extent = tuple(end - start for start, end in zip(begin, ends, strict=True))
    return Span(begin, extent) if min(extent) > 0 else None


def owners(costs: Sequence[int], whole_on: Sequence[Collection[int]], ranks: int) -> list[int]:
    """The owner of each matrix, 0 to `ranks` - 1, so that all have about as much to do: the dearest first, each to a rank that
    holds it whole as long as that has room in an even share, else to the one that has least (Graham, 1969).

    Args:
        costs: of each matrix, such as operations.
        whole_on: the ranks on which each is whole, to which it need not travel.
        ranks: how many there are.
    """
    load, share = np.zeros(ranks, dtype=np.float64), sum(costs) / ranks
    found = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        near = [rank for rank in sorted(whole_on[index]) if load[rank] + costs[index] <= share]
        owner = min(near, key=lambda rank: load[rank]) if near else int(load.argmin())
        load[owner] += costs[index]
        found[index] = owner
    return found


def rounds(matrices: Sequence[LogicalMatrix], owner: Sequence[int], costs: Sequence[int], most: int) -> list[list[int]]:
    """Indices of the matrices that are worked on at the same time: of every owner as many as have `most` elements together, or a
    single one. Each begins with its dearest, so that all have about as much to do in a round."""
    made: list[list[int]] = []
    at, room = dict.fromkeys(owner, 0), dict.fromkeys(owner, most)
    for index in sorted(range(len(matrices)), key=lambda index: (-costs[index], index)):
        rank, size = owner[index], matrices[index].elements
        if size > room[rank] and room[rank] < most:
            at[rank], room[rank] = at[rank] + 1, most
        room[rank] -= size
        if at[rank] == len(made):
            made.append([])
        made[at[rank]].append(index)
    return made
