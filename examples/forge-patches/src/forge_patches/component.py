"""The keys of encoder, adapter and fusion."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from forge_core import IDENTITY, Component
from forge_vlm import Processing

if TYPE_CHECKING:
    from torch import nn

    from forge_vlm import AdapterContext


@dataclass(frozen=True, kw_only=True)
class RawPatches(Component):
    """No encoder: the features of an image are the pixels of its patches, and the adapter learns what to do with them (Fuyu)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_patches.parts:Patches"

    size: Annotated[int, Gt(0)] = 32
    """Height and width of an image in pixels, a multiple of `patch`."""
    patch: Annotated[int, Gt(0)] = 8
    """Height and width of a patch in pixels."""
    channels: Annotated[int, Gt(0)] = 3
    """Channels of an image: 3 for color, 1 for grayscale."""

    def __post_init__(self) -> None:
        if self.size % self.patch:
            raise ValueError(f"size {self.size} must be a multiple of patch {self.patch}")

    @property
    def width(self) -> int:
        """Width of a feature."""
        return self.channels * self.patch**2

    @property
    def tokens(self) -> int:
        """Number of features of one image."""
        return (self.size // self.patch) ** 2

    @property
    def image_size(self) -> int:
        """Height and width of an image in pixels."""
        return self.size

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the input for one image."""
        return (self.channels, self.size, self.size)

    @property
    def processing(self) -> Processing:
        """How images become pixels: stretched to a square."""
        return Processing(size=self.size, mean=self.mean, std=self.std)

    @property
    def mean(self) -> tuple[float, ...]:
        """Subtracted from pixels between 0 and 1."""
        return (0.5,) * self.channels

    @property
    def std(self) -> tuple[float, ...]:
        """Divides pixels after the mean is subtracted."""
        return (0.5,) * self.channels


@dataclass(frozen=True, kw_only=True)
class GatedConfig(Component):
    """Features to tokens by down(silu(gate(x)) * up(x)), one token per feature."""

    key_class: ClassVar = IDENTITY

    hidden: Annotated[int, Gt(0)] = 64
    """Width between the matrices."""

    def tokens(self, n: int) -> int:
        """Returns n: one token per feature."""
        return n

    def build(self, context: "AdapterContext") -> "nn.Module":
        from forge_patches.parts import GatedAdapter

        return GatedAdapter(context, self.hidden)


@dataclass(frozen=True, kw_only=True)
class Apart(Component):
    """Images are tokens of the sequence, and an image sees only itself: its states do not depend on the text before it.

    The keys and values of an image can therefore be computed once and used with any text.
    """

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_patches.parts:ApartFusion"
    feature: ClassVar[str] = "fusion_apart"
    in_stream: ClassVar[bool] = True

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[Apart]":
        """Returns the fusion."""
        return (cls(),)
