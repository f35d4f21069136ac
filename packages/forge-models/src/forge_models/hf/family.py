"""What a family of models is, as data; and the two ways between its `config.json` and a `Decoder`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from forge_core.component import Component
from forge_core.errors import ConfigError
from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import Decoder
from forge_models.components.mlps import GeGLU, SwiGLU
from forge_models.components.moe import MoE
from forge_models.components.norms import LayerNorm, RMSNorm
from forge_models.hf.config import Keys, Unsupported
from forge_models.hf.ignorable import Allowed
from forge_models.hf.mla import read_latent, write_latent
from forge_models.hf.moe import Sparse, meaning_of_experts, read_sparse, write_sparse
from forge_models.hf.rope import FULL, SLIDING, meaning, read_rope, write_rope

SIZES: Mapping[str, str] = {
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_length",
}
"""Key of a configuration -> field of `Decoder`, for plain numbers that every family has."""

MLPS: Mapping[str, Component] = {"silu": SwiGLU(), "gelu_pytorch_tanh": GeGLU(), "gelu": GeGLU(exact=True)}
"""Name of an activation -> the gated MLP with it."""

PRE_NORM: Mapping[str, str] = {
    "attention": "self_attn",
    "mlp": "mlp",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
"""Part of a block -> its name in a layer of a pre-norm family."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: what is fixed in its code, and which keys say the rest.

    Attributes:
        model_type, architecture: as `config.json` names them.
        defaults: values of keys that are absent, as in the reference implementation.
        parts: part of a block -> its name in a layer.
        placement: of the norms.
        activation: key and value(s) of the activation.
        qk_norm: norms of q and k.
        qkv_bias: biases of q, k and v: fixed in the code, or the key that gives them; None = `attention_bias` gives all four.
        mlp_bias: there is a key `mlp_bias`.
        norm_offset: added to norm weights.
        layer_norm: norms are layer norms with biases, and `layer_norm_eps` is their key.
        scaled_embedding: embedded tokens are multiplied by sqrt(dim).
        windows: `none`, `all` layers that have `sliding_window`, all when `use_sliding_window` (`switch`), or those that
            `layer_types` names.
        period: every n-th layer is global when `layer_types` is absent; None = the keys of Qwen.
        gemma: the keys `query_pre_attn_scalar` and `final_logit_softcapping` exist.
        attention_cap: the key `attn_logit_softcapping` exists.
        local_theta: base of windowed layers when absent, whose angles are never scaled; None = all layers turn alike.
        local_key: key of that base; None = only tables of both kinds of layers say it.
        theta: base of the angles when absent.
        scaled: angles may be scaled for longer sequences.
        fused: matrix of a checkpoint -> ours that it has above each other.
        partial: share of a head that turns when `partial_rotary_factor` is absent; None = the key does not exist.
        latent: attention is latent, of the DeepSeek kind.
        sparse: experts in the place of feed-forward parts.
        mtp_layers: key of the number of layers behind the last, which play no part here.
        ignores: keys without effect, with the values under which that holds; see `forge_models.hf.ignorable`.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    parts: Mapping[str, str] = field(default_factory=lambda: PRE_NORM)
    placement: Literal["pre", "post", "sandwich"] = "pre"
    activation: tuple[str, str] = ("hidden_act", "silu")
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool | str | None = None
    mlp_bias: bool = False
    norm_offset: Literal[0, 1] = 0
    layer_norm: bool = False
    scaled_embedding: bool = False
    windows: Literal["none", "all", "switch", "layers"] = "none"
    period: int | None = None
    gemma: bool = False
    attention_cap: bool = False
    local_theta: float | None = None
    local_key: str | None = None
    theta: float = 10000.0
    scaled: bool = True
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    partial: float | None = None
    latent: bool = False
    sparse: Sparse | None = None
    mtp_layers: str | None = None
    ignores: Mapping[str, Allowed] = field(default_factory=dict)


