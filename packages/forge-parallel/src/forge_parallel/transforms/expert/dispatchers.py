"""Dispatchers: tokens travel to the ranks that hold their experts, and results travel back.

Rows are sent at most once to each rank, and what comes back is summed. The two directions are each other's transpose, so each
is the gradient of the other:

    spread   (N, ...) -> rows that arrived here      token t is copied to every rank that it goes to
    collect  rows that arrived here -> (N, ...)      what the ranks computed for token t comes back and is summed
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.protocols.model import ExpertDispatcher
from forge_parallel.placement.collectives import GatherWide, Ranks, all_gather, all_to_all, all_to_all_single, evenly, functional


def on_host(counts: Tensor) -> Any:
    """A small tensor as numbers; the host waits for the device."""
    return counts.tolist()


@dataclass(frozen=True)
class Route:
    """Which of this rank's tokens go where.

    Attributes:
        token: (sent,) of each row that leaves, in the order of ranks.
        places: (N, columns) row in which a token leaves for its next destination; 0 where `goes` is False.
        goes: (N, columns) whether there is a destination.
        send: rows for each rank.
        receive: rows from each rank.
        slots: how many slots arrive with them.
        ranks: the group.
    """

    token: Tensor
    places: Tensor
    goes: Tensor
    send: list[int]
    receive: list[int]
    slots: int
    ranks: Ranks

    @classmethod
    def of(cls, owners: Tensor, ranks: Ranks, read: Callable[[Tensor], Any] = on_host) -> "Route":
        """From the rank that each slot (N, top_k) goes to, or -1.

        One small exchange tells every rank what will arrive; the host waits for its result, the only time in a layer. `read`
        makes numbers of (2, 2, ranks): rows and slots, each sent and received.
        """
        slots = owners.new_zeros(ranks.size + 1).scatter_add_(0, owners.where(owners >= 0, ranks.size).flatten(), _ones(owners))
        goes, destinations = _distinct(owners, ranks.size)
        keys, order = destinations.where(goes, ranks.size).flatten().sort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        borders = torch.searchsorted(keys, torch.arange(ranks.size + 1, device=keys.device))
        mine = torch.stack([borders.diff(), slots[: ranks.size]], 1)
        even = [1] * ranks.size
        theirs = all_to_all_single(mine, even, even, ranks)
        (send, _), (receive, arriving) = read(torch.stack([mine, theirs]).mT)
        token = order[: sum(send)] // destinations.shape[1]
        return cls(token, places.view_as(goes).where(goes, 0), goes, send, receive, sum(arriving), ranks)


def _ones(owners: Tensor) -> Tensor:
    return torch.ones_like(owners).flatten()


def _distinct(owners: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """(whether, where) a token goes, (N, columns) each, every rank once; as few columns as tokens can have destinations."""
    if ranks <= owners.shape[1]:
        wanted = owners.new_zeros(len(owners), ranks + 1).scatter_(1, owners.where(owners >= 0, ranks), 1)
        return wanted[:, :ranks] > 0, torch.arange(ranks, device=owners.device).expand(len(owners), ranks)
    ordered = owners.sort(1).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return (ordered >= 0) & ~repeated, ordered


def depart(x: Tensor, route: Route) -> Tensor:
    """Sends the rows off. The result may not be read before `Arrive` has waited for it; no gradient."""
    rows = x.detach().index_select(0, route.token)  # several times as fast as indexing, on a CPU
    return functional.all_to_all_single(rows, route.receive, route.send, route.ranks.name)


def _collect(rows: Tensor, route: Route) -> Tensor:
    back = all_to_all_single(rows, route.receive, route.send, route.ranks)
    total = back.new_zeros(len(route.goes), back.shape[1], dtype=torch.promote_types(back.dtype, torch.float32))
    if len(back):
        for places, goes in zip(route.places.unbind(1), route.goes.unbind(1), strict=True):
            # In the order of ranks, so the same bits every time; an index_add would not be, on a GPU.
            total += back.index_select(0, places).masked_fill_(~goes.unsqueeze(1), 0)
    return total.to(rows.dtype)


class Arrive(torch.autograd.Function):
    """The second half of `spread`: (x, what `depart` returned, route) -> rows; backward: `collect`."""

    @staticmethod
    def forward(ctx: Any, _x: Tensor, departed: Tensor, route: Route) -> Tensor:
        ctx.route = route
        rows = functional.wait_tensor(departed)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _collect(grads[0].contiguous(), ctx.route), None, None


class Collect(torch.autograd.Function):
    """Rows that arrived here -> sums over the ranks that a token went to; backward: `spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _collect(rows, route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return functional.wait_tensor(depart(grads[0], ctx.route)), None


Run = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Sends each token to every rank that has one of its experts, once, however many those are.

    A rank adds up what its experts make of a token, with the token's weights, before it sends the sum back. With `overlap`
    `overlap_with` is called while tokens travel. `route` finds out which ranks those are.
    """

    ranks: Ranks
    inner: ExpertDispatcher
    overlap: bool = True
    route: Callable[[Tensor, Ranks], Route] = Route.of

    def __call__(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        run: Run,
        count: int,
        slots: int | None = None,
        overlap_with: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """See `ExpertDispatcher`; `run` gets the experts of this rank."""
        share = count // self.ranks.size
        route = self.route(experts.div(share, rounding_mode="floor"), self.ranks)
        told = _told(experts, weights)
        under_way = depart(x, route), depart(told, route)
        added = overlap_with() if overlap_with is not None and self.overlap else None
        rows = Arrive.apply(x, under_way[0], route)
        arrived, chosen = _read(Arrive.apply(told, under_way[1], route))
        made = self.inner(rows, _own(chosen, share, self.ranks), arrived, run, share, route.slots)
        y = Collect.apply(made, route)
        if overlap_with is not None and added is None:
            added = overlap_with()
        return y if added is None else y + added


@dataclass(frozen=True)
class AllGatherDispatcher:
    """Brings all tokens to all ranks. `divided`: each rank has other experts; else each has a part of every expert's matrices.

    More bytes than `AllToAllDispatcher` unless tokens have experts on most ranks, but every rank's share is of one size. `read`
    brings the numbers of all ranks' tokens and slots (2, ranks) to the host.
    """

    ranks: Ranks
    inner: ExpertDispatcher
    divided: bool = True
    read: Callable[[Tensor], list[list[int]]] = Tensor.tolist

    def __call__(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        run: Run,
        count: int,
        slots: int | None = None,
        overlap_with: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """See `ExpertDispatcher`; `run` gets the experts of this rank."""
        lengths, known = self._agreed(x, -1 if slots is None else slots)
        more = (0, 0, 0, max(lengths) - len(x))
        rows = GatherWide.apply(F.pad(x, more), self.ranks)
        arrived, chosen = _read(GatherWide.apply(_told(F.pad(experts, more, value=-1), F.pad(weights, more)), self.ranks))
        share, total = count, None
        if self.divided:
            share = count // self.ranks.size
            chosen = _own(chosen, share, self.ranks)
        elif -1 not in known:
            total = sum(known)
        made = self.inner(rows, chosen, arrived, run, share, total)
        splits = evenly(made, self.ranks)
        sums = all_to_all(made, splits, splits, self.ranks).unflatten(0, (self.ranks.size, -1))
        wide = torch.promote_types(x.dtype, torch.float32)
        y = sums.sum(0, dtype=wide).to(x.dtype)[: len(x)]
        return y if overlap_with is None else y + overlap_with()

    def _agreed(self, x: Tensor, slots: int) -> tuple[list[int], list[int]]:
        """Tokens and slots of every rank: ranks may have different numbers of them. The host waits for the result, once."""
        # Filled in by the device: a tensor made from numbers on the host would be a second wait.
        mine = torch.cat([torch.full((1, 1), number, device=x.device) for number in (len(x), slots)], 1)
        lengths, known = self.read(all_gather(mine, self.ranks, 0).mT)
        return lengths, known


def _told(experts: Tensor, weights: Tensor) -> Tensor:
    """(N, 2 top_k): weights and experts of each token in one tensor, since a float of 32 bits holds any number of an expert."""
    return torch.cat([weights, experts.to(weights.dtype)], 1)


def _read(told: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = told.chunk(2, 1)
    return weights, experts.detach().long()


def _own(experts: Tensor, share: int, ranks: Ranks) -> Tensor:
    """Numbers among this rank's `share` experts; -1 for those of other ranks."""
    return (experts - ranks.rank * share).where(experts.div(share, rounding_mode="floor") == ranks.rank, -1)
