"""Attention to one block of keys on a CPU, with the log-sum-exp that joins the results of several blocks.

The flash kernel returns the log-sum-exp of the scores, and its backward takes one: with that of all keys, it computes this
block's share of the gradients.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_core.protocols.model import PositionedTokens
from forge_parallel.torch_private import flash_attention_cpu, flash_attention_cpu_backward

CAUSAL_IS_A_MASK = False
"""False: the kernel has a flag for causal attention to a rank's own keys."""

Mask = list[Tensor]


def mask_between(queries: PositionedTokens, keys: PositionedTokens, window: int | None) -> Mask:
    """Returns one boolean tensor (B or 1, 1, T, S), True where a query sees a key."""
    distance = queries.places[:, None] - keys.places[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if queries.documents is None or keys.documents is None:
        return [visible[None, None]]
    return [(visible & (queries.documents[:, :, None] == keys.documents[:, None, :])).unsqueeze(1)]


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
    """Returns output (B, heads, T, width) and log-sum-exp (B, heads, T), minus infinity for queries that see no key; None if no
    query sees a key. Without a mask each query sees all keys, or with `causal` those up to its own index."""
    seen = mask[0].any(-1) if mask else None
    if seen is not None and not bool(seen.any()):
        return None
    width = v.shape[-1]
    q, k, v = _evened(q, k, v)
    out, sums = flash_attention_cpu(q, k, v, 0.0, causal, attn_mask=_added(mask, q), scale=scale)
    if seen is not None:  # the kernel writes 0 for queries that see no key
        sums = sums.masked_fill(~seen, float("-inf"))
    return out[..., :width], sums


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, mask: Mask, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns this block's share of the gradients of q, k and v. `out` and `sums` are over all blocks; None as in `forward`."""
    if mask and not bool(mask[0].any()):
        return None
    head_dim, width = k.shape[-1], v.shape[-1]
    q, k, v, out, grad = _evened(q, k, v, out, grad)
    dq, dk, dv = flash_attention_cpu_backward(grad, q, k, v, out, sums, 0.0, causal, attn_mask=_added(mask, q), scale=scale)
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :width]


def _evened(*tensors: Tensor) -> list[Tensor]:
    """Pads tensors with zeros to one width, as the kernel requires; zeros do not change scores or outputs."""
    widest = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]


def _added(mask: Mask, q: Tensor) -> Tensor | None:
    """Returns the mask as values that the kernel adds to scores."""
    return torch.zeros_like(mask[0], dtype=q.dtype).masked_fill_(~mask[0], float("-inf")) if mask else None
