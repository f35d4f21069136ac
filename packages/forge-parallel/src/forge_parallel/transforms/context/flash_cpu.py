"""Attention to one block of keys on a CPU, with what it takes to join the results of several blocks.

The flash kernel returns the log-sum-exp of the scores, and its backward takes one: given that of all keys, it makes the share
of the gradients that belongs to this block.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_core.protocols.model import PositionedTokens
from forge_parallel.torch_private import flash_attention_cpu, flash_attention_cpu_backward

CAUSAL_IS_A_MASK = False
"""The kernel has a switch for the keys of a rank's own places."""

Mask = list[Tensor]


def mask_between(queries: PositionedTokens, keys: PositionedTokens, window: int | None) -> Mask:
    """One boolean tensor (B or 1, 1, T, S), True where a query sees a key."""
    distance = queries.places[:, None] - keys.places[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if queries.documents is None or keys.documents is None:
        return [visible[None, None]]
    return [(visible & (queries.documents[:, :, None] == keys.documents[:, None, :])).unsqueeze(1)]


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
    """(B, heads, T, width) and the log-sum-exp (B, heads, T), minus infinity where nothing is seen; None when no query sees
    anything. Without a mask each query sees all keys, or with `causal` those up to its own index."""
    seen = mask[0].any(-1) if mask else None
    if seen is not None and not bool(seen.any()):
        return None
    width = v.shape[-1]
    q, k, v = _evened(q, k, v)
    out, sums = flash_attention_cpu(q, k, v, 0.0, causal, attn_mask=_added(mask, q), scale=scale)
    if seen is not None:  # the kernel writes 0 where it has summed nothing
        sums = sums.masked_fill(~seen, float("-inf"))
    return out[..., :width], sums


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, mask: Mask, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """This block's share of the gradients of q, k and v. `out` and `sums` are those over all blocks; None as in `forward`."""
    if mask and not bool(mask[0].any()):
        return None
    head_dim, width = k.shape[-1], v.shape[-1]
    q, k, v, out, grad = _evened(q, k, v, out, grad)
    dq, dk, dv = flash_attention_cpu_backward(grad, q, k, v, out, sums, 0.0, causal, attn_mask=_added(mask, q), scale=scale)
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :width]


def _evened(*tensors: Tensor) -> list[Tensor]:
    """Padded with zeros to one width, which the kernel demands; they add nothing to scores or outputs."""
    widest = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]


def _added(mask: Mask, q: Tensor) -> Tensor | None:
    """What the kernel adds to scores."""
    return torch.zeros_like(mask[0], dtype=q.dtype).masked_fill_(~mask[0], float("-inf")) if mask else None
