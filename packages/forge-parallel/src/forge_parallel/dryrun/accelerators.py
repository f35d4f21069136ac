"""GPUs that a dry run can be asked about, and what their attention keeps.

A torch without CUDA cannot record a graph on tensors of a GPU, not even without memory. So a dry run computes on tensors of
a CPU, and what differs is told: attention. A CPU has no kernel for documents, windows, soft caps or values of another width
than keys and holds T x T scores or masks for them; a GPU's kernels (flash, cuDNN, flex) keep output and log-sum-exp in all.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.protocols.model import AttentionCore, PositionedTokens, Transform
from forge_core.protocols.topology import Context
from forge_parallel.build.plan import Order
from forge_parallel.torch_private import attention_cudnn, attention_math

GIB = 1 << 30


@dataclass(frozen=True)
class Accelerator:
    """A GPU by the name under which it is asked for, and its memory in bytes."""

    name: str
    memory: int


ACCELERATORS = MappingProxyType(
    {name: Accelerator(name, size * GIB) for name, size in {"a100": 80, "h100": 80, "h200": 141, "b200": 180}.items()}
)
"""As their vendor names them; the A100 is the larger one."""


class Fused:
    """In place of a block's own core: an operator of CUDA that tells shapes of output and log-sum-exp, and has no mask.

    In fp32 without a mask, torch's fused kernels on CUDA do not take heads that share keys, and it writes the scores out.
    In fp64 it has none at all.
    """

    def __init__(self, inner: AttentionCore) -> None:
        self.capped = getattr(inner, "capped", False)

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> "Causal":
        """Whether something besides the future is hidden."""
        return Causal(documents is None and (window is None or window >= length))

    def prepare_placed(self, queries: PositionedTokens, keys: PositionedTokens, window: int | None) -> "Causal":
        """A list of blocks on a GPU, of less than a byte per 128 x 128 scores."""
        return Causal(False)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shared: "Causal", scale: float, soft_cap: float | None = None) -> Tensor:
        """q (B, heads, T, head_dim), k (B, kv_heads, S, head_dim), v (B, kv_heads, S, width) -> (B, heads, T, width)."""
        if q.dtype == torch.float64 or (
            q.dtype == torch.float32 and shared.only and soft_cap is None and q.shape[1] != k.shape[1]
        ):
            return attention_math(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])[0]
        return attention_cudnn(q, k, v, None, True, is_causal=True, scale=scale)[0]


@dataclass(frozen=True)
class Causal:
    """What `Fused` prepares: `only` says that the future alone is hidden."""

    only: bool


@dataclass(frozen=True)
class FusedAttention(Transform):
    """Before all others: strategies that wrap a core then wrap that of a GPU."""

    name: str = "fused_attention"
    phase: int = min(Order) - 1
    axes: frozenset[str] = frozenset()

    def apply(self, part: nn.Module, context: Context) -> nn.Module:
        for path in context.specs.blocks:
            for module in part.get_submodule(path).modules():
                core = getattr(module, "core", None)
                if isinstance(core, AttentionCore):
                    module.core = Fused(core)  # type: ignore[assignment]
        return part
