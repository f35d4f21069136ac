"""Decoders, their loss, initial weights and generation, free of parallel code.

    from forge_models import DecoderConfig, Sampling, count_flops, generate, initialize

    config = DecoderConfig(dim=64, layers=2, heads=4, kv_heads=2, vocab_size=257, max_length=128)
    model = config.build()
    initialize(model, seed=0)
    assert count_flops(config.shape).parameters == sum(parameter.numel() for parameter in model.parameters())
    rows = generate(model.eval(), [[3, 1, 4]], Sampling(temperature=0.8, seed=3), max_tokens=5)
    assert len(rows[0]) == 5

Importing this package imports no torch. `forge_models.blocks` has the parts of a decoder, `forge_models.hf` reads and writes
folders in the Hugging Face format, `forge_models.gguf` GGUF files.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_models.components.attentions import GQA, MLA
    from forge_models.components.decoder import DecoderConfig, MTPConfig
    from forge_models.components.experts import BiasSchedule, HashConfig, MoEConfig, SigmoidTopKConfig, SoftmaxTopKConfig
    from forge_models.components.layers import GELU, GeGLU, LayerNormConfig, ReLU, ReLU2, RMSNormConfig, SwiGLU
    from forge_models.components.lora import LoRAConfig
    from forge_models.components.transformers import TransformersConfig
    from forge_models.decoder import Decoder
    from forge_models.flops import Counts, count_flops
    from forge_models.generation import Sampling, evaluating, generate
    from forge_models.initial_weights import initialize
    from forge_models.inner_values import listening, tap
    from forge_models.objectives import CrossEntropy
    from forge_models.shape import BlockContext, Rope, RouterContext
    from forge_models.speculation import Tally, speculate

__all__ = [
    "GELU",
    "GQA",
    "MLA",
    "BiasSchedule",
    "BlockContext",
    "Counts",
    "CrossEntropy",
    "Decoder",
    "DecoderConfig",
    "GeGLU",
    "HashConfig",
    "LayerNormConfig",
    "LoRAConfig",
    "MTPConfig",
    "MoEConfig",
    "RMSNormConfig",
    "ReLU",
    "ReLU2",
    "Rope",
    "RouterContext",
    "Sampling",
    "SigmoidTopKConfig",
    "SoftmaxTopKConfig",
    "SwiGLU",
    "Tally",
    "TransformersConfig",
    "count_flops",
    "evaluating",
    "generate",
    "initialize",
    "listening",
    "speculate",
    "tap",
]
__getattr__, __dir__ = lazy_exports(__name__)
