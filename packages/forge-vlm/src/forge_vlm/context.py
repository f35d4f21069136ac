"""Data that a vision-language model passes to its parts: sizes, the modality of each token, the grid of features.

The modality of a token depends only on its id, so every part of a model computes it by itself. Plain data: importing this module
needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from forge_models.shape import DecoderShape

if TYPE_CHECKING:
    from torch import Tensor

TEXT = "text"
"""Modality of every id that belongs to no other modality."""


@dataclass(frozen=True)
class Modalities:
    """Ranges of token ids by modality. Their order does not matter: names are sorted, with text first.

    Attributes:
        ranges: name -> (first id, one past the last). A range of one id is a placeholder, whose vector comes from an encoder; a
            longer range holds discrete tokens, such as those of a quantized image (Chameleon, 2024).
    """

    ranges: Mapping[str, tuple[int, int]]

    @property
    def names(self) -> tuple[str, ...]:
        """Text, then the other modalities in alphabetical order."""
        return (TEXT, *sorted(self.ranges))

    def fault(self, vocab_size: int) -> str:
        """Returns the reason why a model cannot have these ranges, or "" if it can."""
        if TEXT in self.ranges:
            return f"modality {TEXT!r} is every id that no other modality claims; remove it"
        end, before = 0, ""
        for name, (first, last) in sorted(self.ranges.items(), key=lambda item: item[1]):
            if not 0 < first < last <= vocab_size:
                return f"modality {name!r} has ids {first} to {last}; give 0 < first < end <= vocab_size {vocab_size}"
            if first < end:
                return f"modalities {before!r} and {name!r} share ids from {first} on"
            end, before = last, name
        return ""

    def of(self, tokens: "Tensor") -> "Tensor":
        """(B, T) ids -> (B, T) int64 indices into `names`."""
        modalities = tokens.new_zeros(tokens.shape)
        for place, name in enumerate(self.names[1:], 1):
            first, end = self.ranges[name]
            modalities = modalities.masked_fill((tokens >= first) & (tokens < end), place)
        return modalities


@dataclass(frozen=True, kw_only=True)
class AdapterContext:
    """Input and output sizes of an adapter; its component receives them in `build(context)`.

    Attributes:
        width: width of the encoder's features.
        tokens: number of features of one image.
        dim: width of the decoder's residual stream.
        init_std: standard deviation of the initial matrices.
    """

    width: int
    tokens: int
    dim: int
    init_std: float = 0.02


@dataclass(frozen=True, kw_only=True)
class VLMShape(DecoderShape):
    """Shape of the decoder of a vision-language model, to which a fusion may add matrices."""

    @property
    def whole_stream(self) -> tuple[str, ...]:
        """Settings that need whole sequences of the residual stream."""
        return (*super().whole_stream, "model.fusion, which looks at the tokens of whole rows")

    @property
    def declares_matrices(self) -> bool:
        """False: `matrices` does not include those of the fusion, the encoder and the adapter."""
        return False


@dataclass(frozen=True)
class FusionContext:
    """Sizes and options with which a fusion is built.

    Attributes:
        shape: shape of the decoder.
        modalities: modalities of its tokens.
        image_token: id of the placeholder of encoded images; None for a model whose images are discrete tokens.
        per_image: number of placeholders of an image: one per vector, or a single one if images stay out of the stream.
        native: whether images keep their proportions; see `native_item` in `forge_vlm.images.pixels`.
        each: whether, with `native`, an image has one vector per patch; the other outputs of the adapter are then padding.
        varies: whether images have different numbers of placeholders, at most `per_image`.
        timed: whether the time of a frame is added to its vectors.
    """

    shape: VLMShape
    modalities: Modalities
    image_token: int | None
    per_image: int
    native: bool = False
    each: bool = False
    varies: bool = False
    timed: bool = False


def grid_side(tokens: int, what: str) -> int:
    """Returns the number of rows (and columns) of a square grid of `tokens` features.

    Raises:
        ValueError: `tokens` is not a square number.
    """
    root = isqrt(tokens)
    if root * root != tokens:
        raise ValueError(
            f"{what} needs a square grid of features, and {tokens} is not a square number; if one feature is the class token, "
            "leave it out (encoder.class_feature = false, or encoder.class_token = false)"
        )
    return root


def count_windows(tokens: int, size: int, what: str) -> int:
    """Returns the number of windows of size x size in a square grid of `tokens` features.

    Raises:
        ValueError: the grid is not square, or `size` does not divide it.
    """
    root = grid_side(tokens, what)
    if root % size:
        raise ValueError(f"{what} {size} must divide the {root} x {root} grid of {tokens} features")
    return (root // size) ** 2
