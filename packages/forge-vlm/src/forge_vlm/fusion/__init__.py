"""Fusions, which bring images into a decoder: they build its blocks and define the inputs and masks of these blocks.

A custom fusion derives from `FusionBase` and returns blocks:

    from forge_vlm.fusion import FusionBase

    class Plain(FusionBase):
        def block(self, shape, layer):
            return Block(shape, layer)
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_vlm.fusion.cross import CrossAttentionFusion as CrossAttentionFusion
    from forge_vlm.fusion.fusion import Fusion as Fusion
    from forge_vlm.fusion.fusion import FusionBase as FusionBase
    from forge_vlm.fusion.fusion import Inputs as Inputs
    from forge_vlm.fusion.fusion import JointFusion as JointFusion
    from forge_vlm.fusion.modalities import MoTFusion as MoTFusion
    from forge_vlm.fusion.routed import MoMaFusion as MoMaFusion

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "CrossAttentionFusion": "cross",
        "Fusion": "fusion",
        "FusionBase": "fusion",
        "Inputs": "fusion",
        "JointFusion": "fusion",
        "MoMaFusion": "routed",
        "MoTFusion": "modalities",
    },
)
