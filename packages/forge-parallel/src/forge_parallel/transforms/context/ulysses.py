"""Ulysses attention: ranks exchange heads for positions, and each attends over the whole row (Jacobs et al., 2023)."""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from forge_core.protocols.model import AttentionCore, PackedCore
from forge_parallel.placement.collectives import Ranks, all_to_all, evenly
from forge_parallel.transforms.context.rows import Alone, attend_alone, gathered_documents, options_of, prepare_alone


@dataclass(frozen=True, eq=False)
class UlyssesAttention:
    """Runs the model's own core on whole rows in their natural order, between two exchanges.

    The number of ranks must divide the heads. If it does not divide the key-value heads, these are repeated up to the least
    common multiple of both numbers. For R ranks, m = lcm(kv_heads, R), B rows of S positions, a rank receives
    (R - 1) / R^2 * B * S * (heads * head_dim + m * (head_dim + width) + heads * width) numbers per layer in the forward, and
    equally many in the backward. It saves as much as one process does for its share of the heads.

    Attributes:
        inner: the model's own core.
        ranks: the group that shares a row; rank r holds positions r * T to (r + 1) * T - 1.
    """

    inner: AttentionCore
    ranks: Ranks

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Any:
        """Returns what `inner` prepares for whole rows, of which this rank holds `length` positions."""
        return self.inner.prepare(gathered_documents(documents, self.ranks), length * self.ranks.size, window, device)

    def prepare_packed(self, documents: Tensor | None, starts: Tensor | None, length: int, window: int | None, x: Tensor) -> Any:
        """Like `prepare`, with known starts of documents; these are those of whole rows on every rank."""
        if not isinstance(self.inner, PackedCore):
            return self.prepare(documents, length, window, x.device)
        return self.inner.prepare_packed(gathered_documents(documents, self.ranks), starts, length * self.ranks.size, window, x)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> Alone:
        """Prepares calls with a cache, which are not split over ranks."""
        return prepare_alone(self.inner, slots, extent, window)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: Any,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q (B, heads, T, head_dim), k (B, kv_heads, T, head_dim), v (B, kv_heads, T, width) -> (B, heads, T, width).

        Raises:
            ValueError: the number of ranks does not divide the heads.
        """
        if isinstance(shared, Alone):
            return attend_alone(self.inner, q, k, v, shared, scale, **options_of(soft_cap, sinks))
        heads, kv_heads = q.shape[1], k.shape[1]
        if heads % self.ranks.size:
            raise ValueError(
                f"{heads} heads cannot be divided among {self.ranks.size} ranks; use another kind in [transforms.context]"
            )
        repeats = self.ranks.size // gcd(kv_heads, self.ranks.size)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        if sinks is not None:  # of this rank's heads; gradients of the others come from the other ranks
            sinks = sinks.unflatten(0, (self.ranks.size, -1))[self.ranks.rank]
        q, k, v = to_heads(self.ranks, q, k, v)
        return to_places(self.ranks, self.inner(q, k, v, shared, scale, **options_of(soft_cap, sinks)))


def to_heads(ranks: Ranks, *tensors: Tensor) -> list[Tensor]:
    """Exchanges (B, h, T, d) of all heads for (B, h / ranks, S, d) of all positions in rank order, in one all-to-all."""
    # (ranks, T, B, h / ranks * d): dimension 0 is the receiving rank, so received shares follow each other in a row
    shares = [x.unflatten(1, (ranks.size, -1)).permute(1, 3, 0, 2, 4).flatten(3) for x in tensors]
    received = _exchanged(torch.cat(shares, dim=-1).flatten(0, 1), ranks)
    pieces = received.split([share.shape[-1] for share in shares], dim=-1)
    return [piece.unflatten(-1, (-1, x.shape[-1])).permute(1, 2, 0, 3) for piece, x in zip(pieces, tensors, strict=True)]


def to_places(ranks: Ranks, out: Tensor) -> Tensor:
    """Exchanges (B, heads / ranks, S, width) for (B, heads, T, width)."""
    received = _exchanged(out.permute(2, 0, 1, 3), ranks).unflatten(0, (ranks.size, -1))
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def _exchanged(x: Tensor, ranks: Ranks) -> Tensor:
    """(ranks * n, ...) -> the same shape: share i is sent to rank i, and rank i's share arrives at index i."""
    return all_to_all(x, shares := evenly(x, ranks), shares, ranks)
