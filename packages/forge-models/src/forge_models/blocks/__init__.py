"""The parts of a decoder: attention with its cache, rotary embedding, norms, feed-forward layers, experts, head and loss.

    import torch
    from forge_models import DecoderConfig
    from forge_models.blocks import GatedMLP, RMSNorm

    shape = DecoderConfig(dim=32, layers=2, heads=4, vocab_size=97, max_length=64).shape
    norm, mlp = RMSNorm(32, eps=1e-6), GatedMLP(shape.context(0), activation="silu")
    for parameter in (*norm.parameters(), *mlp.parameters()):
        torch.nn.init.normal_(parameter, std=0.02)  # parts are built without initial values
    x = torch.randn(2, 8, 32)
    assert (x + mlp(norm(x))).shape == (2, 8, 32)

A model that contains them is initialized by `forge_models.initialize`.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_models.blocks.attention import Attention, LocalAttention
    from forge_models.blocks.block import Block, MTPModule, MTPModules
    from forge_models.blocks.cache import KVCache, LayerCache
    from forge_models.blocks.head import ChunkedCrossEntropy, Head
    from forge_models.blocks.latent_attention import LatentAttention
    from forge_models.blocks.layers import MLP, Embedding, GatedMLP, LayerNorm, Linear, RMSNorm, linear_specs
    from forge_models.blocks.moe.dispatch import LocalDispatch
    from forge_models.blocks.moe.experts import Experts
    from forge_models.blocks.moe.layer import ExpertLayer
    from forge_models.blocks.moe.routers import Hash, Router, Routing, SigmoidTopK, SoftmaxTopK
    from forge_models.blocks.rope import Rotary, Rotation, rotate

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "ChunkedCrossEntropy",
    "Embedding",
    "ExpertLayer",
    "Experts",
    "GatedMLP",
    "Hash",
    "Head",
    "KVCache",
    "LatentAttention",
    "LayerCache",
    "LayerNorm",
    "Linear",
    "LocalAttention",
    "LocalDispatch",
    "MTPModule",
    "MTPModules",
    "RMSNorm",
    "Rotary",
    "Rotation",
    "Router",
    "Routing",
    "SigmoidTopK",
    "SoftmaxTopK",
    "linear_specs",
    "rotate",
]
__getattr__, __dir__ = lazy_exports(__name__)
