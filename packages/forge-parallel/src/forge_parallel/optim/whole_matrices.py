"""Support for optimizers that need full matrices, such as Muon: each matrix has one owner, which updates it for all ranks.

A logical matrix is a box of a parameter: the whole parameter, one expert of a stack, or one of several fused matrices. Its owner
is one of the ranks that together hold the parameter, replicas included, so all ranks together do the work of one process. Every
rank derives the owners from the layout, without communication (docs/adr/0029).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from forge_core.errors import PlanError
from forge_core.protocols.model import LaidOutModel, NamedTensor
from forge_core.specs import TensorSpec
from forge_parallel.placement.boxes import Span, local_box, span_on

Cost = Callable[[int, int], int]
"""(rows, columns) -> cost of the work on a matrix."""


class LogicalMatrix(NamedTuple):
    """A logical matrix: the offset of its box in parameter `name`, and its extent, 1 in all but the last two dimensions."""

    name: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.extent[-2], self.extent[-1]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.extent[-2] * self.extent[-1]


def matrices_of(name: str, shape: Sequence[int], spec: TensorSpec) -> Iterator[LogicalMatrix]:
    """Yields the logical matrices of a parameter according to its spec.

    Raises:
        PlanError: the parameter does not consist of matrices.
    """
    rows = int(spec.stacked)
    if len(shape) - rows != 2:
        raise PlanError(
            f"{name} has shape {tuple(shape)}, which by its spec are not matrices; set `stacked` in its TensorSpec if dimension "
            "0 stacks matrices, or give it another group, such as 'vector'"
        )
    sizes = spec.fused or (shape[rows],)
    for stacked in range(shape[0]) if spec.stacked else (None,):
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            lead = () if stacked is None else (stacked,)
            yield LogicalMatrix(name, (*lead, start, 0), (*(1 for _ in lead), size, shape[-1]))


def overlap(matrix: LogicalMatrix, held: Span) -> Span | None:
    """Returns the part of a matrix that a rank holds, in the coordinates of the parameter; None if it holds nothing."""
    begin = tuple(map(max, matrix.offset, held.offset))
    ends = (
        min(a + size, b + length)
        for a, size, b, length in zip(matrix.offset, matrix.extent, held.offset, held.extent, strict=True)
    )
    extent = tuple(end - start for start, end in zip(begin, ends, strict=True))
    return Span(begin, extent) if min(extent) > 0 else None


def owners(costs: Sequence[int], whole_on: Sequence[Collection[int]], ranks: int) -> list[int]:
    """Returns the owner of each matrix, 0 to `ranks` - 1, so that all ranks have about equal costs. Assigns the most expensive
    matrix first, to a rank that holds it whole if that rank's cost stays within an even share, otherwise to the rank with the
    lowest cost (Graham, 1969).

    Args:
        costs: cost of each matrix, such as operations.
        whole_on: the ranks that hold each matrix whole; there it need not be sent.
        ranks: number of ranks.
    """
    load, share = np.zeros(ranks, dtype=np.float64), sum(costs) / ranks
    owner_of = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        near = [rank for rank in sorted(whole_on[index]) if load[rank] + costs[index] <= share]
        owner = min(near, key=lambda rank: load[rank]) if near else int(load.argmin())
        load[owner] += costs[index]
        owner_of[index] = owner
    return owner_of


def rounds(matrices: Sequence[LogicalMatrix], owner: Sequence[int], costs: Sequence[int], most: int) -> list[list[int]]:
    """Returns the indices of matrices for each round: per owner, matrices with up to `most` elements together, or a single one.
    Each owner starts with its most expensive matrices, so that all ranks have about equal costs in a round."""
    indices: list[list[int]] = []
    at, room = dict.fromkeys(owner, 0), dict.fromkeys(owner, most)
    for index in sorted(range(len(matrices)), key=lambda index: (-costs[index], index)):
        rank, size = owner[index], matrices[index].elements
        if size > room[rank] and room[rank] < most:
            at[rank], room[rank] = at[rank] + 1, most
        room[rank] -= size
        if at[rank] == len(indices):
            indices.append([])
        indices[at[rank]].append(index)
    return indices


ROUND = 1 << 25
"""Approximate number of elements that an owner works on at a time: 64 MiB in bf16."""


class Part(NamedTuple):
    """The part of a matrix that this rank holds: `region` of its box of parameter `name`."""

    name: str
    matrix: LogicalMatrix
    region: tuple[slice, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the part of a tensor that is sharded like the parameter, such as its gradient: a view of equal rank."""
        return local_box(tensor).local[self.region]

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Returns the rows of this part of a tensor that `row_state` made: a view (..., rows, 1)."""
        return local_box(tensor).local[(*self.region[:-1], slice(None))]


def row_state(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns zeros (..., rows, 1), one for each row of a parameter, sharded like its rows; ranks that hold other columns of the
    same rows hold the same."""
    local = local_box(tensor).local
    zeros = torch.zeros((*local.shape[:-1], 1), dtype=dtype, device=local.device)
    if not isinstance(tensor, DTensor):
        return zeros
    shape, last = torch.Size((*tensor.shape[:-1], 1)), tensor.dim() - 1
    placements = [Replicate() if getattr(each, "dim", None) == last else each for each in tensor.placements]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, tensor.device_mesh, placements, run_check=False, shape=shape, stride=stride)