def decoder_of(family: Family, values: Mapping[str, Any], where: str, ignore: Sequence[str] = ()) -> Decoder:
    """The decoder that a configuration describes.

    Args:
        family: that it names.
        values: its keys.
        where: name of the file, for messages.
        ignore: keys to leave out although they are not understood.

    Raises:
        ConfigError: every key that is missing, wrong, or not implemented; an entry of `ignore` that is none of those.
    """
    keys = Keys(values, family.defaults, where, family.ignores, ignore)
    sizes: dict[str, Any] = {ours: keys.integer(theirs) for theirs, ours in SIZES.items()}
    eps, std = keys.number(_eps(family)), keys.number("initializer_range")
    tied = keys.boolean("tie_word_embeddings")
    key, activation = family.activation
    keys.only(key, activation)
    if key == "hidden_activation" and keys.given("hidden_act") and keys.values["hidden_act"] is not None:  # old ones give both
        keys.only("hidden_act", "gelu", activation)  # the reference reads the other key only
    mlp_bias = keys.boolean("mlp_bias") if family.mlp_bias else False
    rope = read_rope(keys, family.theta, sizes["max_length"], family.local_theta, family.local_key, family.partial)
    if rope.scaling != "none" and not family.scaled:
        keys.fault("rope_scaling", f"rope_type {rope.scaling!r} is not implemented for this family")
    heads, attention = _heads(family, keys, sizes)
    experts = None if family.sparse is None else read_sparse(family.sparse, keys)
    if family.mtp_layers is not None:
        keys.whole(family.mtp_layers)
    soft_cap = None
    if family.gemma:
        scalar = keys.number("query_pre_attn_scalar")
        attention["scale"] = None if scalar in (heads["head_dim"], 0) else scalar**-0.5
        soft_cap = keys.number("final_logit_softcapping", optional=True) or None
    if family.attention_cap:
        attention["soft_cap"] = keys.number("attn_logit_softcapping", optional=True) or None
    if rope.scaling == "dynamic":  # it is for sequences longer than the configuration says
        sizes["max_length"] = int(sizes["max_length"] * (rope.factor or 1))
    keys.finish()
    mlp = MLPS[activation]
    try:
        return Decoder(
            **sizes,
            **heads,
            rope=rope,
            tied_embeddings=tied,
            soft_cap=soft_cap,
            norm_placement=family.placement,
            embed_multiplier=sizes["dim"] ** 0.5 if family.scaled_embedding else 1.0,
            init_std=std,
            attention=MLA(**attention) if family.latent else GQA(**attention),
            mlp=replace(mlp, bias=True) if mlp_bias else mlp,
            moe=None if experts is None else MoE(**experts),
            norm=LayerNorm(eps=eps) if family.layer_norm else RMSNorm(eps=eps, offset=family.norm_offset),
        )
    except ValueError as cause:
        raise Unsupported(f"{where}: {cause}") from cause


