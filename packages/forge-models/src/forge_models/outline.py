"""Description of a decoder for strategies before it is built (`forge_core.specs.Outline`): computed from keys, without torch."""

from dataclasses import replace
from math import gcd
from typing import Any

from forge_core.specs import Matrix, Outline
from forge_models.shape import DecoderShape


def units(shape: DecoderShape) -> dict[str, int]:
    """Returns the number of indivisible units of each logical dimension."""
    moe = shape.moe
    found = {
        "embed": shape.dim,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "ffn": shape.ffn_dim,
        "vocab": shape.vocab_size,
    }
    if moe is None:
        return found
    return found | {"ffn": gcd(shape.ffn_dim if _dense(shape) else 0, moe.ffn_dim), "expert": moe.experts}


def whole_rows(shape: DecoderShape) -> tuple[str, ...]:
    """Returns the settings, other than attention, that need whole rows at once."""
    ropes = (shape.rope.of_layer(window is not None) for window in shape.windows())
    dynamic = any(rope.scaling == "dynamic" for rope in ropes) if shape.rope.scaling == "dynamic" else False
    reads = ("model.rope.scaling = 'dynamic', which reads how long each document is",) if dynamic else ()
    return (*reads, *whole_stream(shape))


def whole_stream(shape: DecoderShape) -> tuple[str, ...]:
    """Returns the settings that need whole sequences of the residual stream."""
    reasons = {
        "sequence": "which counts the loads of a row (losses.global_batch is the same in every layout)",
        "pooled": "which joins the loads of rows over all layers",
    }
    moe = shape.moe
    return (
        ()
        if moe is None
        else tuple(f"model.moe.losses.{name}, {why}" for name, why in reasons.items() if getattr(moe.losses, name))
    )


def outline(shape: DecoderShape, expert_key: str = "model.moe.ffn_dim") -> Outline:
    """Returns the outline of a decoder. `expert_key` is the recipe's key of the width of experts."""
    shared = [("model.vocab_size", shape.vocab_size)]
    if _dense(shape):
        shared.append(("model.ffn_dim", shape.ffn_dim))
    moe = shape.moe
    if moe is not None and moe.shared:
        shared.append((expert_key, moe.shared * moe.ffn_dim))
    keys = {"heads": "model.heads", "kv_heads": "model.kv_heads", "blocks": "model.layers", "capped": "model.attention.soft_cap"}
    hidden, experts = matrices(shape) if declares_matrices(shape) else (None, None)
    return Outline(
        blocks=shape.layers,
        units=units(shape),
        keys=keys,
        shared=tuple(shared),
        capped=getattr(shape.attention, "soft_cap", None) is not None,
        whole_rows=whole_rows(shape),
        whole_stream=whole_stream(shape),
        mtp_depth=shape.mtp_depth,
        matrices=hidden,
        experts=experts,
        elements=elements(shape),
    )


def elements(shape: DecoderShape) -> int:
    """Returns the number of parameters without norms, biases and routers, for parts of this distribution; builds no module."""
    attention: Any = shape.attention
    mlp: Any = shape.mlp
    if not hasattr(attention, "matrices"):
        return 0
    each = sum(_size(matrix) for matrix in attention.matrices(shape.context(0)).values())
    wide = (3 if getattr(mlp, "gated", True) else 2) * shape.dim
    moe, layers = shape.moe, shape.blocks
    sparse = 0 if moe is None else max(0, layers // moe.every - moe.first_dense // moe.every)
    feed_forward = wide * shape.ffn_dim * (layers - sparse)
    if moe is not None:
        feed_forward += wide * moe.ffn_dim * (moe.experts + moe.shared) * sparse
    tables = shape.vocab_size * shape.dim * (1 if shape.tied_embeddings else 2)
    return tables + layers * each + feed_forward


def declares_matrices(shape: DecoderShape) -> bool:
    """Whether attention and MLP declare their linear layers."""
    return hasattr(shape.attention, "matrices") and hasattr(shape.mlp, "matrices")


def matrices(shape: DecoderShape) -> tuple[dict[str, Matrix], dict[str, Matrix]]:
    """Returns hidden matrices by path, and the matrices of one expert by parameter; routers are left out."""
    attention: Any = shape.attention
    mlp: Any = shape.mlp
    found: dict[str, Matrix] = {}
    experts: dict[str, Matrix] = {}
    for layer in range(shape.blocks):
        block, context = f"blocks.{layer}", shape.context(layer)
        if layer >= shape.layers:
            depth = f"mtp.depths.{layer - shape.layers + 1}"
            found[f"{depth}.projection"] = Matrix((shape.dim, 2 * shape.dim), ("embed", None))
            block = f"{depth}.block"
        found |= {f"{block}.attention.{name}": matrix for name, matrix in attention.matrices(context).items()}
        moe = shape.moe
        if moe is None or not moe.has(layer):
            found |= {f"{block}.mlp.{name}": matrix for name, matrix in mlp.matrices(context).items()}
            continue
        if moe.shared:
            shared = mlp.matrices(replace(context, ffn_dim=moe.shared * moe.ffn_dim))
            found |= {f"{block}.mlp.shared.{name}": matrix for name, matrix in shared.items()}
        stacked = mlp.matrices(replace(context, ffn_dim=moe.ffn_dim))
        experts |= {f"{block}.mlp.experts.{name}": matrix for name, matrix in stacked.items()}
    return found, experts


def _dense(shape: DecoderShape) -> bool:
    """Whether any block has a feed-forward layer without experts."""
    return not all(shape.has_experts(layer) for layer in range(shape.blocks))


def _size(matrix: Matrix) -> int:
    return matrix.shape[0] * matrix.shape[1]
