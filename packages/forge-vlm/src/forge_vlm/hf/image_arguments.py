"""How images reach a class of transformers: the form of one item of a batch, and the arguments that a forward takes.

An item is what a batch counts. For classes that see tiles it is a tile (channels, height, width), of which an image may have
several. For classes that keep proportions it is a whole image: a row for each patch, empty rows up to a fixed number, and a last
row that begins with the grid (frames, rows, columns) before patches are merged. For classes that also need the size of the image
from which tiles were cut, a tile has one more row of pixels, which begins with `CUT`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from forge_core.batch import IGNORE
from forge_models.hf.config import Unsupported

TILES, WRAPPED, CROPS = "tiles", "wrapped", "crops"
PATCHES, SIZED, PLACED, SHAPED = "patches", "sized", "placed", "shaped"
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("aya_vision", "cohere2_vision", "deepseek_vl", "gemma3", "got_ocr2", "internvl", "janus"), TILES),
    **dict.fromkeys(("llama4", "llava", "ovis2", "paligemma", "pp_chart2table", "qianfan_ocr", "vipllava"), TILES),
    **dict.fromkeys(("idefics3", "smolvlm"), WRAPPED),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), CROPS),
    **dict.fromkeys(("cohere_compass", "cosmos3_edge", "cosmos3_omni", "exaone4_5", "glm46v", "glm4v", "glm4v_moe"), PATCHES),
    **dict.fromkeys(("glm5_next", "glm_ocr", "glmga", "hunyuan_vl", "hy_v4_vl", "hyperclovax_vision_v2"), PATCHES),
    **dict.fromkeys(("inkling2", "kimi_k25"), PATCHES),
    **dict.fromkeys(("lfm3_vl", "minimax_m3_vl", "muse_glimmer", "muse_spark", "paddleocr_vl"), PATCHES),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe"), PATCHES),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "video_llama_3"), PATCHES),
    **dict.fromkeys(("lighton_ocr", "mistral3", "mistral_large4"), SIZED),
    "gemma4": PLACED,
    "lfm2_vl": SHAPED,
}
"""model_type -> form of its images:

- `tiles`; `wrapped` are tiles with a dimension of rows around them; `crops` are tiles of images whose sizes the class takes.
- `patches` of all images in one row with the grid of each; `sized` images of pixels, padded to the largest of a batch, with their
  sizes; `placed` and `shaped` patches, padded to the image with most of them, with the position of each or with grids and a mask.
