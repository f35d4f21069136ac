"""The attention core of one process: softmax(q k^T * scale + mask) v by the kernel that fits device, mask and soft cap."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_core.protocols.model import PositionedTokens
from forge_models import accelerator
from forge_models.blocks.fused_attention import (
    Boundaries,
    Order,
    block_mask,
    boundaries,
    causal,
    dense,
    flex,
    placed_block_mask,
    takes_lengths,
    varlen,
)
from forge_models.blocks.visible import mask, placed_mask, visible
from forge_models.kernels import AttentionKernel


class LocalAttention:
    """`kind` chooses the kernel; "auto" means:

    on a CPU `scaled_dot_product_attention`, with a boolean mask for documents and windows (flex and varlen have no
    backward there), and so on accelerators other than CUDA, of which no kernel is proven; on CUDA its causal kernel when there
    is nothing to mask, in the order that is fastest on the device. Else varlen, where the starts of documents are known and the
    kernel takes the dtype and width of heads, and flex for the rest:
    neither holds a T x T mask. A soft cap has no fused kernel on a CPU: there the softmax is written out.
    """

    def __init__(self, kind: AttentionKernel = "auto", capped: bool = False, width: int | None = None) -> None:
        """`capped` says that calls will have a soft cap. `width` is that of the heads of queries, keys and values, None where
        they differ."""
        self.kind: AttentionKernel = kind
        self.capped = capped
        self.width = width

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Any:
        """What the kernel needs for this batch: a boolean mask (B or 1, 1, T, T) with True = visible, a `BlockMask`,
        `Boundaries`, or causal over the whole row, the fast path: None, or the `Order` of this GPU's kernels.

        Raises:
            ValueError: for a kernel that this device does not have.
        """
        window = _hiding(window, length)
        plain = documents is None and window is None
        masks = self.capped or not plain
        cuda = accelerator.has_flex(torch.device(device), masks and self.kind == "auto")
        if not cuda and self.kind in ("flex", "varlen"):
            raise ValueError(f"attention core {self.kind!r} needs a CUDA device; use 'auto' or 'sdpa'")
        if self.kind == "varlen":
            return boundaries(documents, length, window, device)
        if self.kind == "flex" or (self.kind == "auto" and cuda and masks):
            return block_mask(documents, length, window, device)
        if plain:
            return causal(device) if cuda and not self.capped else None
        return mask(documents, length, window, device)

    def prepare_packed(self, documents: Tensor | None, starts: Tensor | None, length: int, window: int | None, x: Tensor) -> Any:
        """The same, where `starts` of documents (n,) int32 in the flattened rows may be known; `x` has dtype and device of q."""
        window = _hiding(window, length)
        plain, known = documents is None and window is None, documents is None or starts is not None
        fits = not (plain or self.capped) and takes_lengths(self.width, x.dtype, x.device)
        if known and ((self.kind == "varlen" and accelerator.has_flex(x.device)) or (self.kind == "auto" and fits)):
            return boundaries(documents, length, window, x.device, starts)
        return self.prepare(documents, length, window, x.device)

    def prepare_placed(self, queries: PositionedTokens, keys: PositionedTokens, window: int | None) -> Any:
        """What the kernel needs where queries and keys lie in any order: a boolean mask (B or 1, 1, T, S) or a `BlockMask`.

        Raises:
            ValueError: for a kernel that takes places in their natural order only, or that this device does not have.
        """
        cuda = accelerator.has_flex(queries.places.device, self.kind == "auto")
        if self.kind == "varlen":
            raise ValueError("attention core 'varlen' takes whole rows only; use 'auto', 'flex' or 'sdpa'")
        if not cuda and self.kind == "flex":
            raise ValueError("attention core 'flex' needs a CUDA device; use 'auto' or 'sdpa'")
        if self.kind == "sdpa" or not cuda:
            return placed_mask(queries, keys, window)
        return placed_block_mask(queries, keys, window)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> Tensor:
        """Boolean mask (B, 1, T, extent) of queries at `slots` (B, T) over the first `extent` slots of a cache."""
        distance = slots[:, :, None] - torch.arange(extent, device=slots.device)
        return visible(distance, window).unsqueeze(1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shared: Any, scale: float, soft_cap: float | None = None) -> Tensor:
        """q (B, heads, T, head_dim), k (B, kv_heads, S, head_dim), v (B, kv_heads, S, width) -> (B, heads, T, width)."""
        if isinstance(shared, Boundaries):
            return varlen(q, k, v, shared, scale)
        if isinstance(shared, Order):
            if soft_cap is None:
                return shared.attention(q, k, v, scale)
            shared = None
        if shared is not None and not isinstance(shared, Tensor):
            if q.dtype != torch.float64:
                return flex(q, k, v, shared, scale, soft_cap)
            shared = dense(shared, q, k)  # flex has no fp64 kernel; fp64 is for comparisons, not for speed
        if soft_cap is not None:
            return _written_out(q, k, v, shared, scale, soft_cap)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=shared, is_causal=shared is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _hiding(window: int | None, length: int) -> int | None:
    """None for a window that hides nothing of a row."""
    return None if window is None or window >= length else window


def _written_out(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, soft_cap: float) -> Tensor:
    """Softmax in fp32 (fp64 for fp64) over capped scores; heads that share keys are one dimension of the product."""
    if seen is None:
        seen = mask(None, q.shape[2], None, q.device)
    groups = q.unflatten(1, (k.shape[1], -1))
    scores = (groups @ k.unsqueeze(2).transpose(-1, -2)) * scale
    scores = soft_cap * (scores / soft_cap).tanh()
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = wide.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1).to(q.dtype)
    return (weights @ v.unsqueeze(2)).flatten(1, 2)
