"""What a decoder says of itself before it is built (`forge_core.specs.Outline`): arithmetic on its keys, without torch."""

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any

from forge_core.specs import Matrix, Outline

if TYPE_CHECKING:
    from forge_models.components.decoder import Decoder


def units(config: "Decoder") -> dict[str, int]:
    """Indivisible units per logical dimension."""
    moe = config.moe
    found = {
        "embed": config.dim,
        "heads": config.heads,
        "kv_heads": config.resolved_kv_heads,
        "ffn": config.resolved_ffn_dim,
        "vocab": config.vocab_size,
    }
    if moe is None:
        return found
    return found | {"ffn": gcd(config.resolved_ffn_dim if _dense(config) else 0, _width(config)), "expert": moe.experts}


def whole_rows(config: "Decoder") -> tuple[str, ...]:
    """What makes it see whole rows at once, besides attention."""
    attention: Any = config.resolved_attention
    window = getattr(attention, "window_at", lambda _: None)
    ropes = (config.rope.of_layer(window(layer) is not None) for layer in range(_layers(config)))
    dynamic = any(rope.scaling == "dynamic" for rope in ropes) if config.rope.scaling == "dynamic" else False
    reads = ("model.rope.scaling = 'dynamic', which reads how long each document is",) if dynamic else ()
    return (*reads, *whole_stream(config))


def whole_stream(config: "Decoder") -> tuple[str, ...]:
    """What makes it see whole sequences of the stream."""
    reasons = {
        "sequence": "which counts the loads of a row (losses.global_batch is the same in every layout)",
        "pooled": "which joins the loads of rows over all layers",
    }
    moe = config.moe
    return (
        ()
        if moe is None
        else tuple(f"model.moe.losses.{name}, {why}" for name, why in reasons.items() if getattr(moe.losses, name))
    )


def outline(config: "Decoder") -> Outline:
    """All of it."""
    shared = [("model.vocab_size", config.vocab_size)]
    if _dense(config):
        shared.append(("model.ffn_dim", config.resolved_ffn_dim))
    moe = config.moe
    if moe is not None and moe.shared:
        shared.append(("model.moe.ffn_dim" if moe.ffn_dim is not None else "model.ffn_dim", moe.shared * _width(config)))
    keys = {"heads": "model.heads", "kv_heads": "model.kv_heads", "blocks": "model.layers", "capped": "model.attention.soft_cap"}
    matrices, experts = _matrices(config)
    return Outline(
        blocks=config.layers,
        units=units(config),
        keys=keys,
        shared=tuple(shared),
        capped=getattr(config.resolved_attention, "soft_cap", None) is not None,
        whole_rows=whole_rows(config),
        whole_stream=whole_stream(config),
        mtp_depth=0 if config.mtp is None else config.mtp.depth,
        matrices=matrices,
        experts=experts,
        elements=elements(config),
    )


def elements(config: "Decoder") -> int:
    """Parameters in all but norms, biases and routers, for parts of this distribution; by arithmetic, however many there are."""
    attention: Any = config.resolved_attention
    mlp: Any = config.resolved_mlp
    if not hasattr(attention, "matrices"):
        return 0
    each = sum(_size(matrix) for matrix in attention.matrices(config.context(0)).values())
    wide = (3 if getattr(mlp, "gated", True) else 2) * config.dim
    moe, layers = config.moe, _layers(config)
    sparse = 0 if moe is None else max(0, layers // moe.every - moe.first_dense // moe.every)
    feed_forward = wide * config.resolved_ffn_dim * (layers - sparse)
    if moe is not None:
        feed_forward += wide * _width(config) * (moe.experts + moe.shared) * sparse
    tables = config.vocab_size * config.dim * (1 if config.tied_embeddings else 2)
    return tables + layers * each + feed_forward


def _matrices(config: "Decoder") -> tuple[dict[str, Matrix] | None, dict[str, Matrix] | None]:
    """Hidden matrices by path, and those of one expert by parameter."""
    attention: Any = config.resolved_attention
    mlp: Any = config.resolved_mlp
    if not (hasattr(attention, "matrices") and hasattr(mlp, "matrices")):
        return None, None
    found: dict[str, Matrix] = {}
    experts: dict[str, Matrix] = {}
    for layer in range(_layers(config)):
        block, context = f"blocks.{layer}", config.context(layer)
        if layer >= config.layers:
            depth = f"mtp.depths.{layer - config.layers + 1}"
            found[f"{depth}.projection"] = Matrix((config.dim, 2 * config.dim), ("embed", None))
            block = f"{depth}.block"
        found |= {f"{block}.attention.{name}": matrix for name, matrix in attention.matrices(context).items()}
        moe = config.moe
        if moe is None or not moe.has(layer):
            found |= {f"{block}.mlp.{name}": matrix for name, matrix in mlp.matrices(context).items()}
            continue
        width = _width(config)
        if moe.shared:
            beside = mlp.matrices(replace(context, ffn_dim=moe.shared * width))
            found |= {f"{block}.mlp.shared.{name}": matrix for name, matrix in beside.items()}
        stacked = mlp.matrices(replace(context, ffn_dim=width))
        experts |= {f"{block}.mlp.experts.{name}": matrix for name, matrix in stacked.items()}
    return found, experts


def _layers(config: "Decoder") -> int:
    """Blocks, those of MTP modules included."""
    return config.layers + (0 if config.mtp is None else config.mtp.depth)


def _dense(config: "Decoder") -> bool:
    """Whether any block has a plain feed-forward part."""
    moe = config.moe
    return moe is None or not all(moe.has(layer) for layer in range(_layers(config)))


def _width(config: "Decoder") -> int:
    """Hidden width of one expert."""
    moe = config.moe
    return config.resolved_ffn_dim if moe is None or moe.ffn_dim is None else moe.ffn_dim


def _size(matrix: Matrix) -> int:
    return matrix.shape[0] * matrix.shape[1]
