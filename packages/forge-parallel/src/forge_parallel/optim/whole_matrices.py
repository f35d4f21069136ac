"""Optimizers that need whole matrices, such as Muon: each matrix has one owner, which updates it for all ranks.

A logical matrix is a box of a parameter: all of it, one expert of a stack, or one of several fused matrices. Its owner is one
of the ranks that together hold its parameter, replicas included, so the ranks together compute as much as one process would.
Every rank derives the owners from the layout; nothing is exchanged (docs/adr/0029).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.errors import PlanError
from forge_core.protocols.model import LaidOutModel, NamedTensor
from forge_core.specs import TensorSpec
from forge_parallel.placement.boxes import Span, local_box, span_on

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


ROUND = 1 << 25
"""Elements that an owner works on at the same time, about: 64 MiB in bf16."""


class Part(NamedTuple):
    """What this rank holds of a matrix: `region` of its box of the parameter `name`."""

    name: str
    matrix: LogicalMatrix
    region: tuple[slice, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that is laid out as the parameter, such as its gradient: a view, with as many dimensions."""
        return local_box(tensor).local[self.region]


class _Piece(NamedTuple):
    """A box of a matrix that one rank holds, or several hold alike."""

    span: Span
    ranks: tuple[int, ...]

    def source(self, owner: int) -> int:
        """Who sends it to the owner: itself if it can, else a near rank, which is more likely to be in the same node."""
        return min(self.ranks, key=lambda rank: (abs(rank - owner), rank))


class _Place(NamedTuple):
    """Where a piece belongs in the matrices that a rank owns."""

    which: int
    region: tuple[slice, ...]


class _Round(NamedTuple):
    """What a rank does in a round.

    Attributes:
        mine: the matrices that it owns.
        parts: what it holds of all matrices, in the order of their owners.
        sends: whether it is the one that sends the part; of parts that several ranks hold, one does.
        taken: (which of `mine`, region) of what it receives, in the order of who sends it.
        returned: the same of results, in the order of who gets them.
        sent, received, going, coming: elements to and from each rank: first of what is given, then of results.
    """

    mine: list[LogicalMatrix]
    parts: list[Part]
    sends: list[bool]
    taken: list[_Place]
    returned: list[_Place]
    sent: list[int]
    received: list[int]
    going: list[int]
    coming: list[int]


