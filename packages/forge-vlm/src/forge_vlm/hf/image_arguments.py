"""How images reach a class of transformers: the form of one item of a batch, and the arguments that a forward takes.

An item is what a batch counts. For classes that see tiles it is a tile (channels, height, width), of which an image may have
several. For classes that keep proportions it is a whole image: a row for each patch, empty rows up to a fixed number, and a last
row that begins with the grid (frames, rows, columns) before patches are merged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_models.hf.config import Unsupported

TILES, WRAPPED, PATCHES = "tiles", "wrapped", "patches"
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("aya_vision", "cohere2_vision", "gemma3", "internvl", "llava", "vipllava"), TILES),
    **dict.fromkeys(("idefics3", "smolvlm"), WRAPPED),
    **dict.fromkeys(("glm4v", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"), PATCHES),
}
"""model_type -> form of its images. `wrapped` are tiles with a dimension of rows around them."""
GRID = 3
"""Numbers of a grid."""


@dataclass(frozen=True)
class ImageArguments:
    """The images of a class.

    Attributes:
        kind: a value of `KINDS`.
        shape: shape of one item, float32.
        token: id of the placeholder.
        per_tile: number of placeholders of a tile; 0 for patches.
        merged: number of patches that become one placeholder; 0 for tiles.
    """

    kind: str
    shape: tuple[int, ...]
    token: int
    per_tile: int
    merged: int

    @classmethod
    def of(cls, config: Any, most: int) -> "ImageArguments":
        """Returns the images of a configuration of transformers; `per_tile` is 0 if only a forward tells it.

        Args:
            config: of the whole model.
            most: maximum number of patches of an image that keeps its proportions.

        Raises:
            Unsupported: the class takes images in a form that Forge does not make.
        """
        kind = KINDS.get(config.model_type)
        if kind is None:
            raise Unsupported(
                f"model_type {config.model_type!r} takes images in a form that Forge does not make; those that it makes are of "
                f"{', '.join(sorted(KINDS))}"
            )
        vision = config.vision_config
        token = next(getattr(config, key) for key in ("image_token_id", "image_token_index") if hasattr(config, key))
        if kind == PATCHES:
            channels = next(getattr(vision, key) for key in ("in_channels", "in_chans", "num_channels") if hasattr(vision, key))
            width = channels * vision.temporal_patch_size * vision.patch_size**2
            return cls(kind, (most + 1, width), token, 0, vision.spatial_merge_size**2)
        size = vision.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        per_tile = (height // vision.patch_size) ** 2 // config.scale_factor**2 if kind == WRAPPED else 0
        return cls(kind, (getattr(vision, "num_channels", 3), height, width), token, per_tile, 0)

    def blank(self, like: Tensor) -> Tensor:
        """Returns one item of ones, with the device and dtype of `like`: the smallest image."""
        items = torch.ones(1, *self.shape, dtype=torch.float32, device=like.device)
        if self.kind == PATCHES:
            side = int(self.merged**0.5)
            items[0, -1, :GRID] = torch.tensor([1.0, side, side])
        return items

    def grids(self, images: Tensor) -> Tensor:
        """(n, most + 1, width) -> (n, 3) int64: frames, rows and columns of patches."""
        return images[:, -1, :GRID].long()

    def counts(self, images: Tensor) -> Tensor:
        """Returns the number of placeholders of each item (n,), int64."""
        if self.kind == PATCHES:
            return self.grids(images).prod(1) // self.merged
        return torch.full((len(images),), self.per_tile, device=images.device)

    def arguments(self, images: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the arguments of a forward for items (n, *shape), in the order of their placeholders."""
        if self.kind == PATCHES:
            grids = self.grids(images)  # before any cast, because bf16 cannot represent 257
            used = torch.arange(images.shape[1] - 1, device=images.device) < grids.prod(1, keepdim=True)
            return {"pixel_values": images[:, :-1][used].to(dtype), "image_grid_thw": grids}
        pixels = images.to(dtype)
        return {"pixel_values": pixels.unsqueeze(0) if self.kind == WRAPPED else pixels}
