"""Encoder modules: the vision transformer, for square images or images of any proportions, and stored features.

Images of any proportions share a batch as padded rows of patches (NaFlex, Tschannen et al., 2025). Their grids are tensors on the
device: the host never waits for them, and shapes do not depend on them. No module here has parallel code.
"""

from collections.abc import Callable, Mapping
from math import isqrt, sqrt
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Init, ModuleSpec, TensorSpec
from forge_models.blocks.layers import LayerNorm, Linear, linear_specs, unfilled
from forge_models.inner_values import scope, tap
from forge_vlm.encoders.shape import VisionShape


class VisionTransformer(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2021). Blocks after the last output are not built."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = PatchEmbedding(shape)
        self.entry_norm: LayerNorm | None = LayerNorm(shape.dim, shape.eps) if shape.entry_norm else None
        self.layers = nn.ModuleDict({str(layer): ImageBlock(shape) for layer in range(shape.blocks)})
        self.norm: LayerNorm | None = LayerNorm(shape.dim, shape.eps) if shape.last_norm else None

    def forward(self, images: Tensor, grids: Tensor | None = None) -> Tensor:
        """Images (N, channels, image_size, image_size), normalized -> features (N, tokens, width).

        A flexible encoder takes patches (N, tokens, patch_dim), row by row and padded, and `grids` (N, 2) int, the rows and
        columns of each image; features of padding are 0.

        Raises:
            ValueError: the images have another size, or grids are given to an encoder that is not flexible, or missing for one
                that is.
        """
        if (grids is not None) != bool(self.shape.flexible):
            raise ValueError(
                "an encoder of images of any proportions needs grids (rows and columns of patches); other encoders take none"
            )
        x = self.embed(images, grids)
        here = None if grids is None else patch_mask(grids, x.shape[1])
        seen = None if here is None else here[:, None, None]
        if self.entry_norm is not None:
            x = self.entry_norm(x)
        wanted = {0: x} if 0 in self.shape.outputs else {}
        for index, (name, block) in enumerate(self.layers.items(), 1):
            with scope(f"encoder.layers.{name}.", self):
                x = block(x, seen)
            if index in self.shape.outputs:
                wanted[index] = x
        if self.norm is not None:
            x = self.norm(x)
        features = torch.cat([wanted[index] for index in self.shape.outputs], -1) if self.shape.outputs else x
        if here is not None:
            return features.masked_fill(~here[..., None], 0)
        return features[:, 1:] if self.shape.class_token and not self.shape.class_feature else features

    @property
    def blocks(self) -> tuple[str, ...]:
        """Returns the paths of the repeated blocks in forward order: the units of sharding, recomputation and compilation."""
        return tuple(f"layers.{name}" for name in self.layers)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns an empty dict, because no strategy lays out image tokens."""
        return {}


class PatchEmbedding(nn.Module):
    """A linear map of each patch plus its position; the class token, if there is one, comes first."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.proj = Linear(shape.patch_dim, shape.dim, shape.patch_bias)
        self.class_token: nn.Parameter | None = unfilled(shape.dim) if shape.class_token else None
        self.positions: nn.Parameter | None = unfilled(shape.table, shape.dim) if shape.positions == "learned" else None

    def forward(self, images: Tensor, grids: Tensor | None = None) -> Tensor:
        """(N, channels, image_size, image_size), with grids (N, T, patch_dim) -> (N, T, dim), patches row by row."""
        shape = self.shape
        if images.shape[1:] != shape.input_shape:
            what = "channels, height, width" if grids is None else "patches, numbers in a patch"
            raise ValueError(
                f"images have the shape {tuple(images.shape[1:])}, but the encoder takes {shape.input_shape}: {what}"
            )
        flat = cut_patches(images, shape.patch_size) if grids is None else images
        x = self.proj(flat.to(self.proj.weight.dtype))
        if grids is not None:
            assert self.positions is not None
            return x + resize_positions(self.positions, grids, x.shape[1])
        if self.positions is None:
            x = x + sincos_positions(shape.grid, shape.dim, x.device).to(x.dtype)
        if self.class_token is not None:
            x = torch.cat((self.class_token.to(x.dtype).expand(len(x), 1, -1), x), 1)
        return x if self.positions is None else x + self.positions

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module."""
        specs = linear_specs("proj", self.proj, (None, None), self.shape.patch_std)
        start = Init("normal", self.shape.init_std)
        if self.class_token is not None:
            specs["class_token"] = TensorSpec((None,), start, "vector")
        if self.positions is not None:
            specs["positions"] = TensorSpec((None, None), start, "embedding")
        return specs


def cut_patches(images: Tensor, size: int) -> Tensor:
    """Cuts (N, C, H, W) into (N, H // size * W // size, C * size * size): whole patches row by row, each channel by channel."""
    height, width = (side // size * size for side in images.shape[2:])
    cut = images[..., :height, :width].unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def sincos_positions(grid: int, dim: int, device: torch.device) -> Tensor:
    """Returns (grid * grid, dim) fp32: sine and cosine of the column, then of the row, with dim / 4 frequencies 10000^(-4 i /
    dim) (Chen et al., 2021, "An Empirical Study of Training Self-Supervised Vision Transformers")."""
    frequencies = 10000.0 ** (-torch.arange(dim // 4, device=device, dtype=torch.float32) * 4 / dim)
    angles = torch.arange(grid, device=device, dtype=torch.float32)[:, None] * frequencies
    one = torch.cat((angles.sin(), angles.cos()), 1)
    rows, columns = one.repeat_interleave(grid, 0), one.repeat(grid, 1)
    return torch.cat((columns, rows), 1)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    }
)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Returns softmax(q k^T / sqrt(head_dim)) v, (N, heads, T, head_dim). `seen` is False for keys to ignore; None: attend to
    all.

    For N = 0 the result is empty but has a gradient, because attention kernels of GPUs reject empty batches.
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
        """Returns the weight, which starts at one."""
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


def patch_mask(grids: Tensor, length: int) -> Tensor:
    """Returns the (N, length) bool mask of patches for (N, 2) rows and columns. An empty image has one, for finite attention."""
    return torch.arange(length, device=grids.device) < grids.prod(1, keepdim=True).clamp(min=1)


def resize_positions(table: Tensor, grids: Tensor, length: int) -> Tensor:
    """Resizes a square position table (g * g, dim) to the grid of each image, row by row: (N, length, dim).

    Equals bilinear interpolation with antialiasing, written as a weighted sum of the table. Padding has the positions of the last
    row.
    """
    side = isqrt(len(table))
    token = torch.arange(length, device=grids.device)
    rows, columns = grids.clamp(min=1).unbind(1)
    down = _interpolation_weights(token // columns[:, None], rows, side)
    across = _interpolation_weights(token % columns[:, None], columns, side)
    return ((down[..., None] * across[..., None, :]).flatten(2).to(table.dtype) @ table).to(table.dtype)


def _interpolation_weights(index: Tensor, count: Tensor, side: int) -> Tensor:
    """Returns (N, T, side) fp32: weights of `side` old values in the new value at `index` (N, T) of `count` (N,) new values.

    The weights form a triangle around the center of the new value, as wide as the coarser of the two spacings.
    """
    scale = (side / count.float())[:, None, None]
    center = (torch.minimum(index, count[:, None] - 1)[..., None] + 0.5) * scale
    distance = (torch.arange(side, device=index.device) + 0.5 - center).abs()
    weights = (1 - distance / scale.clamp(min=1)).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


class StoredFeatures(nn.Module):
    """Encoder for precomputed features instead of images: the identity, with a check of their size."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.size = (count, dim)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the features (N, tokens, width) unchanged.

        Raises:
            ValueError: the features have another size.
        """
        if images.shape[1:] != self.size:
            raise ValueError(f"features have the shape {tuple(images.shape[1:])}, expected {self.size}: tokens, width")
        return images

    @property
    def blocks(self) -> tuple[str, ...]:
        """Returns an empty tuple: there are no blocks."""
        return ()

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns an empty dict: there are no modules to lay out."""
        return {}
