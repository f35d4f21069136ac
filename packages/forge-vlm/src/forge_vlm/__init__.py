"""Vision-language models: encoders, adapters and fusions around the decoder of forge-models.

    from forge_models import initialize
    from forge_vlm import VLM, MixtureOfTransformers, MLPConfig, ViT

    vision = {"encoder": ViT(size=32, patch=8), "adapter": MLPConfig()}
    model = VLM(dim=64, layers=2, heads=4, vocab_size=256, max_length=64, **vision, fusion=MixtureOfTransformers())
    module = model.build()
    initialize(module, seed=0)
    logits = module(tokens, images=images, image_rows=rows)  # rows (B, M): indices of each row's images; -1: padding

Importing this package imports no torch.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_vlm.components.adapters import AttentionPoolConfig as AttentionPoolConfig
    from forge_vlm.components.adapters import AveragePoolConfig as AveragePoolConfig
    from forge_vlm.components.adapters import LinearConfig as LinearConfig
    from forge_vlm.components.adapters import MLPConfig as MLPConfig
    from forge_vlm.components.adapters import PerceiverConfig as PerceiverConfig
    from forge_vlm.components.adapters import PixelShuffleConfig as PixelShuffleConfig
    from forge_vlm.components.encoders import CLIP as CLIP
    from forge_vlm.components.encoders import DINOv2 as DINOv2
    from forge_vlm.components.encoders import Features as Features
    from forge_vlm.components.encoders import SigLIP as SigLIP
    from forge_vlm.components.encoders import SigLIP2 as SigLIP2
    from forge_vlm.components.encoders import ViT as ViT
    from forge_vlm.components.fusions import CrossAttention as CrossAttention
    from forge_vlm.components.fusions import JointDecoder as JointDecoder
    from forge_vlm.components.fusions import MixtureOfTransformers as MixtureOfTransformers
    from forge_vlm.components.fusions import MoMa as MoMa
    from forge_vlm.components.model import VLM as VLM
    from forge_vlm.data.prepare import prepare as prepare

_NAMES = {
    "components.adapters": "AttentionPoolConfig AveragePoolConfig LinearConfig MLPConfig PerceiverConfig PixelShuffleConfig",
    "components.encoders": "CLIP DINOv2 Features SigLIP SigLIP2 ViT",
    "components.fusions": "CrossAttention JointDecoder MixtureOfTransformers MoMa",
    "components.model": "VLM",
    "data.prepare": "prepare",
}
__getattr__, __dir__ = lazy_exports(__name__, {name: module for module, names in _NAMES.items() for name in names.split()})
