"""Attention kernels of CUDA: the order of torch's fused ones, flex attention, and those of variable length."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from forge_core.protocols.model import PositionedTokens
from forge_models import accelerator
from forge_models.blocks.visible import visible


class Boundaries(NamedTuple):
    """What variable-length kernels share for a batch: starts (n,) int32 in the flattened rows, as in `Batch`."""

    starts: Tensor
    length: int
    window: int | None


class Order(NamedTuple):
    """Torch's fused kernels, the best first; one that cannot take a call is passed over."""

    kernels: tuple[SDPBackend, ...]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention over whole rows."""
        with attention.sdpa_kernel(list(self.kernels), set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def causal(device: Any) -> Order | None:
    """The order for causal attention over whole rows on a device; None is torch's own order."""
    return _order() if accelerator.is_hopper(torch.device(device)) else None


@cache
def _order() -> Order:
    """On Hopper torch would take FlashAttention-2, which was made for the generation before: cuDNN's kernels are about twice as
    fast there, and so is FlashAttention-3, which this process uses from now on where it is installed."""
    rest = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    if find_spec("flash_attn_interface") is not None and hasattr(attention, "activate_flash_attention_impl"):
        attention.activate_flash_attention_impl("FA3")
        return Order((SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *rest))
    return Order((SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, *rest))


def takes_lengths(width: int | None, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel of variable length takes heads of this width (FlashAttention: Ampere and later, 16 bits)."""
    fits = width is not None and width <= 256 and width % 8 == 0
    return fits and dtype in (torch.bfloat16, torch.float16) and accelerator.takes_lengths(device)


@cache
def _compiled(name: str) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, name), dynamic=False)


def block_mask(documents: Tensor | None, length: int, window: int | None, device: Any) -> Any:
    """A `BlockMask`. Compiled, because the plain function builds the whole T x T mask first."""

    def sees(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = visible(q - k, window)
        return seen if documents is None else seen & (documents[b, q] == documents[b, k])

    rows = None if documents is None else documents.shape[0]
    return _compiled("create_block_mask")(sees, rows, None, length, length, device=device)


def placed_block_mask(queries: PositionedTokens, keys: PositionedTokens, window: int | None) -> Any:
    """The same where queries and keys lie in any order."""
    places, documents = queries
    key_places, key_documents = keys

    def sees(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = visible(places[q] - key_places[k], window)
        return seen if documents is None or key_documents is None else seen & (documents[b, q] == key_documents[b, k])

    rows = None if documents is None else documents.shape[0]
    lengths = len(places), len(key_places)
    return _compiled("create_block_mask")(sees, rows, None, *lengths, device=places.device)


def flex(q: Tensor, k: Tensor, v: Tensor, blocks: Any, scale: float, soft_cap: float | None) -> Tensor:
    """Attention with a `BlockMask`."""
    from torch.nn.attention.flex_attention import flex_attention

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return soft_cap * (score / soft_cap).tanh()  # type: ignore[operator]

    run = flex_attention if torch.compiler.is_compiling() else _compiled("flex_attention")
    cap = None if soft_cap is None else capped
    return run(q, k, v, score_mod=cap, block_mask=blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def dense(blocks: Any, q: Tensor, k: Tensor) -> Tensor:
    """(B, 1, T, S) bool: what a `BlockMask` lets through."""
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(blocks.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device))


def boundaries(
    documents: Tensor | None, length: int, window: int | None, device: Any, starts: Tensor | None = None
) -> Boundaries:
    """Documents must be runs of equal numbers. Without documents each call is one whole row (known at the call). Without
    `starts` of documents the host waits for the device to count them."""
    if documents is None:
        return Boundaries(torch.empty(0, dtype=torch.int32, device=device), length, window)
    if starts is None:
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        places = begins.flatten().nonzero().squeeze(1)  # its size is not known beforehand: waits for the device
        starts = torch.cat((places, places.new_full((1,), documents.numel()))).to(torch.int32)
    return Boundaries(starts, length, window)


def varlen(q: Tensor, k: Tensor, v: Tensor, shared: Boundaries, scale: float) -> Tensor:
    """Attention of each document by itself, within its window."""
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
