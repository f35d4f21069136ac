"""Experts in a `config.json`, and their names in a checkpoint, which has one tensor per expert while Forge stacks them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import SigmoidTopKConfig
from forge_models.hf.config import Keys
from forge_models.shape import Losses, MoEShape

TOP_K = "num_experts_per_tok"
SWITCH, AUXILIARY = "output_router_logits", "router_aux_loss_coef"
"""Keys that say whether the reference adds its load-balancing loss in training, and its weight."""


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of the tensors of experts in a checkpoint.

    Attributes:
        part: name of the layer of experts.
        matrices: Forge's name of a projection -> its name in an expert, if they differ.
        bias: name of the router's bias inside the layer.
        fused: whether all experts of a layer are in two tensors.
    """

    part: str = "mlp"
    matrices: Mapping[str, str] = field(default_factory=dict)
    bias: str | None = None
    fused: bool = False


def read_experts(keys: Keys, *names: str) -> dict[str, Any]:
    """Reads `experts` and `top_k`; `names` are the possible keys of the number of experts."""
    given = [key for key in names if keys.given(key)]
    experts = keys.integer((given or names)[0])
    top_k = keys.integer(TOP_K)
    for other in given[1:]:
        keys.only(other, experts)
    return {"experts": experts, "top_k": top_k}


def read_losses(keys: Keys) -> Losses:
    """Reads the load-balancing loss of families that have one; the reference adds it if `output_router_logits` is true."""
    weight, used = keys.not_negative(AUXILIARY), keys.boolean(SWITCH)
    return Losses(pooled=weight if used else 0.0)


def unused_loss(values: Mapping[str, Any]) -> str | None:
    """Returns a note if the weight of the loss is set but the reference does not use the loss; else None."""
    if not values.get(AUXILIARY) or values.get(SWITCH):
        return None
    return (
        f"{AUXILIARY} {values[AUXILIARY]} is not in effect, since {SWITCH} is not true; to train with it, set "
        f"model.moe.losses.pooled = {values[AUXILIARY]}"
    )


def write_experts(moe: MoEShape, number: str) -> dict[str, Any]:
    """Returns the keys of `read_experts`; `number` is the key of the number of experts."""
    return {number: moe.experts, TOP_K: moe.top_k}


def write_losses(moe: MoEShape) -> dict[str, Any]:
    """Returns the keys of `read_losses`."""
    return {SWITCH: moe.losses.pooled > 0, AUXILIARY: moe.losses.pooled}


def normalized(moe: MoEShape) -> bool:
    """Whether the weights of the chosen experts are divided by their sum."""
    return getattr(moe.router, "normalize", True)


def meaning_of_experts(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the settings of experts that determine the logits; equal for equal models."""
    moe = decoder.shape.moe
    layers = tuple(decoder.shape.has_experts(layer) for layer in range(decoder.layers))
    found: dict[str, Any] = {"moe.layers": layers if any(layers) else ()}
    if not all(layers):
        found["ffn_dim"] = decoder.shape.ffn_dim
    if moe is None:
        return found
    router = moe.router
    if isinstance(router, SigmoidTopKConfig):
        router = replace(router, topk_group=router.groups_kept, bias_rate=0.0, bias_schedule="constant", bias_steps=None)
    sizes = {name: getattr(moe, name) for name in ("experts", "top_k", "shared", "capacity", "ffn_dim")}
    return found | {f"moe.{name}": value for name, value in sizes.items()} | {"moe.router": router}
