"""Every rank gathers the keys and values of the whole row, and attends to them from its own queries (Llama 3, 2024, 3.3.2)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_core.protocols.model import PositionedCore, PositionedTokens
from forge_parallel.context.cached import Alone, attend_alone, prepare_alone
from forge_parallel.context.placed import gathered_documents, gathered_places, held_places
from forge_parallel.context.row_order import SequenceOrder
from forge_parallel.placement.collectives import GatherWide, Ranks


@dataclass(frozen=True, eq=False)
class AllGatherAttention:
    """Leaves the softmax to the model's own core, which is told at which places queries and keys lie.

    For R ranks, rows of S places, kv_heads heads of head_dim + width numbers and B rows, a rank receives
    (R - 1) / R * B * S * kv_heads * (head_dim + width) numbers per layer in the forward and as many in the backward, and
    keeps the gathered keys and values, R / (R - 1) of that, in between.

    Attributes:
        inner: the model's own core.
        order: which places each rank holds.
        ranks: the group that shares a row.
    """

    inner: PositionedCore
    order: SequenceOrder
    ranks: Ranks

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Any:
        """What `inner` needs for the T = `length` queries of this rank against the keys of all ranks."""
        order, where = self.order, torch.device(device)
        whole = gathered_documents(documents, self.ranks)
        queries = PositionedTokens(held_places(order, self.ranks.rank, length * order.ranks, where), documents)
        keys = PositionedTokens(gathered_places(order, length * order.ranks, where), whole)
        return self.inner.prepare_placed(queries, keys, window)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> Alone:
        """For calls with a cache, which are not split."""
        return prepare_alone(self.inner, slots, extent, window)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shared: Any, scale: float, soft_cap: float | None = None) -> Tensor:
        """q (B, heads, T, head_dim), k (B, kv_heads, T, head_dim), v (B, kv_heads, T, width) -> (B, heads, T, width)."""
        capped = () if soft_cap is None else (soft_cap,)
        if isinstance(shared, Alone):
            return attend_alone(self.inner, q, k, v, shared, scale, *capped)
        joined = torch.cat((k.movedim(2, 0), v.movedim(2, 0)), dim=-1)
        whole = GatherWide.apply(joined, self.ranks).movedim(0, 2)
        k, v = whole.split([k.shape[-1], v.shape[-1]], dim=-1)
        return self.inner(q, k, v, shared, scale, *capped)
