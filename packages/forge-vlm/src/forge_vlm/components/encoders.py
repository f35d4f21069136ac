"""Encoders, chosen inside `[model]`: `encoder = { name = "vit", size = 32 }`.

A component describes, without torch, the features of an image (`tokens` features of `width` each) and the images that the encoder
expects (`image_size`, `channels`, `mean` and `std`).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from forge_core.component import FREE, IDENTITY, Component
from forge_vlm.encoders.shape import Positions, VisionShape
from forge_vlm.encoders.towers import Tower, read_tower
from forge_vlm.images.processing import Processing, Resample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from forge_vlm.encoders.tower_weights import TowerWeights


@dataclass(frozen=True, kw_only=True)
class Transformer(Component):
    """Base of encoders that are vision transformers; all properties follow from the shape."""

    key_class: ClassVar = IDENTITY

    @property
    def shape(self) -> VisionShape:
        """The shape of this encoder with every default resolved."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Width of a feature."""
        return self.shape.width

    @property
    def tokens(self) -> int:
        """Number of features of one image."""
        return self.shape.tokens

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the input for one image."""
        return self.shape.input_shape

    @property
    def image_size(self) -> int:
        """Height and width of an image in pixels."""
        return self.shape.image_size

    def build(self) -> "nn.Module":
        from forge_vlm.encoders.vit import VisionTransformer

        return VisionTransformer(self.shape)


@dataclass(frozen=True, kw_only=True)
class ViT(Transformer):
    """A vision transformer that is trained from scratch (Dosovitskiy et al., 2021): square patches, pre-norm blocks, a norm."""

    key_class: ClassVar = IDENTITY

    size: Annotated[int, Gt(0)] = 224
    """Height and width of an image in pixels, a multiple of `patch`."""
    patch: Annotated[int, Gt(0)] = 16
    """Height and width of a patch in pixels."""
    channels: Annotated[int, Gt(0)] = 3
    """Channels of an image: 3 for color, 1 for grayscale."""
    dim: Annotated[int, Gt(0)] = 384
    """Width of the stream and of a feature."""
    layers: Annotated[int, Gt(0)] = 12
    """Number of blocks."""
    heads: Annotated[int, Gt(0)] = 6
    """Number of attention heads, a divisor of `dim`."""
    ffn_dim: Annotated[int, Gt(0)] | None = None
    """Hidden width of the feed-forward part; 4 * dim when absent."""
    positions: Positions = "learned"
    """`learned`: a learned table. Otherwise sines and cosines of rows and columns (Chen et al., 2021), without parameters."""
    class_token: bool = False
    """Adds a learned token before the patches; it is the first feature."""
    pixel_mean: tuple[float, ...] = (0.5,)
    """Subtracted from pixels between 0 and 1: one number for all channels, or one per channel."""
    pixel_std: tuple[Annotated[float, Gt(0)], ...] = (0.5,)
    """Divides pixels after the mean is subtracted: one number for all channels, or one per channel."""
    resample: Resample = "bicubic"
    """Filter for resizing."""
    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the variance in norms."""
    init_std: Annotated[float, Gt(0), FREE] = 0.02
    """Standard deviation of the initial matrices; output projections of a block use init_std / sqrt(2 * layers)."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[ViT]":
        """Returns small encoders: both kinds of positions, with and without a class token."""
        small = cls(size=8, patch=4, dim=16, layers=2, heads=2)
        return (small, replace(small, channels=1, positions="sincos", class_token=True))

    def __post_init__(self) -> None:
        if self.size % self.patch:
            raise ValueError(f"patch {self.patch} must divide size {self.size}")
        _ = self.shape  # raises if the sizes are inconsistent
        for name in ("pixel_mean", "pixel_std"):
            if len(getattr(self, name)) not in (1, self.channels):
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} numbers; set one number, or one for each of {self.channels} channels"
                )

    @property
    def shape(self) -> VisionShape:
        """The shape of this encoder with every default resolved."""
        return VisionShape(
            image_size=self.size,
            patch_size=self.patch,
            channels=self.channels,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            ffn_dim=4 * self.dim if self.ffn_dim is None else self.ffn_dim,
            eps=self.eps,
            positions=self.positions,
            class_token=self.class_token,
            class_feature=self.class_token,
            qkv_bias=False,  # a bias of keys has no effect without rotation, and its gradient is only rounding noise
            init_std=self.init_std,
        )

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel."""
        return self.pixel_mean * (self.channels // len(self.pixel_mean))

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel."""
        return self.pixel_std * (self.channels // len(self.pixel_std))

    @property
    def processing(self) -> Processing:
        """How images become pixels: resized to a square, without cropping."""
        return Processing(size=self.size, mean=self.mean, std=self.std, resample=self.resample)


@dataclass(frozen=True, kw_only=True)
class Published(Transformer):
    """Base of vision towers that are read from a folder in the Hugging Face format.

    Sizes and statistics come from its `config.json` and `preprocessor_config.json`, which are read without torch. `weights()`
    reads its safetensors under the names of the built module.
    """

    key_class: ClassVar = IDENTITY
    families: ClassVar[tuple[str, ...]] = ()

    path: Annotated[str, FREE]
    """Folder in the Hugging Face format, with the whole model or only its vision tower."""
    size: Annotated[int, Gt(0)] | None = None
    """Height and width of an image in pixels; by default the preprocessor's. If the tower was trained on another size, its
    position embeddings are resized once, when the weights are read."""
    feature_layers: tuple[int, ...] = ()
    """Hidden states that are concatenated into features: 0 is the input of the first block, -1 the output of the last block
    before the final norm. By default features are the tower's output (`last_hidden_state`). Later blocks are not built."""
    class_feature: bool = False
    """Keeps the tower's class token, if it has one, as the first feature."""
    ignore: Annotated[tuple[str, ...], FREE] = ()
    """Keys of `config.json` to ignore: unknown keys, or keys of features that are not implemented."""

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[Published]":
        """Returns a small tower with random weights, and one with selected hidden states for larger images."""
        from forge_vlm.encoders.tower_weights import write_tower

        if not cls.families:
            return ()
        write_tower(folder, cls.families[0])
        return (cls(path=str(folder)), cls(path=str(folder), feature_layers=(0, -2), class_feature=True, size=12))

    @property
    def flexible(self) -> int:
        """Maximum number of patches of an image with native proportions; 0 if images are square."""
        return 0

    @cached_property
    def tower(self) -> Tower:
        """The description of the tower in the folder."""
        return read_tower(
            Path(self.path),
            self.families,
            size=self.size,
            flexible=self.flexible,
            feature_layers=self.feature_layers,
            class_feature=self.class_feature,
            ignore=self.ignore,
        )

    @property
    def shape(self) -> VisionShape:
        """The shape of the part of the tower that is built."""
        return self.tower.shape

    @property
    def processing(self) -> Processing:
        """How images become pixels."""
        return self.tower.processing

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        return self.shape.channels

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel."""
        return self.processing.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel."""
        return self.processing.std

    def weights(self) -> "TowerWeights":
        """Returns the initial weights of a run, by names relative to the module."""
        from forge_vlm.encoders.tower_weights import TowerWeights

        return TowerWeights(Path(self.path), self.tower)


@dataclass(frozen=True, kw_only=True)
class SigLIP(Published):
    """The vision tower of SigLIP (Zhai et al., 2023), from a folder: no class token; outputs are normalized."""

    key_class: ClassVar = IDENTITY
    families: ClassVar[tuple[str, ...]] = ("siglip",)


@dataclass(frozen=True, kw_only=True)
class SigLIP2(Published):
    """The vision tower of SigLIP 2 (Tschannen et al., 2025), from a folder, with fixed image size or NaFlex."""

    key_class: ClassVar = IDENTITY
    families: ClassVar[tuple[str, ...]] = ("siglip2", "siglip")

    patches: Annotated[int, Gt(0)] | None = None
    """Maximum number of patches of an image that keeps its proportions (NaFlex). By default images are square."""

    def __post_init__(self) -> None:
        if self.patches is not None and self.size is not None:
            raise ValueError("size makes images square and patches keeps their proportions; remove one of the two keys")

    @property
    def flexible(self) -> int:
        """Maximum number of patches of an image with native proportions; 0 if images are square."""
        return self.patches or 0


@dataclass(frozen=True, kw_only=True)
class CLIP(Published):
    """The vision tower of CLIP (Radford et al., 2021), from a folder. LLaVA uses `feature_layers = [-2]`."""

    key_class: ClassVar = IDENTITY
    families: ClassVar[tuple[str, ...]] = ("clip",)


@dataclass(frozen=True, kw_only=True)
class DINOv2(Published):
    """DINOv2 (Oquab et al., 2023), from a folder, without registers."""

    key_class: ClassVar = IDENTITY
    families: ClassVar[tuple[str, ...]] = ("dinov2",)


@dataclass(frozen=True, kw_only=True)
class Features(Component):
    """Precomputed features: a batch contains features (N, tokens, width) instead of images."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_vlm.encoders.vit:StoredFeatures"

    count: Annotated[int, Gt(0)]
    """Number of features of one image."""
    dim: Annotated[int, Gt(0)]
    """Width of a feature."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Features]":
        """Returns a small one."""
        return (cls(count=4, dim=16),)

    @property
    def width(self) -> int:
        """Width of a feature."""
        return self.dim

    @property
    def tokens(self) -> int:
        """Number of features of one image."""
        return self.count

    @property
    def image_size(self) -> int:
        """0, because the input is features, not images."""
        return 0

    @property
    def channels(self) -> int:
        """0, because the input is features, not images."""
        return 0

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the input for one image."""
        return (self.count, self.dim)

    @property
    def mean(self) -> tuple[float, ...]:
        """Empty: features are not normalized."""
        return ()

    @property
    def std(self) -> tuple[float, ...]:
        """Empty: features are not normalized."""
        return ()