class _Flight(NamedTuple):
    """Elements on their way to this rank, and those that it sent, which live until the others have come."""

    arriving: Tensor
    leaving: Tensor
    work: dist.Work | None

    def landed(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.arriving


class WholeMatrices:
    """The matrices of a model's parameters of some optimizer groups, and who owns them. Collective: all ranks make it.

    Attributes:
        named: the parameters that are made of these matrices.
        rest: the other parameters.
        owned: the matrices that this rank owns.
    """

    def __init__(
        self,
        model: LaidOutModel,
        groups: Collection[str] = ("matrix",),
        cost: Cost = lambda rows, columns: rows * columns,
        most: int = ROUND,
    ) -> None:
        """
        Args:
            model: laid out.
            groups: optimizer groups (`forge_core.specs.Group`), by which specs tell what is worked on, never shapes.
            cost: what it costs to work on a matrix of (rows, columns); owners get about as much each.
            most: elements that an owner works on at the same time, if it is more than one matrix.

        Raises:
            PlanError: a parameter of these groups is not made of matrices.
        """
        trainable = list(model.trainable())
        self.named = [item for item in trainable if item.group in groups]
        self.rest: list[NamedTensor] = [item for item in trainable if item.group not in groups]
        self._device, self._group, self._rank, ranks = model.topology.device, None, 0, [model.topology.rank]
        if model.topology.size > 1:
            self._group = model.topology.stage_group()
            self._rank, ranks = self._group.rank(), dist.get_process_group_ranks(self._group)
        self._ranks = len(ranks)
        matrices, pieces = [], []
        for name, tensor, _ in self.named:
            held: dict[Span, list[int]] = {}
            for number, rank in enumerate(ranks):
                held.setdefault(span_on(tensor, model.topology.layout, rank), []).append(number)
            for matrix in matrices_of(name, tensor.shape, model.specs.tensors[name]):
                found = ((overlap(matrix, span), tuple(who)) for span, who in held.items())
                matrices.append(matrix)
                pieces.append([_Piece(span, who) for span, who in found if span is not None])
        costs = [cost(*matrix.shape) for matrix in matrices]
        whole_on = [split[0].ranks if len(split) == 1 else () for split in pieces]
        owner = owners(costs, whole_on, self._ranks)
        self.owned = [matrix for matrix, rank in zip(matrices, owner, strict=True) if rank == self._rank]
        self._held = {name: span_on(tensor, model.topology.layout, model.topology.rank) for name, tensor, _ in self.named}
        self._rounds = [
            self._round([(matrices[index], owner[index], pieces[index]) for index in chosen])
            for chosen in rounds(matrices, owner, costs, most)
        ]

    @cached_property
    def parts(self) -> list[Part]:
        """All that this rank holds of the matrices."""
        return [part for plan in self._rounds for part in plan.parts]

    def each(
        self, give: Callable[[Part], Tensor], work: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[Part, Tensor]]:
        """Collective: the part of `work(matrix)` that this rank holds, for every matrix of which it holds one.

        All ranks go through it to its end; one that stops early leaves the others waiting.

        Args:
            give: what a part brings to the whole, of the part's shape. Called once for each part of this rank, in which it may
                update a momentum, before that part is yielded.
            work: (rows, columns) -> (rows, columns), on the owner; the same on every rank.
            dtype: in which numbers travel and `work` gets them.
        """
        coming = self._collected(self._rounds[0], give, dtype) if self._rounds else None
        going: tuple[_Round, _Flight] | None = None
        for number, plan in enumerate(self._rounds):
            assert coming is not None
            later = self._collected(self._rounds[number + 1], give, dtype) if number + 1 < len(self._rounds) else None
            made = [work(matrix) for matrix in self._assembled(plan, coming)]
            returned = [made[which][region] for which, region in plan.returned]
            leaving = self._flight(returned, plan.going, plan.coming, dtype)
            if going is not None:
                yield from self._delivered(*going)
            coming, going = later, (plan, leaving)
        if going is not None:
            yield from self._delivered(*going)

    def _round(self, chosen: list[tuple[LogicalMatrix, int, list[_Piece]]]) -> _Round:
        me, ranks = self._rank, range(self._ranks)
        mine: list[LogicalMatrix] = []
        parts: list[list[tuple[Part, bool]]] = [[] for _ in ranks]
        taken: list[list[_Place]] = [[] for _ in ranks]
        returned: list[list[_Place]] = [[] for _ in ranks]
        for matrix, owner, pieces in chosen:
            for piece in pieces:
                source = piece.source(owner)
                if me in piece.ranks:
                    region = _within(piece.span, self._held[matrix.name].offset)
                    parts[owner].append((Part(matrix.name, matrix, region), source == me))
                if owner == me:
                    place = _Place(len(mine), _within(piece.span, matrix.offset)[-2:])
                    taken[source].append(place)
                    for rank in piece.ranks:
                        returned[rank].append(place)
            mine += [matrix] if owner == me else []
        return _Round(
            mine,
            parts=[part for of_owner in parts for part, _ in of_owner],
            sends=[sends for of_owner in parts for _, sends in of_owner],
            taken=[place for of_rank in taken for place in of_rank],
            returned=[place for of_rank in returned for place in of_rank],
            sent=[sum(_elements(part.region) for part, sends in of_owner if sends) for of_owner in parts],
            received=[sum(_elements(place.region) for place in of_rank) for of_rank in taken],
            going=[sum(_elements(place.region) for place in of_rank) for of_rank in returned],
            coming=[sum(_elements(part.region) for part, _ in of_owner) for of_owner in parts],
        )

    def _collected(self, plan: _Round, give: Callable[[Part], Tensor], dtype: torch.dtype) -> _Flight:
        values = [give(part) for part in plan.parts]  # also what another rank sends: `give` may update a momentum
        sent = [value for value, sends in zip(values, plan.sends, strict=True) if sends]
        return self._flight(sent, plan.sent, plan.received, dtype)

    def _assembled(self, plan: _Round, coming: _Flight) -> Iterator[Tensor]:
        """The whole matrices that this rank owns."""
        landed = coming.landed()
        wholes = [landed.new_empty(matrix.shape) for matrix in plan.mine]
        places = [wholes[which][region] for which, region in plan.taken]
        for place, value in zip(places, landed.split([place.numel() for place in places]), strict=True):
            place.copy_(value.view(place.shape))
        yield from wholes

    def _delivered(self, plan: _Round, coming: _Flight) -> Iterator[tuple[Part, Tensor]]:
        sizes = [_elements(part.region) for part in plan.parts]
        for part, value in zip(plan.parts, coming.landed().split(sizes), strict=True):
            yield part, value.view([piece.stop - piece.start for piece in part.region])

    def _flight(self, values: list[Tensor], send: list[int], receive: list[int], dtype: torch.dtype) -> _Flight:
        flat = [value.to(self._device, dtype).reshape(-1) for value in values]
        leaving = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self._device)
        if self._ranks == 1:
            return _Flight(leaving, leaving, None)
        arriving = leaving.new_empty(sum(receive))
        work = dist.all_to_all_single(arriving, leaving, receive, send, group=self._group, async_op=True)
        return _Flight(arriving, leaving, work)


def _within(span: Span, origin: tuple[int, ...]) -> tuple[slice, ...]:
    starts = (start - zero for start, zero in zip(span.offset, origin, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, span.extent, strict=True))


def _elements(region: tuple[slice, ...]) -> int:
    return prod(piece.stop - piece.start for piece in region)
