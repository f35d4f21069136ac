"""What a vision-language model tells the components that build its parts. Plain data: importing it needs no torch."""

from dataclasses import dataclass


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
