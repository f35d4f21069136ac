"""The attention core of one process: softmax(q k^T * scale + mask) v by the kernel that fits device, mask and soft cap."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_core.protocols.model import Placed
from forge_models.kernels import AttentionKernel


class Boundaries(NamedTuple):
    """What variable-length kernels share for a batch: starts (documents + 1,) int32 in the flattened rows."""

    starts: Tensor
    length: int
    window: int | None


class LocalAttention:
    """`kind` chooses the kernel; "auto" means:

    on a CPU `scaled_dot_product_attention`, with a boolean mask for documents and windows (flex and varlen have no
    backward there); on CUDA its causal flash kernel when there is nothing to mask, else flex, which holds no T x T mask.
    A soft cap has no fused kernel on a CPU: there the softmax is written out. `capped` says that calls will have one.
    """

    def __init__(self, kind: AttentionKernel = "auto", capped: bool = False) -> None:
        self.kind: AttentionKernel = kind
        self.capped = capped

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Any:
        """What the kernel needs for this batch: a boolean mask (B or 1, 1, T, T) with True = visible, a `BlockMask`,
        `Boundaries`, or None = causal over the whole row, the fast path.

        Raises:
            ValueError: for a kernel that this device does not have.
        """
        cuda = torch.device(device).type == "cuda"
        if not cuda and self.kind in ("flex", "varlen"):
            raise ValueError(f"attention core {self.kind!r} needs a CUDA device; use 'auto' or 'sdpa'")
        if window is not None and window >= length:
            window = None
        plain = documents is None and window is None
        if self.kind == "varlen":
            return _boundaries(documents, length, window, device)
        if self.kind == "flex" or (self.kind == "auto" and cuda and (self.capped or not plain)):
            return _block_mask(documents, length, window, device)
        return None if plain else _mask(documents, length, window, device)

    def prepare_placed(self, queries: Placed, keys: Placed, window: int | None) -> Any:
        """What the kernel needs where queries and keys lie in any order: a boolean mask (B or 1, 1, T, S) or a `BlockMask`.

        Raises:
            ValueError: for a kernel that takes places in their natural order only, or that this device does not have.
        """
        cuda = queries.places.is_cuda
        if self.kind == "varlen":
            raise ValueError("attention core 'varlen' takes whole rows only; use 'auto', 'flex' or 'sdpa'")
        if not cuda and self.kind == "flex":
            raise ValueError("attention core 'flex' needs a CUDA device; use 'auto' or 'sdpa'")
        if self.kind == "sdpa" or not cuda:
            return _placed_mask(queries, keys, window)
        return _placed_block_mask(queries, keys, window)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> Tensor:
        """Boolean mask (B, 1, T, extent) of queries at `slots` (B, T) over the first `extent` slots of a cache."""
        distance = slots[:, :, None] - torch.arange(extent, device=slots.device)
        return _visible(distance, window).unsqueeze(1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shared: Any, scale: float, soft_cap: float | None = None) -> Tensor:
        """q (B, heads, T, head_dim), k (B, kv_heads, S, head_dim), v (B, kv_heads, S, width) -> (B, heads, T, width)."""
        if isinstance(shared, Boundaries):
            return _varlen(q, k, v, shared, scale)
        if shared is not None and not isinstance(shared, Tensor):
            if q.dtype != torch.float64:
                return _flex(q, k, v, shared, scale, soft_cap)
            shared = _dense(shared, q, k)  # flex has no fp64 kernel; fp64 is for comparisons, not for speed
        if soft_cap is not None:
            return _written_out(q, k, v, shared, scale, soft_cap)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=shared, is_causal=shared is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _visible(distance: Tensor, window: int | None) -> Tensor:
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _mask(documents: Tensor | None, length: int, window: int | None, device: Any) -> Tensor:
    row = Placed(torch.arange(length, device=device), documents)
    return _placed_mask(row, row, window)


def _placed_mask(queries: Placed, keys: Placed, window: int | None) -> Tensor:
    visible = _visible(queries.places[:, None] - keys.places[None, :], window)
    if queries.documents is None or keys.documents is None:
        return visible[None, None]
    return (visible & (queries.documents[:, :, None] == keys.documents[:, None, :])).unsqueeze(1)


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float) -> Tensor:
    """Softmax in fp32 (fp64 for fp64) over capped scores; heads that share keys are one dimension of the product."""
    if mask is None:
        mask = _mask(None, q.shape[2], None, q.device)
    groups = q.unflatten(1, (k.shape[1], -1))
    scores = (groups @ k.unsqueeze(2).transpose(-1, -2)) * scale
    scores = soft_cap * (scores / soft_cap).tanh()
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = wide.masked_fill(~mask.unsqueeze(1), float("-inf")).softmax(-1).to(q.dtype)
    return (weights @ v.unsqueeze(2)).flatten(1, 2)


# From here on CUDA only.


@cache
def _compiled(name: str) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, name), dynamic=False)


def _block_mask(documents: Tensor | None, length: int, window: int | None, device: Any) -> Any:
    """A `BlockMask`. Compiled, because the plain function builds the whole T x T mask first."""

    def visible(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = _visible(q - k, window)
        return seen if documents is None else seen & (documents[b, q] == documents[b, k])

    rows = None if documents is None else documents.shape[0]
    return _compiled("create_block_mask")(visible, rows, None, length, length, device=device)


def _placed_block_mask(queries: Placed, keys: Placed, window: int | None) -> Any:
    places, documents = queries
    key_places, key_documents = keys

    def visible(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = _visible(places[q] - key_places[k], window)
        return seen if documents is None or key_documents is None else seen & (documents[b, q] == key_documents[b, k])

    rows = None if documents is None else documents.shape[0]
    lengths = len(places), len(key_places)
    return _compiled("create_block_mask")(visible, rows, None, *lengths, device=places.device)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, soft_cap: float | None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return soft_cap * (score / soft_cap).tanh()  # type: ignore[operator]

    run = flex_attention if torch.compiler.is_compiling() else _compiled("flex_attention")
    cap = None if soft_cap is None else capped
    return run(q, k, v, score_mod=cap, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _dense(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device))


def _boundaries(documents: Tensor | None, length: int, window: int | None, device: Any) -> Boundaries:
    """Documents must be runs of equal numbers. Without documents each call is one whole row (known at the call)."""
    if documents is None:
        return Boundaries(torch.empty(0, dtype=torch.int32, device=device), length, window)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = starts.flatten().nonzero().squeeze(1)  # its size is not known beforehand: waits for the device
    end = places.new_full((1,), documents.numel())
    return Boundaries(torch.cat((places, end)).to(torch.int32), length, window)


def _varlen(q: Tensor, k: Tensor, v: Tensor, shared: Boundaries, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    rows, _, length, _ = q.shape
    starts = shared.starts
    if not starts.numel():
        starts = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)
    left = -1 if shared.window is None else shared.window - 1
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    shares = q.shape[1] != k.shape[1]
    out = varlen_attn(
        flat_q, flat_k, flat_v, starts, starts, length, length, scale=scale, window_size=(left, 0), enable_gqa=shares
    )
    assert isinstance(out, Tensor)
    return out.unflatten(0, (rows, length)).transpose(1, 2)
