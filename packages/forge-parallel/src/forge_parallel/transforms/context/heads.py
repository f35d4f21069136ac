"""Recurrent layers under context parallelism: ranks exchange heads for positions, for every kind of `transforms.context`.

A state is a chain over the whole row, so each rank computes it for a share of the heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_core.protocols.model import RecurrentCore
from forge_parallel.placement.collectives import Ranks
from forge_parallel.transforms.context.row_order import SequenceOrder
from forge_parallel.transforms.context.rows import gathered_documents, gathered_places
from forge_parallel.transforms.context.ulysses import to_heads, to_places


@dataclass(frozen=True, eq=False)
class ExchangedRecurrence:
    """Runs the model's own core on whole rows in their natural order, between exchanges.

    The number of ranks must divide the key heads. For R ranks and B rows of S positions, a rank receives
    (R - 1) / R^2 * B * S numbers for each channel of queries, keys, values, decays and step sizes in the forward, and for each
    channel of the outputs, and equally many in the backward.

    Attributes:
        inner: the model's own core.
        order: which positions each rank holds.
        ranks: the group that shares a row.
    """

    inner: RecurrentCore
    order: SequenceOrder
    ranks: Ranks

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Any:
        """Returns what `inner` prepares for whole rows, of which this rank holds `length` positions."""
        whole = gathered_documents(documents, self.ranks)
        if whole is not None:
            whole = whole.index_select(1, self._natural(whole.shape[1], whole.device))
        return self.inner.prepare(whole, length * self.ranks.size, window, device)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> Any:
        """Prepares calls with a cache, which are not split over ranks."""
        return self.inner.prepare_cached(slots, extent, window)  # type: ignore[attr-defined]

    def recur(
        self,
        streams: Sequence[Tensor],
        filters: Sequence[tuple[Tensor, Tensor | None]],
        g: Tensor,
        beta: Tensor,
        shared: Any,
        cache: Any = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """See `RecurrentCore`; the streams have this rank's positions, and so have the outputs.

        Raises:
            ValueError: the number of ranks does not divide the key heads.
        """
        if cache is not None:
            return self.inner.recur(streams, filters, g, beta, shared, cache, skip)
        heads, ranks = streams[1].shape[2], self.ranks
        if heads % ranks.size:
            raise ValueError(f"{heads} heads of a recurrent layer cannot be divided among parallel.cp = {ranks.size} ranks")
        order = self._natural(g.shape[1] * ranks.size, g.device)
        per_channel = g.dim() == 4
        wide = to_heads(ranks, (g if per_channel else g.unsqueeze(-1)).transpose(1, 2), beta.unsqueeze(-1).transpose(1, 2))
        narrow = to_heads(ranks, *(x.transpose(1, 2) for x in streams))
        *rows, g, beta = (x.index_select(2, order).transpose(1, 2) for x in (*narrow, *wide))
        own = [(self._own(weight), None if bias is None else self._own(bias)) for weight, bias in filters]
        skip = None if skip is None else self._own(skip)
        out = self.inner.recur(rows, own, g if per_channel else g.squeeze(-1), beta.squeeze(-1), shared, skip=skip)
        held = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return to_places(ranks, out.index_select(1, held).transpose(1, 2)).transpose(1, 2)

    def _own(self, parameter: Tensor) -> Tensor:
        """Returns this rank's heads of a parameter (channels, ...); gradients of the others come from the other ranks."""
        return parameter.unflatten(0, (self.ranks.size, -1))[self.ranks.rank]

    def _natural(self, length: int, device: torch.device) -> Tensor:
        """Returns, for each position of a row, its index among the positions in rank order."""
        return gathered_places(self.order, length, device).argsort()