"""
IN_ROWS = frozenset({PATCHES, SIZED, PLACED, SHAPED})
"""Forms of which an item is a whole image in rows of patches."""
SQUARES = frozenset({"kimi_k25", "paddleocr_vl"})
"""Classes that take a patch as (channels, height, width)."""
FRAMED = frozenset({"hunyuan_vl"})
"""Classes with two placeholders around an image."""
LINED = FRAMED | {"hy_v4_vl"}
"""Classes with a placeholder behind each row of an image."""
PREFIXED = frozenset({"paligemma"})
"""Classes that attend in both directions over what precedes the first token to learn, and mark the tokens behind it."""
GRID, CUT = 3, 4
"""Numbers of a grid; numbers in front of the last row of a crop: height and width of the image, its placeholders, its crops. They
are 0 for every crop but the first one of an image."""


@dataclass(frozen=True)
class ImageArguments:
    """The images of a class.

    Attributes:
        kind: a value of `KINDS`.
        shape: shape of one item, float32.
        token: id of the placeholder.
        per_tile: number of placeholders of a tile; 0 for patches. For crops, that of the image `least`.
        merged: number of patches that become one placeholder; 0 for tiles.
        patch: shape of one patch; empty for tiles.
        lined: whether there is a placeholder behind each row of an image.
        framed: whether there are two placeholders around an image.
        least: height, width and crops of the smallest image that is cut; empty for all but crops.
        merges: whether the class takes the number of patches that are merged in each direction.
        prefixed: whether marks are those of tokens behind the first one to learn.
        lone: whether the processor cuts an image only if it is the only one of a conversation.
    """

    kind: str
    shape: tuple[int, ...]
    token: int
    per_tile: int
    merged: int
    patch: tuple[int, ...] = ()
    lined: bool = False
    framed: bool = False
    least: tuple[int, ...] = ()
    merges: bool = False
    prefixed: bool = False
    lone: bool = False

    @classmethod
    def of(cls, config: Any, most: int) -> "ImageArguments":
        """Returns the images of a configuration of transformers; `per_tile` is 0 if only a forward tells it.

        Args:
            config: of the whole model.
            most: maximum number of patches of an image that keeps its proportions.

        Raises:
            Unsupported: the class takes images in a form that Forge does not make.
        """
        name = config.model_type
        kind = KINDS.get(name)
        if kind is None:
            raise Unsupported(
                f"model_type {name!r} takes images in a form that Forge does not make; those that it makes are of "
                f"{', '.join(sorted(KINDS))}"
            )
        vision = config.vision_config
        if name == "llava" and vision.model_type == "pixtral":
            kind = SIZED
        token = next(getattr(config, key) for key in ("image_token_id", "image_token_index") if hasattr(config, key))
        if kind in IN_ROWS:
            patch, merged = _patch(kind, config), _merged(config)
            if name == "inkling2":  # its patches are merged ones
                patch, merged = (2 * vision.patch_size, 2 * vision.patch_size, vision.num_channels), 1
            shape = (most + 1, prod(patch))
            lined, framed = name in LINED, name in FRAMED
            return cls(kind, shape, token, 0, merged, patch, lined, framed, merges=name == "video_llama_3")
        size = vision.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        if kind == CROPS:
            least = min(config.image_grid_pinpoints, key=lambda size: size[0] * size[1])
            crops = 1 + (least[0] // height) * (least[1] // width)
            return cls(kind, (channels, height + 1, width), token, 0, 0, least=(*least, crops), lone=name == "llava_onevision")
        per_tile = (height // vision.patch_size) ** 2 // config.scale_factor**2 if kind == WRAPPED else 0
        return cls(kind, (channels, height, width), token, per_tile, 0, prefixed=name in PREFIXED)

    def blank(self, like: Tensor) -> Tensor:
        """Returns the items of ones of the smallest image, one except for crops, with the device of `like`."""
        count = self.least[2] if self.least else 1
        items = torch.ones(count, *self.shape, dtype=torch.float32, device=like.device)
        if self.kind in IN_ROWS:
            side = max(round(self.merged**0.5), 1 + self.framed)
            # Of one vector alone, some classes that take sizes lose its dimension.
            items[0, -1, :GRID] = torch.tensor([1.0, side, side * (1 + (self.kind == SIZED))])
        elif self.least:
            height, width, crops = self.least
            items[:, 0, -1, :CUT] = 0
            items[0, 0, -1, :CUT] = torch.tensor([height, width, self.per_tile, crops])
        return items

    def grids(self, images: Tensor) -> Tensor:
        """(n, most + 1, width) -> (n, 3) int64: frames, rows and columns of patches."""
        return images[:, -1, :GRID].long()

    def counts(self, images: Tensor) -> Tensor:
        """Returns the number of placeholders of each item (n,), int64."""
        if self.kind == CROPS:
            return images[:, 0, -1, 2].long()
        if self.kind not in IN_ROWS:
            return torch.full((len(images),), self.per_tile, device=images.device)
        grids = self.grids(images)
        if not self.lined:
            return grids.prod(1) // self.merged
        merged = grids[:, 1:] // round(self.merged**0.5)
        return merged[:, 0] * (merged[:, 1] + 1) + 2 * self.framed

    def marks(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Returns the marks of tokens (B, T), int64: 1 for placeholders; for a class that is `prefixed`, for tokens behind the
        first one to learn, of which there is none without labels."""
        if not self.prefixed:
            return (x == self.token).long()
        if labels is None:
            return torch.zeros_like(x)
        learned = (labels != IGNORE).cumsum(1) > 0
        return torch.cat([torch.zeros_like(learned[:, :1]), learned[:, :-1]], 1).long()  # labels are shifted

    def arguments(self, images: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the arguments of a forward for items (n, *shape), in the order of their placeholders."""
        if self.kind == CROPS:
            first = images[:, 0, -1, 3] > 0
            return {"pixel_values": images[:, :, :-1].to(dtype), "image_sizes": images[first, 0, -1, :2].long()}
        if self.kind not in IN_ROWS:
            pixels = images.to(dtype)
            return {"pixel_values": pixels.unsqueeze(0) if self.kind == WRAPPED else pixels}
        grids = self.grids(images)  # before any cast, because bf16 cannot represent 257
        if self.kind == SIZED:
            return {"pixel_values": self._pixels(images, grids).to(dtype), "image_sizes": grids[:, 1:] * self.patch[-1]}
        used = torch.arange(images.shape[1] - 1, device=images.device) < grids.prod(1, keepdim=True)
        if self.kind == PATCHES:
            given = {"pixel_values": images[:, :-1][used].unflatten(-1, self.patch).to(dtype), "image_grid_thw": grids}
            side = torch.full_like(grids[:, 0], round(self.merged**0.5))
            return {**given, "image_merge_sizes": side} if self.merges else given
        most = int(grids.prod(1).max())
        rows, used = images[:, :most].to(dtype), used[:, :most]
        rows = rows * used.unsqueeze(-1)
        if self.kind == SHAPED:
            return {"pixel_values": rows, "spatial_shapes": grids[:, 1:], "pixel_attention_mask": used.long()}
        index = torch.arange(most, device=images.device).expand(len(images), most)
        columns = grids[:, 2:]
        places = torch.stack([index % columns, index // columns], -1).masked_fill(~used.unsqueeze(-1), -1)
        return {"pixel_values": rows, "image_position_ids": places}

    def _pixels(self, images: Tensor, grids: Tensor) -> Tensor:
        """Returns images (n, channels, height, width) of rows of patches, with zeros around those that are smaller."""
        channels, side, _ = self.patch
        height, width = (int(size) * side for size in grids[:, 1:].amax(0))
        found = images.new_zeros(len(images), channels, height, width)
        for index, (_, rows, columns) in enumerate(grids.tolist()):
            patches = images[index, : rows * columns].view(rows, columns, channels, side, side)
            pixels = patches.permute(2, 0, 3, 1, 4).reshape(channels, rows * side, columns * side)
            found[index, :, : rows * side, : columns * side] = pixels
        return found


def _patch(kind: str, config: Any) -> tuple[int, ...]:
    """Returns the shape of one patch of a class that keeps the proportions of images."""
    vision = config.vision_config
    channels = _first(vision, ("in_channels", "in_chans", "num_channels"), 3)
    if kind == SIZED or config.model_type in SQUARES:
        return channels, vision.patch_size, vision.patch_size
    return (channels * _first(vision, ("temporal_patch_size", "patch_temporal"), 1) * vision.patch_size**2,)


def _merged(config: Any) -> int:
    """Returns the number of patches that become one placeholder."""
    keys = ("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size", "downsample_factor")
    side = _first(config.vision_config, keys) or _first(config, keys, 1)
    return (side if isinstance(side, int) else side[0]) ** 2


def _first(config: Any, keys: tuple[str, ...], default: Any = None) -> Any:
    """Returns the value of the first key that a configuration has."""
    return next((getattr(config, key) for key in keys if hasattr(config, key)), default)
