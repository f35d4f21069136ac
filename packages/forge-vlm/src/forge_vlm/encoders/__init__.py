"""Encoders from images to features: a vision transformer, trained from scratch or with the weights of a published model.

    import torch
    from forge_vlm.encoders import VisionShape, VisionTransformer

    shape = VisionShape(image_size=32, patch_size=8, channels=3, dim=32, layers=2, heads=2, ffn_dim=64)
    encoder = VisionTransformer(shape)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)  # encoders are built without initial values
    features = encoder(torch.randn(2, 3, 32, 32))
    assert features.shape == (2, 16, 32)

Components such as `forge_vlm.ViT` and `forge_vlm.SigLIP` build them; `read_tower` reads a published model.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_vlm.encoders.shape import VisionShape
    from forge_vlm.encoders.tower_weights import TowerWeights
    from forge_vlm.encoders.towers import Tower, TowerFamily, read_tower
    from forge_vlm.encoders.vit import PatchEmbedding, StoredFeatures, VisionTransformer

__all__ = [
    "PatchEmbedding",
    "StoredFeatures",
    "Tower",
    "TowerFamily",
    "TowerWeights",
    "VisionShape",
    "VisionTransformer",
    "read_tower",
]
__getattr__, __dir__ = lazy_exports(__name__)
