"""Folders of `forge_standalone` as earlier versions wrote them, with code of their own: `modeling_forge.py`.

That code is a second description of every such model, in plain PyTorch and without Forge, so logits are compared with its own. It
is told sizes with every default resolved, and frequencies as numbers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from forge_core.protocols.weights import Weights
from forge_models.components.attentions import GQA
from forge_models.components.layers import RMSNormConfig
from forge_models.hf.converter import HfConverter
from forge_vlm.components.adapters import (
    AttentionPoolConfig,
    AveragePoolConfig,
    LinearConfig,
    MLPConfig,
    PerceiverConfig,
    PixelShuffleConfig,
)
from forge_vlm.components.encoders import Features
from forge_vlm.components.fusions import JointDecoder, MixtureOfTransformers
from forge_vlm.components.model import VLM


def write_earlier(folder: Path, weights: Weights) -> None:
    """Writes a folder as earlier versions did: with the sizes of the model, and with the code that runs them."""
    HfConverter(family="forge_standalone", max_shard_bytes=20_000).build().write(folder, weights)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    config |= {
        "architectures": ["ForgeForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_forge.ForgeConfig", "AutoModelForCausalLM": "modeling_forge.ForgeForCausalLM"},
        "model": shape_of(weights.model),
    }
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copyfile(Path(__file__).with_name("modeling_forge.py"), folder / "modeling_forge.py")


def shape_of(model: VLM) -> dict[str, Any]:
    """The table `model` of `config.json` for a model without misfits."""
    shape, fusion = model.shape, model.chosen_fusion
    attention, mlp, moe = shape.attention, shape.mlp, shape.moe
    assert isinstance(attention, GQA)
    windows = shape.windows()
    router: Any = None if moe is None else moe.router
    experts = moe and {
        "layers": [shape.has_experts(layer) for layer in range(shape.layers)],
        "count": moe.experts,
        "top_k": moe.top_k,
        "shared": moe.shared,
        "ffn_dim": moe.ffn_dim,
        "normalize": router.normalize,
    }
    names = model.modality_ids.names
    return {
        **{name: getattr(shape, name) for name in ("dim", "layers", "ffn_dim", "vocab_size", "max_length", "soft_cap")},
        **{name: getattr(shape, name) for name in ("norm_placement", "embed_multiplier", "residual_multiplier")},
        "tied": shape.tied_embeddings,
        "norm": _norm(shape.norm),
        "attention": {
            **{name: getattr(attention, name) for name in ("qkv_bias", "output_bias", "qk_norm", "soft_cap")},
            **{name: getattr(shape, name) for name in ("heads", "kv_heads", "head_dim")},
            "scale": attention.scale or shape.head_dim**-0.5,
        },
        "windows": list(windows),
        "rotary": [_rotary(model, local) for local in (False, True)],
        "mlp": _mlp(mlp),
        "experts": experts,
        "untied": isinstance(fusion, MixtureOfTransformers),
        "modalities": [] if isinstance(fusion, JointDecoder) else list(names),
        "ranges": [list(model.modality_ids.ranges[name]) for name in names[1:]],
        "image_attention": getattr(fusion, "image_attention", "causal"),
        "image_token": model.placeholder,
        "per_image": model.per_image,
        **vision_of(model),
    }


def vision_of(model: VLM) -> dict[str, Any]:
    """Its keys `encoder` and `adapter`; None for a model whose images are tokens."""
    if model.images == "tokens":
        return {"encoder": None, "adapter": None}
    return {"encoder": _encoder(model.vision), "adapter": _adapter(model)}


def _norm(norm: Any) -> dict[str, Any]:
    if isinstance(norm, RMSNormConfig):
        return {"eps": norm.eps, "offset": norm.offset, "centered": False, "bias": False}
    return {"eps": norm.eps, "offset": 0, "centered": True, "bias": norm.bias}


def _mlp(mlp: Any) -> dict[str, Any]:
    return {name: getattr(mlp, name) for name in ("activation", "gated", "bias")}


def _rotary(model: VLM, local: bool) -> dict[str, Any]:
    import torch

    from forge_models.blocks.rope import attention_factor, frequencies_of

    rope = model.rope.of_layer(local)
    width = int(model.shape.head_dim * rope.partial)
    return {"frequencies": frequencies_of(rope, width, torch.device("cpu")).tolist(), "factor": attention_factor(rope)}


def _encoder(encoder: Any) -> dict[str, Any]:
    if isinstance(encoder, Features):
        return {"features": [encoder.count, encoder.dim]}
    shape = encoder.shape
    names = ("image_size", "patch_size", "channels", "dim", "blocks", "heads", "ffn_dim", "eps", "positions", "class_token")
    names += ("class_feature", "patch_bias", "qkv_bias", "entry_norm", "layer_scale", "last_norm")
    activation = "silu" if shape.gated else shape.activation
    mlp = {"activation": activation, "gated": shape.gated, "bias": True}
    return {name: getattr(shape, name) for name in names} | {"outputs": list(shape.outputs), "mlp": mlp}


def _adapter(model: VLM) -> dict[str, Any]:
    adapter: Any = model.chosen_adapter
    width, dim = model.vision.width, model.dim
    if isinstance(adapter, PerceiverConfig):
        ffn_dim = 4 * dim if adapter.ffn_dim is None else adapter.ffn_dim
        sizes = {"latents": adapter.latents, "layers": adapter.layers, "heads": adapter.heads, "ffn_dim": ffn_dim}
        return {"kind": "perceiver", "widths": [width, dim], **sizes}
    hidden = 0 if isinstance(adapter, LinearConfig) else adapter.hidden
    inner = getattr(adapter, "hidden_dim", None) or dim
    inputs = width * adapter.factor**2 if isinstance(adapter, PixelShuffleConfig) else width
    made = {"widths": [inputs, *[inner] * hidden, dim], "bias": adapter.bias}
    if isinstance(adapter, MLPConfig | LinearConfig):
        return {"kind": "projection", **made}
    if isinstance(adapter, PixelShuffleConfig):
        return {"kind": "shuffle", "window": adapter.factor, **made}
    kind = {AveragePoolConfig: "average", AttentionPoolConfig: "attention"}[type(adapter)]
    return {"kind": kind, "window": adapter.window, **made, **({"heads": adapter.heads} if kind == "attention" else {})}
