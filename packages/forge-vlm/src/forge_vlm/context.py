"""What a vision-language model tells its parts: sizes, the modality of each token, the grid of features. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from forge_models.shape import DecoderShape

if TYPE_CHECKING:
    from torch import Tensor


TEXT = "text"
"""The modality of every id that no other one claims."""


@dataclass(frozen=True)
class Modalities:
    """Ranges of ids by modality. Their order means nothing: names are sorted, and text is first.

    Attributes:
        ranges: name -> (first id, one past the last). One id is a placeholder, whose vector comes from an encoder; more are
            discrete tokens, such as those of a quantized image (Chameleon, 2024).
    """

    ranges: Mapping[str, tuple[int, int]]

    @property
    def names(self) -> tuple[str, ...]:
        """Text, then the others by name."""
        return (TEXT, *sorted(self.ranges))

    def fault(self, vocab_size: int) -> str:
        """Why these ranges cannot be those of a model; empty when they can."""
        if TEXT in self.ranges:
            return f"modality {TEXT!r} is every id that others do not claim; remove it"
        end, before = 0, ""
        for name, (first, last) in sorted(self.ranges.items(), key=lambda item: item[1]):
            if not 0 < first < last <= vocab_size:
                return f"modality {name!r} has ids {first} to {last}; give 0 < first < end <= vocab_size {vocab_size}"
            if first < end:
                return f"modalities {before!r} and {name!r} share ids from {first} on"
            end, before = last, name
        return ""

    def of(self, tokens: "Tensor") -> "Tensor":
        """(B, T) ids -> (B, T) int64 places in `names`."""
        found = tokens.new_zeros(tokens.shape)
        for place, name in enumerate(self.names[1:], 1):
            first, end = self.ranges[name]
            found = found.masked_fill((tokens >= first) & (tokens < end), place)
        return found


WHOLE_STREAM = "model.fusion, which looks at the tokens of whole rows"
"""Why the residual stream of such a model is not cut along the sequence."""


@dataclass(frozen=True, kw_only=True)
class AdapterContext:
    """Sizes on both sides of an adapter, as `build(context)` of its component sees them.

    Attributes:
        width: of the encoder's features.
        tokens: that the encoder makes of one image.
        dim: width of the decoder's residual stream.
        init_std: standard deviation of matrices at the start.
    """

    width: int
    tokens: int
    dim: int
    init_std: float = 0.02


@dataclass(frozen=True)
class FusionContext:
    """What a fusion is built with.

    Attributes:
        shape: of the decoder.
        modalities: of its tokens.
        image_token: id of the placeholder of encoded images; None for a model whose images are discrete tokens.
        per_image: placeholders of an image: one for each of its vectors, or one where images stay out of the stream.
        native: images keep their proportions; see `forge_vlm.images.pixels`.
        each: then an image has as many vectors as patches, and what else the adapter makes is padding.
        varies: images have different numbers of placeholders, `per_image` at most.
    """

    shape: DecoderShape
    modalities: Modalities
    image_token: int | None
    per_image: int
    native: bool = False
    each: bool = False
    varies: bool = False


def grid_side(tokens: int, what: str) -> int:
    """Rows, which are as many as columns, of `tokens` features.

    Raises:
        ValueError: they are not a square.
    """
    root = isqrt(tokens)
    if root * root != tokens:
        raise ValueError(
            f"{what} needs a square grid of features, and {tokens} are none; if one of them is the class token, leave it out "
            "(encoder.class_feature = false, or encoder.class_token = false)"
        )
    return root


def count_windows(tokens: int, size: int, what: str) -> int:
    """Windows of size x size of which `tokens` features consist.

    Raises:
        ValueError: they are not a square, or windows of this size leave something over.
    """
    root = grid_side(tokens, what)
    if root % size:
        raise ValueError(f"{what} {size} must divide the {root} x {root} grid of {tokens} features")
    return (root // size) ** 2
