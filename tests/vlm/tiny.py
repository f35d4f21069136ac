"""Small vision-language models with drawn weights, and rows of text and images, for the tests of the fusions."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.components.layers import RMSNormConfig, SwiGLU
from forge_testing.modules import filled, on_meta
from forge_vlm.components.adapters import MLPConfig
from forge_vlm.components.encoders import ViT
from forge_vlm.components.fusions import CrossAttention, JointDecoder, MixtureOfTransformers, MoMa
from forge_vlm.components.model import VLM
from forge_vlm.model import VisionLanguageModel

SIZES: dict[str, Any] = {"dim": 16, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "vocab_size": 40, "max_length": 64}
PARTS: dict[str, Any] = {"attention": GQA(), "mlp": SwiGLU(), "norm": RMSNormConfig()}
TEXT = DecoderConfig(**SIZES, **PARTS)
ENCODER = ViT(size=8, patch=4, channels=1, dim=8, layers=1, heads=2)
IMAGE = 39
"""The placeholder; an image is 4 vectors."""
EXPERTS = MoEConfig(experts=4, top_k=2, ffn_dim=16, kernel="loop")
JOINT = VLM(**SIZES, **PARTS, encoder=ENCODER, adapter=MLPConfig(), fusion=JointDecoder())

MODELS: dict[str, VLM] = {
    "joint": JOINT,
    "joint-bidirectional": replace(JOINT, fusion=JointDecoder(image_attention="bidirectional_image")),
    "joint-prefix": replace(JOINT, fusion=JointDecoder(image_attention="prefix")),
    "cross": replace(JOINT, fusion=CrossAttention(every=2)),
    "mot": replace(JOINT, fusion=MixtureOfTransformers()),
    "mot-branch": replace(JOINT, fusion=MixtureOfTransformers(), norm_placement="post", attention=GQA(qk_norm="head")),
    "mot-experts": replace(JOINT, fusion=MixtureOfTransformers(), moe=replace(EXPERTS, first_dense=1)),
    "moma-token": replace(JOINT, fusion=MoMa(), moe=replace(EXPERTS, shared=1)),
    "moma-choice": replace(JOINT, fusion=MoMa(routing="expert_choice"), moe=EXPERTS),
    "moma-threshold": replace(JOINT, fusion=MoMa(routing="threshold"), moe=EXPERTS),
}
CAUSAL = [name for name in MODELS if name not in ("joint-bidirectional", "joint-prefix")]


def build(component: Any, seed: int = 0) -> VisionLanguageModel:
    """In fp64, in evaluation, every parameter drawn so that none is neutral."""
    model = on_meta(component.build)
    specs = model.specs()
    found: Any = filled(model, specs.tensors, specs.ties, seed)
    with torch.no_grad():
        for name, buffer in found.named_buffers():
            if name.endswith("threshold"):
                buffer.zero_()
    return found


def image(seed: int) -> Tensor:
    return torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def row(component: VLM, *pieces: Any) -> tuple[list[int], list[Tensor]]:
    """Ids and images of a row: a number is an id, a string of digits the seed of an image."""
    ids, images = [], []
    for piece in pieces:
        if isinstance(piece, str):
            ids += [IMAGE] * component.per_image
            images.append(image(int(piece)))
        else:
            ids.append(piece)
    return ids, images


def batch(*rows: tuple[list[int], list[Tensor]]) -> dict[str, Tensor]:
    """What a model is called with; rows are of one length."""
    images = [one for _, found in rows for one in found]
    most = max(1, *(len(found) for _, found in rows))
    numbers, first = torch.full((len(rows), most), -1), 0
    for place, (_, found) in enumerate(rows):
        numbers[place, : len(found)] = torch.arange(first, first + len(found))
        first += len(found)
    blank = [torch.zeros(1, 8, 8, dtype=torch.float64)]
    return {"x": torch.tensor([ids for ids, _ in rows]), "images": torch.stack(images or blank), "image_rows": numbers}
