"""What a vision-language model tells the components that build its parts. Plain data: importing it needs no torch."""

from dataclasses import dataclass

from forge_models.shape import DecoderShape
from forge_vlm.modality import Modalities

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
        native: images keep their proportions; see `forge_vlm.images.native`.
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
