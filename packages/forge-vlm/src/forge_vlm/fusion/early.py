"""Images as tokens of the sequence, in one decoder (LLaVA, Liu et al., 2023).

Attention is causal, bidirectional within each image, or bidirectional within a prefix (PaliGemma, Beyer et al., 2024). The model
would see labels inside of a prefix; `seen_labels` finds them.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from forge_core.batch import IGNORE
from forge_models.blocks.attention_core import mask as causal_mask
from forge_models.blocks.block import Block
from forge_models.shape import DecoderShape
from forge_vlm.context import FusionContext
from forge_vlm.fusion.fusion import FusionBase, Inputs, image_blocks

ImageAttention = Literal["causal", "bidirectional_image", "prefix"]


def seen_with_images(
    mask: Any, kind: ImageAttention, context: FusionContext, inputs: Inputs, window: int | None, x: Tensor
) -> Any:
    """Returns the mask of an attention core, extended for images: (B, 1, T, S) bool, True = visible; for `causal` the mask
    unchanged.

    `bidirectional_image`: tokens of an image see the whole image (Gemma 3, 2025). `prefix`: tokens of the prefix see the whole
    prefix; by default it ends with the last image of a document.
    """
    if kind == "causal" or context.image_token is None:
        return mask
    tokens, documents, cache = inputs.tokens, inputs.documents, inputs.cache
    here = tokens == context.image_token
    length = tokens.shape[1]
    if cache is not None and (length == 1 or cache.extent != length):
        return mask  # images are in the first forward of a generation; later tokens see everything before them
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


class JointFusion(FusionBase):
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


def prefix_of(tokens: Tensor, image_token: int, documents: Tensor | None, given: Tensor | None) -> Tensor:
    """Returns the (B, T) bool mask of the prefix: `given` if set, else everything up to the last image of a document."""
    if given is not None:
        return given
    here = tokens == image_token
    return _up_to_last_image(here if documents is None else here & (documents >= 0), documents)


def seen_labels(labels: Tensor, prefix: Tensor, documents: Tensor | None) -> Tensor:
    """Returns the (B, T) bool mask of labels whose token is visible to its prediction: all in a prefix but the last."""
    both = prefix[:, :-1] & prefix[:, 1:]
    if documents is not None:
        both = both & (documents[:, :-1] == documents[:, 1:])
    seen = torch.zeros_like(prefix)
    seen[:, :-1] = both & (labels[:, :-1] != IGNORE)
    return seen


def _up_to_last_image(here: Tensor, documents: Tensor | None) -> Tensor:
    """Returns the (B, T) bool mask of positions with an image token at or after them in their document."""
    length = here.shape[1]
    places = torch.arange(length, device=here.device).expand_as(here)
    following = places.masked_fill(~here, length).flip(1).cummin(1).values.flip(1)
    followed = following < length
    if documents is None:
        return followed
    return followed & (documents.gather(1, following.clamp(max=length - 1)) == documents)
