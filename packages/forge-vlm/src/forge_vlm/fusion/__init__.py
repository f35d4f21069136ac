"""Fusions, which bring images into a decoder: they build its blocks and define the inputs and masks of these blocks.

A fusion of your own derives from `FusionBase` and returns blocks:

    from forge_models.blocks import Block
    from forge_vlm.fusion import FusionBase

    class Plain(FusionBase):  # image features take part in causal attention like tokens of text
        def block(self, shape, layer):
            return Block(shape, layer)

Components such as `forge_vlm.CrossAttention` build the fusions here.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_vlm.fusion.cross import CrossAttentionFusion
    from forge_vlm.fusion.fusion import Fusion, FusionBase, Inputs, JointFusion
    from forge_vlm.fusion.modalities import MoTFusion
    from forge_vlm.fusion.routed import MoMaFusion

__all__ = ["CrossAttentionFusion", "Fusion", "FusionBase", "Inputs", "JointFusion", "MoMaFusion", "MoTFusion"]
__getattr__, __dir__ = lazy_exports(__name__)
