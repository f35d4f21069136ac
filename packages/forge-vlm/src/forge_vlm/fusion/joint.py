"""Images as tokens of the sequence, in one decoder (LLaVA, Liu et al., 2023)."""

from typing import Any, Literal

from torch import Tensor, nn

from forge_models.blocks.attention_core import mask as causal_mask
from forge_models.blocks.block import Block
from forge_models.shape import DecoderShape
from forge_vlm.context import FusionContext
from forge_vlm.fusion.fusion import Inputs, Plain
from forge_vlm.fusion.prefix import prefix_of
from forge_vlm.places import image_blocks

ImageAttention = Literal["causal", "bidirectional_image", "prefix"]


def seen_with_images(
    mask: Any, kind: ImageAttention, context: FusionContext, inputs: Inputs, window: int | None, x: Tensor
) -> Any:
    """The mask of a core, widened: tokens of an image see all of it (Gemma 3, 2025), or what is marked as the prefix, and else
    all up to the last image of a document, sees itself (PaliGemma, Beyer et al., 2024).

    Returns (B, 1, T, S) bool, True = visible; for `causal` the mask as it was.
    """
    if kind == "causal" or context.image_token is None:
        return mask
    tokens, documents, cache = inputs.tokens, inputs.documents, inputs.cache
    here = tokens == context.image_token
    length = tokens.shape[1]
    if cache is not None and (length == 1 or cache.extent != length):
        return mask  # images come whole, with the first tokens of a row; later ones see all before them
    seen = mask if isinstance(mask, Tensor) else causal_mask(documents, length, window, x.device)
    if kind == "bidirectional_image":
        images = image_blocks(tokens, context.image_token, context.per_image)
        both = here[:, :, None] & (images[:, :, None] == images[:, None, :])
    else:
        prefix = prefix_of(tokens, context.image_token, documents, inputs.prefix)
        both = prefix[:, :, None] & prefix[:, None, :]
    if documents is not None:
        both &= documents[:, :, None] == documents[:, None, :]
    return seen | both.unsqueeze(1)


class Joint(Plain):
    """See `forge_vlm.components.fusions.JointDecoder`."""

    def __init__(self, context: FusionContext, *, image_attention: ImageAttention = "causal") -> None:
        super().__init__(context)
        self.image_attention: ImageAttention = image_attention

    def block(self, shape: DecoderShape, layer: int) -> nn.Module:
        """See `Fusion`."""
        return Block(shape, layer)

    def seen(self, mask: Any, inputs: Inputs, window: int | None, x: Tensor) -> Any:
        """See `Fusion`."""
        return seen_with_images(mask, self.image_attention, self.context, inputs, window, x)
