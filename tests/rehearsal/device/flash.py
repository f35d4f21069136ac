"""FlashAttention over sequences of any length on the devices: scores written out in fp32, in place of CUDA's kernel.

The arguments are those of torch's operators. No call asks the device for a number.
"""

from typing import Any


def install() -> None:
    """Gives the devices the operators under `torch.nn.attention.varlen`."""
    import torch

    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("_flash_attention_forward", forward)
    library.impl("_flash_attention_backward", backward)
    torch._forge_rehearsal_flash = library  # torch forgets what a library that is not held has registered


def forward(
    q: Any, k: Any, v: Any, starts: Any, _: Any, longest: int, __: int, dropout: float, causal: bool, ___: bool,
    *, scale: float | None = None, window_size_left: int = -1, window_size_right: int = -1, **____: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """q (T, heads, d), k and v (T, kv_heads, d) -> output (T, heads, d), log-sum-exp (heads, T), and what is not used here."""
    import torch

    _check(q, k, v, starts, dropout)
    scores, values = _scores(q, k, v, starts, longest, scale, window_size_left, 0 if causal else window_size_right)
    out = scores.softmax(-1) @ values
    unused = torch.empty(0, device=q.device)
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return _like(q, out), scores.logsumexp(-1), random, unused, unused


def backward(
    gradient: Any, q: Any, k: Any, v: Any, out: Any, log_sum: Any, starts: Any, _: Any, longest: int, __: int,
    dropout: float, causal: bool, *____: Any,
    scale: float | None = None, window_size_left: int = -1, window_size_right: int = -1, **_____: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients of q, k and v."""
    scores, values = _scores(q, k, v, starts, longest, scale, window_size_left, 0 if causal else window_size_right)
    weights = (scores - log_sum[..., None]).exp()
    above, shares = gradient.transpose(0, 1).float(), q.shape[1] // k.shape[1]
    of_weights = above @ values.transpose(-1, -2)
    of_scores = weights * (of_weights - (above * out.transpose(0, 1).float()).sum(-1, keepdim=True))
    of_scores = of_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    dq = of_scores @ _by_head(k, shares)
    dk = (of_scores.transpose(-1, -2) @ q.transpose(0, 1).float()).unflatten(0, (-1, shares)).sum(1)
    dv = (weights.transpose(-1, -2) @ above).unflatten(0, (-1, shares)).sum(1)
    return _like(q, dq), _like(k, dk), _like(v, dv)


def _check(q: Any, k: Any, v: Any, starts: Any, dropout: float) -> None:
    """What the kernel of CUDA refuses."""
    import torch

    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if starts.dtype != torch.int32 or not starts.is_cuda:
        raise RuntimeError("cu_seqlens_q must have dtype int32 and be on CUDA")
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 256 or q.shape[-1] % 8 or dropout:
        raise RuntimeError("this head size is not supported")


def _scores(q: Any, k: Any, v: Any, starts: Any, longest: int, scale: float | None, left: int, right: int) -> tuple[Any, Any]:
    """(heads, T, T) fp32, -inf where a key is not seen; values (heads, T, d) fp32. What lies behind the `longest` places of a
    sequence is not computed, as on a GPU."""
    import torch

    places = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    sequence = torch.searchsorted(starts, places, right=True)
    distance = places[:, None] - places[None, :]
    seen = (sequence[:, None] == sequence[None, :]) & (places - starts[sequence - 1] < longest)[:, None]
    seen = seen if left < 0 else seen & (distance <= left)
    seen = seen if right < 0 else seen & (distance >= -right)
    shares = q.shape[1] // k.shape[1]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.transpose(0, 1).float() @ _by_head(k, shares).transpose(-1, -2)) * factor
    return scores.masked_fill(~seen, float("-inf")), _by_head(v, shares)


def _like(x: Any, found: Any) -> Any:
    """(heads, T, d) -> (T, heads, d) in the memory layout of `x`, as the kernel of CUDA gives it."""
    import torch

    return torch.empty_like(x).copy_(found.transpose(0, 1))


def _by_head(x: Any, shares: int) -> Any:
    """(T, kv_heads, d) -> (heads, T, d) fp32."""
    return x.transpose(0, 1).float().repeat_interleave(shares, dim=0)
