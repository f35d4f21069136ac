"""Vision-language models: encoders, adapters and fusions around the decoder of forge-models.

    import torch
    from forge_models import initialize
    from forge_vlm import VLM, MLPConfig, MixtureOfTransformers, ViT

    vision = {"encoder": ViT(size=32, patch=8, dim=32, layers=1, heads=2), "adapter": MLPConfig()}
    model = VLM(dim=64, layers=2, heads=4, vocab_size=256, max_length=64, **vision, fusion=MixtureOfTransformers())
    module = model.build()
    initialize(module, seed=0)
    tokens = torch.tensor([[5, *[model.placeholder] * model.per_image, 6], [7] * (model.per_image + 2)])
    rows = torch.tensor([[0], [-1]])  # (B, M): indices of each row's images; -1: padding
    logits = module(tokens, images=torch.randn(1, 3, 32, 32), image_rows=rows)
    assert logits.shape == (2, model.per_image + 2, 256)

Importing this package imports no torch. Further fronts: `forge_vlm.fusion`, `.encoders` and `.hf`.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_vlm.components.adapters import (
        AttentionPoolConfig,
        AveragePoolConfig,
        LinearConfig,
        MLPConfig,
        PerceiverConfig,
        PixelShuffleConfig,
    )
    from forge_vlm.components.encoders import CLIP, DINOv2, Features, SigLIP, SigLIP2, ViT
    from forge_vlm.components.frame_scorers import FrameSelection, ImageText, StoredScores
    from forge_vlm.components.fusions import CrossAttention, JointDecoder, MixtureOfTransformers, MoMa
    from forge_vlm.components.model import VLM, FrameTimeConfig
    from forge_vlm.components.sources import (
        Digits,
        ImageDataset,
        ImageJsonl,
        ImageWebdataset,
        VideoCsv,
        VideoFrames,
        VideoQuestions,
    )
    from forge_vlm.context import AdapterContext, FusionContext
    from forge_vlm.data.frame_selection import FrameScorer, FrameScores
    from forge_vlm.data.prepare import prepare
    from forge_vlm.data.prompts import Prompts, image_inputs
    from forge_vlm.images.processing import Processing

__all__ = [
    "CLIP",
    "VLM",
    "AdapterContext",
    "AttentionPoolConfig",
    "AveragePoolConfig",
    "CrossAttention",
    "DINOv2",
    "Digits",
    "Features",
    "FrameScorer",
    "FrameScores",
    "FrameSelection",
    "FrameTimeConfig",
    "FusionContext",
    "ImageDataset",
    "ImageJsonl",
    "ImageText",
    "ImageWebdataset",
    "JointDecoder",
    "LinearConfig",
    "MLPConfig",
    "MixtureOfTransformers",
    "MoMa",
    "PerceiverConfig",
    "PixelShuffleConfig",
    "Processing",
    "Prompts",
    "SigLIP",
    "SigLIP2",
    "StoredScores",
    "ViT",
    "VideoCsv",
    "VideoFrames",
    "VideoQuestions",
    "image_inputs",
    "prepare",
]
__getattr__, __dir__ = lazy_exports(__name__)
