"""The parts of a vision transformer's block: attention that sees all patches of its image, feed-forward part, scale."""

from collections.abc import Callable, Mapping
from math import sqrt
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Init, TensorSpec
from forge_models.blocks.layers import LayerNorm, Linear, linear_specs, unfilled
from forge_models.inner_values import tap
from forge_vlm.encoders.shape import VisionShape

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    }
)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, (N, heads, T, head_dim). `seen` is False for what is not seen; None = all is.

    Of no image (N = 0) it is empty, and has a gradient all the same: kernels on a GPU refuse that.
    """
    if not len(q):
        return q + k.sum(2, keepdim=True) + v.sum(2, keepdim=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1 / sqrt(q.shape[-1]))


class ImageAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over all tokens of an image."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = Linear(shape.dim, shape.dim, shape.qkv_bias)
        self.k_proj = Linear(shape.dim, shape.dim, shape.qkv_bias)
        self.v_proj = Linear(shape.dim, shape.dim, shape.qkv_bias)
        self.o_proj = Linear(shape.dim, shape.dim, True)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """(N, T, dim) -> (N, T, dim). `seen` (N, 1, 1, T) is False for padding; None = there is none."""
        q, k, v = (self._heads(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = tap("attention.q", q), tap("attention.k", k)
        out = attend(q, k, v, seen)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module. No strategy splits them: every rank holds whole heads."""
        std = self.shape.init_std
        return {
            **linear_specs("q_proj", self.q_proj, (None, None), std),
            **linear_specs("k_proj", self.k_proj, (None, None), std),
            **linear_specs("v_proj", self.v_proj, (None, None), std),
            **linear_specs("o_proj", self.o_proj, (None, None), self.shape.output_std),
        }


class ImageMLP(nn.Module):
    """down(activation(up(x))), or down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate_proj: Linear | None = Linear(shape.dim, shape.ffn_dim, True) if shape.gated else None
        self.up_proj = Linear(shape.dim, shape.ffn_dim, True)
        self.down_proj = Linear(shape.ffn_dim, shape.dim, True)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) -> (N, T, dim)."""
        if self.gate_proj is not None:
            return self.down_proj(F.silu(tap("mlp.pre_activation", self.gate_proj(x))) * self.up_proj(x))
        return self.down_proj(ACTIVATIONS[self.shape.activation](tap("mlp.pre_activation", self.up_proj(x))))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module."""
        gate = self.gate_proj
        return {
            **({} if gate is None else linear_specs("gate_proj", gate, (None, None), self.shape.init_std)),
            **linear_specs("up_proj", self.up_proj, (None, None), self.shape.init_std),
            **linear_specs("down_proj", self.down_proj, (None, None), self.shape.output_std),
        }


class LayerScale(nn.Module):
    """x * weight (Touvron et al., 2021)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = unfilled(dim)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return x * self.weight

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Weights start at one."""
        return {"weight": TensorSpec((None,), Init("ones"), "vector")}


class ImageBlock(nn.Module):
    """x + scale(attention(norm(x))), then the same with the feed-forward part (Dosovitskiy et al., 2021)."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(shape.dim, shape.eps)
        self.attention = ImageAttention(shape)
        self.attention_scale: LayerScale | None = LayerScale(shape.dim) if shape.layer_scale else None
        self.mlp_norm = LayerNorm(shape.dim, shape.eps)
        self.mlp = ImageMLP(shape)
        self.mlp_scale: LayerScale | None = LayerScale(shape.dim) if shape.layer_scale else None

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """(N, T, dim) -> (N, T, dim). `seen` (N, 1, 1, T) is False for padding; None = there is none."""
        x = tap("residual", x)
        inner = tap("attention.output", self.attention(self.attention_norm(x), seen))
        x = x + (inner if self.attention_scale is None else self.attention_scale(inner))
        inner = self.mlp(self.mlp_norm(x))
        return x + (inner if self.mlp_scale is None else self.mlp_scale(inner))
