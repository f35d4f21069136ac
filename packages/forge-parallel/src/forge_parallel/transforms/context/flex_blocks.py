"""Attention to one block of keys on CUDA with flex attention, and the log-sum-exp that joins the results of several blocks.

No mask of T x S is created; a sparse list of 128 x 128 blocks is built once for all layers. The kernel's own gradient covers only
the softmax over this block. So the backward runs the block again and differentiates the formula that joins it with the others:
with l its log-sum-exp and L that of all blocks, out = sum of exp(l - L) * part, a function of part and l.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_core.protocols.model import PositionedTokens
from forge_parallel.torch_private import recording

CAUSAL_IS_A_MASK = True
"""True: causal attention to a rank's own keys needs a mask."""

_BLOCK_SIZE = (128, 128)
"""Queries and keys of a block of the mask; torch 2.11 has no default for it."""

_NARROWEST = 16
"""Width of heads from which flex attention has a kernel on a GPU."""

Mask = list[Tensor]
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
LISTS_OF_QUERIES = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


@cache
def _compiled(name: str) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, name), dynamic=False)


def mask_between(queries: PositionedTokens, keys: PositionedTokens, window: int | None) -> Mask:
    """Returns the tensors of a block mask, the window, the positions of queries and keys and, if there are any, their documents.

    The window is a scalar; 0 means no window.
    """
    limit = torch.full((), window or 0, device=queries.places.device)
    documents = [] if queries.documents is None or keys.documents is None else [queries.documents, keys.documents]
    seen = [limit, queries.places, keys.places, *documents]
    rows = documents[0].shape[0] if documents else None
    lengths = len(queries.places), len(keys.places)
    create, device = _compiled("create_block_mask"), queries.places.device
    mask = create(_visible(seen), rows, None, *lengths, device=device, BLOCK_SIZE=_BLOCK_SIZE)
    return [*(getattr(mask, name) for name in (*LISTS, *LISTS_OF_QUERIES)), *seen]


def _visible(seen: Mask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    limit, places, key_places, *documents = seen

    def visible(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = places[q] - key_places[k]
        near = (distance >= 0) & ((limit == 0) | (distance < limit))
        return near & (documents[0][b, q] == documents[1][b, k]) if documents else near

    return visible


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    if q.device.type != "cpu" and q.dtype == torch.float64:
        raise ValueError("ring attention has no fp64 kernel on a GPU; use transforms.context.kind = 'all_gather', or a CPU")
    width = v.shape[-1]
    q, k, v = (_widened(x) for x in (q, k, v))
    blocks = None
    if mask:
        count = len(LISTS) + len(LISTS_OF_QUERIES)
        lengths, lists, visible = (q.shape[2], k.shape[2]), mask[:count], _visible(mask[count:])
        blocks = BlockMask(lengths, *lists, BLOCK_SIZE=_BLOCK_SIZE, mask_mod=visible)  # type: ignore[arg-type]
    out, aux = _compiled("flex_attention")(
        q, k, v, block_mask=blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True)
    )
    return out if out.shape[-1] == width else out[..., :width], aux.lse


def _widened(x: Tensor) -> Tensor:
    """Appends zeros to heads for which there is no kernel; they change no score."""
    lack = _NARROWEST - x.shape[-1]
    return x if lack <= 0 else F.pad(x, (0, lack))


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Returns output (B, heads, T, width) and log-sum-exp (B, heads, T), minus infinity for queries that see no key.

    Without a mask each query sees all keys; causal attention needs a mask.
    """
    assert mask or not causal
    with torch.no_grad():
        return _attended(q, k, v, mask, scale)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, mask: Mask, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns this block's share of the gradients of q, k and v. `out` and `sums` are over all blocks."""
    assert mask or not causal
    with recording():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        part, part_sums = _attended(q, k, v, mask, scale)
        with torch.no_grad():
            share = (part_sums - sums).exp()
            wide = grad.to(share.dtype)
            grad_sums = share * (wide * (part.to(share.dtype) - out.to(share.dtype))).sum(-1)
            grad_part = (wide * share.unsqueeze(-1)).to(part.dtype)
        dq, dk, dv = torch.autograd.grad((part, part_sums), (q, k, v), (grad_part, grad_sums.to(part_sums.dtype)))
    return dq, dk, dv
