"""A vision transformer as a module: patches, blocks, norm. It holds no parallel code."""

import torch
from torch import Tensor, nn

from forge_core.specs import Init, ModuleSpec, TensorSpec
from forge_models.blocks.layers import LayerNorm, Linear, linear_specs, unfilled
from forge_models.inner_values import scope
from forge_vlm.encoders.flexible import present, resized
from forge_vlm.encoders.layers import ImageBlock
from forge_vlm.encoders.shape import VisionShape


class VisionTransformer(nn.Module):
    """Vision transformer of a shape (Dosovitskiy et al., 2021). Blocks that no output needs are not built."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = PatchEmbedding(shape)
        self.entry_norm: LayerNorm | None = LayerNorm(shape.dim, shape.eps) if shape.entry_norm else None
        self.layers = nn.ModuleDict({str(layer): ImageBlock(shape) for layer in range(shape.blocks)})
        self.norm: LayerNorm | None = LayerNorm(shape.dim, shape.eps) if shape.last_norm else None

    def forward(self, images: Tensor, grids: Tensor | None = None) -> Tensor:
        """Images (N, channels, image_size, image_size), normalized -> features (N, tokens, width).

        A flexible encoder takes patches (N, tokens, patch_dim), row by row and padded, and `grids` (N, 2) int, their rows and
        columns; its features of padding are 0.

        Raises:
            ValueError: images of another size, or grids where there should be none.
        """
        if (grids is not None) != bool(self.shape.flexible):
            raise ValueError(
                "grids (rows and columns of patches) go with an encoder of images of any proportions, and with no other"
            )
        x = self.embed(images, grids)
        here = None if grids is None else present(grids, x.shape[1])
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
        """Paths of the repeated blocks, in forward order: the units of sharding, recomputation and compilation."""
        return tuple(f"layers.{name}" for name in self.layers)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """None: no strategy lays out tokens of images. `tensor_specs()` are those of each module inside."""
        return {}


class PatchEmbedding(nn.Module):
    """Patches, each a linear function of its pixels, with their positions and, if there is one, the class token before them."""

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
                f"images have the shape {tuple(images.shape[1:])}, and the encoder takes {shape.input_shape}: {what}"
            )
        flat = patches(images, shape.patch_size) if grids is None else images
        x = self.proj(flat.to(self.proj.weight.dtype))
        if grids is not None:
            assert self.positions is not None
            return x + resized(self.positions, grids, x.shape[1])
        if self.positions is None:
            x = x + sincos(shape.grid, shape.dim, x.device).to(x.dtype)
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


def patches(images: Tensor, size: int) -> Tensor:
    """(N, C, H, W) -> (N, H // size * W // size, C * size * size): whole patches row by row, each channel by channel."""
    height, width = (side // size * size for side in images.shape[2:])
    cut = images[..., :height, :width].unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def sincos(grid: int, dim: int, device: torch.device) -> Tensor:
    """(grid * grid, dim) fp32: sine and cosine of the column, then of the row, each of dim / 4 frequencies 10000^(-4 i / dim)
    (Chen et al., 2021, "An Empirical Study of Training Self-Supervised Vision Transformers")."""
    frequencies = 10000.0 ** (-torch.arange(dim // 4, device=device, dtype=torch.float32) * 4 / dim)
    angles = torch.arange(grid, device=device, dtype=torch.float32)[:, None] * frequencies
    one = torch.cat((angles.sin(), angles.cos()), 1)
    rows, columns = one.repeat_interleave(grid, 0), one.repeat(grid, 1)
    return torch.cat((columns, rows), 1)
