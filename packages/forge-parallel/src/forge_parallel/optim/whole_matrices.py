"""Functions of whole matrices, for optimizers whose parameters ranks hold in parts: the mechanism of Muon, for any plugin.

    matrices = WholeMatrices(model)
    for part, update in matrices.each(lambda part: part.of(gradients[part.name]), lambda matrix: matrix / matrix.norm(), dtype):
        part.of(parameters[part.name]).sub_(rate * update)

Each logical matrix has one owner (`optim.ownership`). Ranks send their parts to the owner, which computes a function of the
whole, once over all ranks, and sends every rank the part of the result that it holds. So the result does not depend on the
layout, however a parameter is cut: by FSDP, HSDP, tensor, context or expert parallelism. Matrices travel in rounds of bounded
size, and while one is computed the next comes in and the one before goes out.
"""

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.protocols.model import LaidOutModel, NamedTensor
from forge_parallel.optim.ownership import Cost, LogicalMatrix, matrices_of, overlap, owners, rounds
from forge_parallel.placement.boxes import Span, local_box, span_on

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