def _heads(family: Family, keys: Keys, sizes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the decoder that say its heads, and those of its attention."""
    heads = sizes["heads"]
    if family.latent:
        attention = read_latent(keys, heads)
        return {"head_dim": attention["qk_rope_head_dim"]}, attention  # it plays no part there, but must be a legal one
    kv_heads = keys.integer("num_key_value_heads", optional=True) or heads
    head_dim = keys.integer("head_dim", optional=True) if "head_dim" in family.defaults else 0
    head_dim = head_dim or (sizes["dim"] // heads if heads else 0)
    bias = keys.boolean("attention_bias") if family.qkv_bias is None else False
    qkv_bias = keys.boolean(family.qkv_bias) if isinstance(family.qkv_bias, str) else bias or family.qkv_bias is True
    attention = {"qkv_bias": qkv_bias, "output_bias": bias, "qk_norm": family.qk_norm}
    return {"kv_heads": kv_heads, "head_dim": head_dim}, attention | _windows(family, keys, sizes["layers"])


def _eps(family: Family) -> str:
    return "layer_norm_eps" if family.layer_norm else "rms_norm_eps"


def _windows(family: Family, keys: Keys, layers: int) -> dict[str, Any]:
    """`window`, `global_every` and `global_layers` of the attention."""
    if family.windows == "none":
        return {}
    window = keys.integer("sliding_window", optional=True) or None
    if keys.given("sliding_window_size"):  # Gemma-2 configurations repeat the window under this name
        keys.only("sliding_window_size", window)
    if family.windows == "all":
        return {"window": window}
    if family.windows == "switch":
        return {"window": window if keys.boolean("use_sliding_window") else None}
    types = keys.values["layer_types"] if keys.given("layer_types") else None
    if family.period is None:  # Qwen: the window counts when it is switched on, from a layer onwards
        used, first = keys.boolean("use_sliding_window"), keys.whole("max_window_layers")
        window = window if used else None
        types = types or [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    else:
        patterns = [name for name in ("sliding_window_pattern", "_sliding_window_pattern") if keys.given(name)]
        period = keys.integer(patterns[0]) if patterns else family.period
        for name in patterns[1:]:  # transformers saves both when it was given the first
            keys.only(name, period)
        types = types or [FULL if period and (layer + 1) % period == 0 else SLIDING for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or set(types) - {FULL, SLIDING}:
        keys.fault("layer_types", f"expected {layers} times {FULL!r} or {SLIDING!r}")
        return {}
    local = tuple(layer for layer, kind in enumerate(types) if kind == SLIDING)
    if not local:
        return {}
    if window is None:
        keys.fault("sliding_window", f"is missing, but layer_types says {SLIDING!r}")
        return {}
    full = tuple(layer for layer in range(layers) if layer not in local)
    if full:
        every = full[0] + 1
        if full == tuple(range(every - 1, layers, every)):
            return {"window": window, "global_every": every}
        return {"window": window, "global_layers": full}
    return {"window": window}


def config_of(family: Family, decoder: Decoder) -> dict[str, Any]:
    """The keys of `config.json` that say what `decoder` is; `expresses` tells whether they say all of it."""
    attention, norm, mlp = decoder.shape.attention, decoder.shape.norm, decoder.shape.mlp
    written: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    written |= {"attention_dropout": 0.0, "use_cache": True, "initializer_range": decoder.init_std}
    written |= {theirs: getattr(decoder, ours) for theirs, ours in SIZES.items()} | {"intermediate_size": decoder.shape.ffn_dim}
    written["num_key_value_heads"] = decoder.shape.kv_heads
    if "head_dim" in family.defaults:
        written["head_dim"] = decoder.shape.head_dim
    written |= {_eps(family): getattr(norm, "eps", 0.0), "tie_word_embeddings": decoder.tied_embeddings}
    written |= {family.activation[0]: family.activation[1]} | write_rope(decoder.rope, family.local_key)
    if decoder.rope.scaling == "dynamic":
        written["max_position_embeddings"] = decoder.rope.original_max_length
    if family.partial is not None:
        written["partial_rotary_factor"] = decoder.rope.partial
    if family.qkv_bias is None:
        written["attention_bias"] = getattr(attention, "output_bias", False)
    elif isinstance(family.qkv_bias, str):
        written[family.qkv_bias] = getattr(attention, "qkv_bias", False)
    if family.mlp_bias:
        written["mlp_bias"] = getattr(mlp, "bias", False)
    if family.windows != "none":
        written["sliding_window"] = getattr(attention, "window", None)
    if family.windows == "switch":
        written["use_sliding_window"] = written["sliding_window"] is not None
    if family.windows == "layers":
        kinds = [FULL if window is None else SLIDING for window in windows_of(decoder)]
        written["layer_types"] = kinds
        if family.period is None:
            local = [layer for layer, kind in enumerate(kinds) if kind == SLIDING]
            written |= {"use_sliding_window": bool(local), "max_window_layers": local[0] if local else decoder.layers}
    if family.gemma:
        scale = getattr(attention, "scale", None)
        written["query_pre_attn_scalar"] = decoder.shape.head_dim if scale is None else _inverse_square(scale)
        written["final_logit_softcapping"] = decoder.soft_cap
    if family.attention_cap:
        written["attn_logit_softcapping"] = getattr(attention, "soft_cap", None)
    if family.latent:
        written |= write_latent(decoder)
    if family.sparse is not None:
        written |= write_sparse(family.sparse, decoder)
    if family.mtp_layers is not None:
        written[family.mtp_layers] = 0
    return written


def _inverse_square(scale: float) -> float:
    exact = scale**-2
    return round(exact) if round(exact) ** -0.5 == scale else exact


def windows_of(decoder: Decoder) -> tuple[int | None, ...]:
    """The window of every layer."""
    return decoder.shape.windows()[: decoder.layers]


def meaning_of(decoder: Decoder) -> dict[str, Any]:
    """What decides the logits, however it was written; equal for equal models."""
    fields = ("dim", "layers", "heads", "vocab_size", "tied_embeddings", "soft_cap", "norm_placement")
    found: dict[str, Any] = {name: getattr(decoder, name) for name in fields}
    found |= {"embed_multiplier": decoder.embed_multiplier, "residual_multiplier": decoder.residual_multiplier}
    found |= meaning_of_experts(decoder)
    if decoder.rope.scaling != "dynamic":
        found["max_length"] = decoder.max_length
    found |= {f"rope.{name}": value for name, value in meaning(decoder.rope).items()}
    attention = decoder.shape.attention
    if isinstance(attention, GQA):
        scale = attention.scale or decoder.shape.head_dim**-0.5
        found |= {"kv_heads": decoder.shape.kv_heads, "head_dim": decoder.shape.head_dim}
        found |= {"attention.scale": scale, "attention.windows": windows_of(decoder)}
        attention = replace(attention, scale=None, window=None, global_every=None, global_layers=None, core="auto")
    elif isinstance(attention, MLA):
        attention = replace(attention, core="auto", norm_eps=getattr(attention.norm(decoder.shape.context(0)), "eps", None))
    return found | {"attention": attention, "mlp": decoder.shape.mlp, "norm": decoder.shape.norm}


def misfits(family: Family, decoder: Decoder) -> list[str]:
    """What a family's `config.json` cannot say about `decoder`; empty when reading it back gives the same model."""
    try:
        again = decoder_of(family, config_of(family, decoder), family.model_type)
    except (ConfigError, Unsupported) as refusal:
        return [str(refusal)]
    wanted, got = meaning_of(decoder), meaning_of(again)
    names = dict.fromkeys((*wanted, *got))
    return [f"{name} = {wanted.get(name)!r}, it has {got.get(name)!r}" for name in names if wanted.get(name) != got.get(name)]