class _Piece(NamedTuple):
    """A box of a matrix, and the ranks that hold it."""

    span: Span
    ranks: tuple[int, ...]

    def source(self, owner: int) -> int:
        """Returns the rank that sends the piece to the owner: the owner itself, or a close rank, which is likely in its node."""
        return min(self.ranks, key=lambda rank: (abs(rank - owner), rank))


class _Place(NamedTuple):
    """The region of a piece in one of the matrices that a rank owns."""

    which: int
    region: tuple[slice, ...]


class _Round(NamedTuple):
    """The communication of a rank in a round.

    Attributes:
        mine: the matrices that it owns.
        parts: its parts of all matrices, in the order of their owners.
        sends: for each part, whether this rank sends it; only one of the ranks that hold it does.
        taken: (index in `mine`, region) of the pieces that it receives, in the order of their senders.
        returned: (index in `mine`, region) of the results that it sends, in the order of their receivers.
        sent, received, going, coming: elements to and from each rank: the first two of inputs, the others of results.
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
    """An all-to-all in progress: its output, and its input, which must stay alive until it is done."""

    arriving: Tensor
    leaving: Tensor
    work: dist.Work | None

    def landed(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.arriving


class WholeMatrices:
    """The logical matrices of parameters in some optimizer groups, and their owners. Collective: create it on all ranks.

    Attributes:
        named: the parameters that consist of these matrices.
        rest: the other parameters.
        owned: the matrices that this rank owns.
    """

    def __init__(
        self,
        model: LaidOutModel,
        groups: Collection[str] = ("matrix",),
        cost: Cost = lambda rows, columns: rows * columns,
        most: int = ROUND,
        row_values: int = 0,
    ) -> None:
        """
        Args:
            model: a parallelized model.
            groups: optimizer groups (`forge_core.specs.Group`) whose parameters are matrices to work on.
            cost: (rows, columns) -> cost of the work on a matrix; owners get about equal costs.
            most: maximum number of elements that an owner works on at a time, unless one matrix is larger.
            row_values: number of values that travel with each row of a matrix, such as state of the optimizer, in columns
                after those of the matrix. Ranks that hold the same row must give the same values.

        Raises:
            PlanError: a parameter of these groups does not consist of matrices.
        """
        self._row_values = row_values
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
            ranks_of: dict[Span, list[int]] = {}
            for number, rank in enumerate(ranks):
                ranks_of.setdefault(span_on(tensor, model.topology.layout, rank), []).append(number)
            for matrix in matrices_of(name, tensor.shape, model.specs.tensors[name]):
                overlaps = ((overlap(matrix, span), tuple(holders)) for span, holders in ranks_of.items())
                matrices.append(matrix)
                pieces.append([_Piece(span, holders) for span, holders in overlaps if span is not None])
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
        """This rank's parts of all matrices."""
        return [part for plan in self._rounds for part in plan.parts]

    def each(
        self, give: Callable[[Part], Tensor], work: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[Part, Tensor]]:
        """Collective: yields this rank's parts of `work(matrix)`, for every matrix of which it holds a part.

        All ranks must iterate to the end, because the others wait for a rank that stops early.

        Args:
            give: part -> its input, of the part's shape, with `row_values` more columns. Called once for each part of this rank,
                before that part is yielded, so it may update a momentum.
            work: (rows, columns + row_values) -> the same shape; runs on the owner, and must be the same function on every
                rank.
            dtype: dtype in which matrices are sent and passed to `work`.
        """
        coming = self._collected(self._rounds[0], give, dtype) if self._rounds else None
        going: tuple[_Round, _Flight] | None = None
        for number, plan in enumerate(self._rounds):
            assert coming is not None
            later = self._collected(self._rounds[number + 1], give, dtype) if number + 1 < len(self._rounds) else None
            results = [work(matrix) for matrix in self._assembled(plan, coming)]
            returned = [self._with_row_values(results[which], region) for which, region in plan.returned]
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
            sent=[sum(self._elements(part.region) for part, sends in of_owner if sends) for of_owner in parts],
            received=[sum(self._elements(place.region) for place in of_rank) for of_rank in taken],
            going=[sum(self._elements(place.region) for place in of_rank) for of_rank in returned],
            coming=[sum(self._elements(part.region) for part, _ in of_owner) for of_owner in parts],
        )

    def _collected(self, plan: _Round, give: Callable[[Part], Tensor], dtype: torch.dtype) -> _Flight:
        values = [give(part) for part in plan.parts]  # including parts that another rank sends, as `give` may update a momentum
        sent = [value for value, sends in zip(values, plan.sends, strict=True) if sends]
        return self._flight(sent, plan.sent, plan.received, dtype)

    def _assembled(self, plan: _Round, coming: _Flight) -> Iterator[Tensor]:
        """Yields the full matrices that this rank owns."""
        landed = coming.landed()
        more = self._row_values
        wholes = [landed.new_empty(matrix.shape[0], matrix.shape[1] + more) for matrix in plan.mine]
        sizes = [self._elements(region) for _, region in plan.taken]
        for (which, (rows, columns)), value in zip(plan.taken, landed.split(sizes), strict=True):
            width = columns.stop - columns.start
            piece = value.view(rows.stop - rows.start, width + more)
            wholes[which][rows, columns] = piece[:, :width]
            if more:
                wholes[which][rows, -more:] = piece[:, width:]
        yield from wholes

    def _with_row_values(self, result: Tensor, region: tuple[slice, ...]) -> Tensor:
        piece = result[region]
        return torch.cat((piece, result[region[0], -self._row_values :]), dim=1) if self._row_values else piece

    def _elements(self, region: tuple[slice, ...]) -> int:
        """Returns the number of elements of a region with its row values."""
        *_, rows, columns = (piece.stop - piece.start for piece in region)
        return rows * (columns + self._row_values)

    def _delivered(self, plan: _Round, coming: _Flight) -> Iterator[tuple[Part, Tensor]]:
        sizes = [self._elements(part.region) for part in plan.parts]
        for part, value in zip(plan.parts, coming.landed().split(sizes), strict=True):
            *lead, columns = (piece.stop - piece.start for piece in part.region)
            yield part, value.view([*lead, columns + self._row_values])

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
