"""Dispatchers that cross ranks, at the seam where a model has a local one.

Each brings tokens to other ranks, lets another dispatcher work there, and brings the sums back. So they compose: over the ranks
that share experts, first over nodes and then inside one, or over the ranks that share each expert's matrices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_core.protocols.model import ExpertDispatcher
from forge_parallel.experts.route import Arrive, Collect, Route, depart
from forge_parallel.placement.collectives import GatherWide, Ranks, all_gather, all_to_all, evenly

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
