"""Modality-aware experts: attention is one, each modality has a group of experts (MoMa, Lin et al., 2024)."""

from functools import partial
from typing import Any, Literal

from torch import nn

from forge_models.blocks.moe.layer import ExpertLayer
from forge_models.shape import DecoderShape
from forge_vlm.context import FusionContext
from forge_vlm.fusion.block import ModalityBlock
from forge_vlm.fusion.choice import ExpertChoice
from forge_vlm.fusion.fusion import Inputs, Plain
from forge_vlm.fusion.threshold import Threshold
from forge_vlm.groups import Groups

Routing = Literal["token_choice", "expert_choice", "threshold"]


class MoMa(Plain):
    """See `forge_vlm.components.fusions.MoMa`."""

    def __init__(self, context: FusionContext, *, routing: Routing = "token_choice", rate: float = 0.05) -> None:
        super().__init__(context)
        self.routing: Routing = routing
        self.rate = rate

    def block(self, shape: DecoderShape, layer: int) -> nn.Module:
        """See `Fusion`."""
        layers: dict[Routing, Any] = {
            "token_choice": ExpertLayer,
            "expert_choice": ExpertChoice,
            "threshold": partial(Threshold, rate=self.rate),
        }
        return ModalityBlock(shape, layer, self.context.modalities.names, untied=False, experts=layers[self.routing])

    def shared(self, inputs: Inputs) -> dict[str, Any]:
        """The places of each modality's tokens."""
        modalities = self.context.modalities
        return {"groups": Groups.of(modalities.of(inputs.tokens), len(modalities.names))}
