"""Experts in a `config.json`, and under which names a checkpoint keeps them: one tensor per expert, ours are stacked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from forge_models.components.decoder import Decoder
from forge_models.components.routers import SigmoidTopK, SoftmaxTopK
from forge_models.hf.config import Keys
from forge_models.shape import Losses

TOP_K = "num_experts_per_tok"
SWITCH, AUXILIARY = "output_router_logits", "router_aux_loss_coef"
"""Whether the reference adds its loss of balance in training, and its weight."""


def _same() -> Mapping[str, str]:
    return MappingProxyType({"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"})


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """How a family says its experts.

    Attributes:
        experts: keys of their number; the first is written.
        width: key of the hidden width of one; None = `intermediate_size`.
        router: what chooses.
        normalize: key that says whether chosen weights are divided by their sum; None = they are.
        layers: which layers have experts: `all`, Qwen's two keys, or all but the first ones.
        shared: key of the number of shared experts.
        part: name of the layer of experts.
        matrices: our projection -> its name in an expert.
        bias: name, inside of the layer, of the bias of the choice.
        fixed: keys of things that the code fixes, with what they may say.
        fused: all experts of a layer are in two tensors.
        auxiliary: the reference balances experts by `router_aux_loss_coef` where `output_router_logits` is true.
    """

    experts: tuple[str, ...]
    width: str | None = None
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalize: str | None = None
    layers: Literal["all", "step", "first"] = "all"
    shared: str | None = None
    part: str = "mlp"
    matrices: Mapping[str, str] = field(default_factory=_same)
    bias: str | None = None
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fused: bool = False
    auxiliary: bool = False


def read_sparse(sparse: Sparse, keys: Keys) -> dict[str, Any]:
    """The fields of `MoE` that a configuration says; faults are left in `keys`."""
    given = [key for key in sparse.experts if keys.given(key)]
    fields: dict[str, Any] = {"experts": keys.integer((given or list(sparse.experts))[0]), "top_k": keys.integer(TOP_K)}
    for other in given[1:]:
        keys.only(other, fields["experts"])
    if sparse.width is not None:
        fields["ffn_dim"] = keys.integer(sparse.width)
    if sparse.shared is not None:
        fields["shared"] = keys.integer(sparse.shared)
    if sparse.layers == "step":
        fields["every"] = keys.integer("decoder_sparse_step")
        dense = keys.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
            keys.fault("mlp_only_layers", f"expected a list of layers, not {dense!r}")
            dense = []
        if dense != list(range(len(dense))):
            keys.fault("mlp_only_layers", f"{dense} is not implemented; only the first layers may be dense")
        fields["first_dense"] = len(dense)
    elif sparse.layers == "first":
        fields["first_dense"] = keys.whole("first_k_dense_replace")
    normalize = True if sparse.normalize is None else keys.boolean(sparse.normalize)
    if sparse.router == "softmax":
        fields["router"] = SoftmaxTopK(normalize=normalize)
    else:
        groups, kept, scaling = keys.integer("n_group"), keys.integer("topk_group"), keys.number("routed_scaling_factor")
        if groups and 0 < kept <= groups and scaling:
            fields["router"] = SigmoidTopK(normalize=normalize, scaling=scaling, n_group=groups, topk_group=kept)
        elif groups and kept > groups:
            keys.fault("topk_group", f"{kept} is more than n_group {groups}")
    for key, allowed in sparse.fixed.items():
        if keys.given(key):
            keys.only(key, *allowed)
    if sparse.auxiliary:
        weight, used = keys.not_negative(AUXILIARY), keys.boolean(SWITCH)
        fields["losses"] = Losses(pooled=weight if used else 0.0)
    return fields


def unused_loss(sparse: Sparse, values: Mapping[str, Any]) -> str | None:
    """A sentence about a loss whose weight is given, but which the reference does not use."""
    if not sparse.auxiliary or not values.get(AUXILIARY) or values.get(SWITCH):
        return None
    return (
        f"{AUXILIARY} {values[AUXILIARY]} is not in effect, since {SWITCH} is not true; to train with it, set "
        f"model.moe.losses.pooled = {values[AUXILIARY]}"
    )


def write_sparse(sparse: Sparse, decoder: Decoder) -> dict[str, Any]:
    """The keys that say the experts of `decoder`, as far as the family can; `intermediate_size` among them."""
    moe = decoder.shape.moe
    if moe is None:
        return {}
    written: dict[str, Any] = {sparse.experts[0]: moe.experts, TOP_K: moe.top_k}
    if sparse.auxiliary:
        written |= {SWITCH: moe.losses.pooled > 0, AUXILIARY: moe.losses.pooled}
    written |= {"intermediate_size": moe.ffn_dim} if sparse.width is None else {sparse.width: moe.ffn_dim}
    written |= {} if sparse.shared is None else {sparse.shared: moe.shared}
    if sparse.layers == "step":
        written |= {"decoder_sparse_step": moe.every, "mlp_only_layers": list(range(moe.first_dense))}
    elif sparse.layers == "first":
        written["first_k_dense_replace"] = moe.first_dense
    router = moe.router
    if sparse.normalize is not None:
        written[sparse.normalize] = getattr(router, "normalize", True)
    if isinstance(router, SigmoidTopK) and sparse.router == "sigmoid":
        written |= {"n_group": router.n_group, "topk_group": router.groups_kept}
        written["routed_scaling_factor"] = router.scaling
    return written | {key: allowed[0] for key, allowed in sparse.fixed.items()}


def meaning_of_experts(decoder: Decoder) -> dict[str, Any]:
    """What of the experts decides the logits; equal for equal models."""
    moe = decoder.shape.moe
    layers = tuple(decoder.shape.has_experts(layer) for layer in range(decoder.layers))
    found: dict[str, Any] = {"moe.layers": layers if any(layers) else ()}
    if not all(layers):
        found["ffn_dim"] = decoder.shape.ffn_dim
    if moe is None:
        return found
    router = moe.router
    if isinstance(router, SigmoidTopK):
        router = replace(router, topk_group=router.groups_kept, bias_rate=0.0, bias_schedule="constant", bias_steps=None)
    sizes = {name: getattr(moe, name) for name in ("experts", "top_k", "shared", "capacity", "ffn_dim")}
    return found | {f"moe.{name}": value for name, value in sizes.items()} | {"moe.router": router}
