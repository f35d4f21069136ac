"""What the code of a folder is told of its model: sizes with every default resolved, frequencies as numbers."""

from collections.abc import Iterator
from typing import Any

from forge_core.component import class_name
from forge_models.components.attentions import GQA
from forge_models.components.experts import SoftmaxTopKConfig
from forge_models.components.layers import RMSNormConfig
from forge_vlm.components.adapters import (
    AttentionPoolConfig,
    AveragePoolConfig,
    LinearConfig,
    MLPConfig,
    PerceiverConfig,
    PixelShuffleConfig,
)
from forge_vlm.components.encoders import Features
from forge_vlm.components.fusions import JointDecoder, MixtureOfTransformers, MoMa
from forge_vlm.components.model import VLM
from forge_vlm.hf.standalone.plain import known


def misfits(model: VLM) -> Iterator[str]:
    """One sentence for each option of the recipe that the code does not have."""
    fusion = model.chosen_fusion
    if type(fusion) not in (JointDecoder, MixtureOfTransformers, MoMa):
        yield f"fusion = {type(fusion).__name__}: the code has JointDecoder, MixtureOfTransformers and MoMa"
    elif isinstance(fusion, MoMa) and fusion.routing != "token_choice":
        yield f"fusion.routing = {fusion.routing!r}: the code has token_choice"
    if not isinstance(model.shape.attention, GQA):
        yield f"attention = {type(model.shape.attention).__name__}: the code has GQA"
    for name in ("mlp", "norm"):
        if not known(getattr(model.shape, name)):
            yield f"{name} = {type(getattr(model.shape, name)).__name__} is not in the code"
    if model.rope.scaling == "dynamic":
        yield "rope.scaling = 'dynamic': the code has frequencies that do not change"
    if model.moe is not None and isinstance(fusion, JointDecoder):
        yield "moe: the code has experts of each modality, for the fusions mot and moma"
    elif model.moe is not None:
        if not isinstance(model.moe.router, SoftmaxTopKConfig | None):
            yield f"moe.router = {type(model.moe.router).__name__}: the code has SoftmaxTopK"
        if model.moe.capacity is not None:
            yield f"moe.capacity = {model.moe.capacity}: the code drops no token"
    yield from vision_misfits(model)


def vision_misfits(model: VLM) -> Iterator[str]:
    """Those of encoder and adapter."""
    if model.images == "tokens":
        return
    if not known(model.vision):
        yield f"encoder = {type(model.vision).__name__} is not in the code"
    elif getattr(getattr(model.vision, "shape", None), "flexible", 0):
        yield f"encoder.patches = {model.vision.shape.flexible}: the code has square images"
    if not known(model.chosen_adapter):
        yield f"adapter = {class_name(model.chosen_adapter)} is not in the code"


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
