"""Mixture of transformers: every modality has its own weights, attention is one (Liang et al., 2024, equations 2 and 3)."""

from typing import Any

from torch import Tensor, nn

from forge_models.shape import DecoderShape
from forge_vlm.context import FusionContext
from forge_vlm.fusion.block import ModalityBlock
from forge_vlm.fusion.fusion import Inputs, Plain
from forge_vlm.fusion.joint import ImageAttention, seen_with_images
from forge_vlm.groups import Groups


class MixtureOfTransformers(Plain):
    """See `forge_vlm.components.fusions.MixtureOfTransformers`."""

    def __init__(self, context: FusionContext, *, image_attention: ImageAttention = "causal") -> None:
        super().__init__(context)
        self.image_attention: ImageAttention = image_attention

    def block(self, shape: DecoderShape, layer: int) -> nn.Module:
        """See `Fusion`."""
        return ModalityBlock(shape, layer, self.context.modalities.names, untied=True)

    def shared(self, inputs: Inputs) -> dict[str, Any]:
        """The places of each modality's tokens."""
        modalities = self.context.modalities
        return {"groups": Groups.of(modalities.of(inputs.tokens), len(modalities.names))}

    def seen(self, mask: Any, inputs: Inputs, window: int | None, x: Tensor) -> Any:
        """See `Fusion`."""
        return seen_with_images(mask, self.image_attention, self.context, inputs, window, x)
