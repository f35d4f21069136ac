"""Layers in a `config.json`: windows of attention, multi-head latent attention, and experts.

DeepSeek and Cohere rotate neighboring dimensions (0, 1), (2, 3), ...; Forge rotates dimension i with i + width / 2. The rows of
rotated dimensions therefore have a different order: Forge has the even rows of the checkpoint, then its odd rows, in the queries
and keys of every head, or in the key that all heads share.

A checkpoint has one tensor per expert, while Forge stacks experts; `ExpertNames` has the names of both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from forge_models.components.attentions import MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import SigmoidTopKConfig
from forge_models.hf.config import Keys
from forge_models.shape import Losses, MoEShape

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""


def read_window(keys: Keys) -> int | None:
    """Reads the width of the window; None = every layer attends to all positions."""
    window = keys.integer("sliding_window", optional=True) or None
    if keys.given("sliding_window_size"):  # Gemma-2 configurations repeat the window under this name
        keys.only("sliding_window_size", window)
    return window


def read_local_layers(keys: Keys, window: int | None, local: Callable[[int], bool]) -> dict[str, Any]:
    """Reads `window`, `global_every` and `global_layers` of the attention. If `layer_types` is absent, `local(index)` says
    whether a layer is local."""
    layers = keys.integer("num_hidden_layers")
    types = keys.values["layer_types"] if keys.given("layer_types") else None
    types = types or [SLIDING if local(layer) else FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or set(types) - {FULL, SLIDING}:
        keys.fault("layer_types", f"expected {layers} times {FULL!r} or {SLIDING!r}")
        return {}
    if SLIDING not in types:
        return {}
    if window is None:
        keys.fault("sliding_window", f"is missing, but layer_types says {SLIDING!r}")
        return {}
    return {"window": window, **global_fields(types)}


def global_fields(types: Sequence[str]) -> dict[str, Any]:
    """Returns `global_every` or `global_layers` of attention with local layers, by the names of kinds in `layer_types`."""
    full = tuple(layer for layer, kind in enumerate(types) if kind == FULL)
    if not full:
        return {}
    every = full[0] + 1
    return {"global_every": every} if full == tuple(range(every - 1, len(types), every)) else {"global_layers": full}


def read_period(keys: Keys, period: int) -> dict[str, Any]:
    """Reads the fields of `read_local_layers` for a family whose every n-th layer is global; `period` is the default of n."""
    window = read_window(keys)
    patterns = [name for name in ("sliding_window_pattern", "_sliding_window_pattern") if keys.given(name)]
    period = keys.integer(patterns[0]) if patterns else period
    for name in patterns[1:]:  # transformers saves both if the first was set
        keys.only(name, period)
    return read_local_layers(keys, window, lambda layer: not period or (layer + 1) % period != 0)


def windows_of(decoder: DecoderConfig) -> tuple[int | None, ...]:
    """Returns the window of every layer."""
    return decoder.shape.windows()[: decoder.layers]


def write_window(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the key of `read_window`."""
    return {"sliding_window": getattr(decoder.shape.attention, "window", None)}


def write_local_layers(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of `read_local_layers`."""
    return write_window(decoder) | {"layer_types": [FULL if window is None else SLIDING for window in windows_of(decoder)]}


WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Names that are both keys of the configuration and fields of `MLA`."""

LATENT_EPS = 1e-6
"""`eps` of the norms of latents: fixed in the reference, independent of `rms_norm_eps`."""

LATENT_NAMES: Mapping[str, str] = {
    "q_a_norm": "q_a_layernorm",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
}
"""Forge's name of a part of the attention -> its name in a checkpoint, if they differ."""


INDEXER_NAMES: Mapping[str, str] = {"q_proj": "wq_b", "k_proj": "wk"}
"""Forge's name of a part of the indexer -> its name in a checkpoint, if they differ."""


def read_latent(keys: Keys, rotates: bool = True) -> dict[str, Any]:
    """Reads the fields of `MLA`, without rotary positions if the family has none; collects faults in `keys`."""
    fields: dict[str, Any] = {name: keys.integer(name) for name in WIDTHS}
    fields["q_lora_rank"] = keys.integer("q_lora_rank", optional=True) or None
    keys.only("num_key_value_heads", None, keys.integer("num_attention_heads"))
    keys.only("attention_bias", None, False)
    if rotates:
        keys.only("rope_interleave", None, True)
    for key, value in _derived(fields, rotates).items():
        if keys.given(key):
            keys.only(key, None, value)
    return fields | {"norm_eps": LATENT_EPS, "rotates": rotates}


def write_latent(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of `read_latent`; empty if the attention of `decoder` is not `MLA`."""
    attention: Any = getattr(decoder.shape.attention, "full", decoder.shape.attention)
    if not isinstance(attention, MLA):
        return {}
    fields = {name: getattr(attention, name) for name in (*WIDTHS, "q_lora_rank")}
    written = fields | _derived(fields, attention.rotates) | {"attention_bias": False}
    return written | ({"rope_interleave": True} if attention.rotates else {})


def _derived(fields: Mapping[str, Any], rotates: bool) -> dict[str, int]:
    whole = {"qk_head_dim": fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]}
    return {"head_dim": fields["qk_rope_head_dim"]} | whole if rotates else whole


def latent_rows(attention: MLA, heads: int, name: str) -> tuple[int, ...]:
    """Returns for each row of Forge's matrix `name` its row in the checkpoint's matrix; empty = the same order."""
    if not attention.rotates:
        return ()
    turning = attention.qk_rope_head_dim
    halves = [*range(0, turning, 2), *range(1, turning, 2)]
    if name in ("q_proj", "q_b_proj"):
        still = attention.qk_nope_head_dim
        head = [*range(still), *(still + row for row in halves)]
        return tuple(chain.from_iterable((start * len(head) + row for row in head) for start in range(heads)))
    if name == "kv_a_proj":
        rank = attention.kv_lora_rank
        return (*range(rank), *(rank + row for row in halves))
    return ()


def rotated_rows(width: int, heads: int) -> tuple[int, ...]:
    """Returns for each row of Forge's q or k its row in a checkpoint whose heads of `width` rotate neighboring dimensions."""
    head = [*range(0, width, 2), *range(1, width, 2)]
    return tuple(start * width + row for start in range(heads) for row in head)


TOP_K = "num_experts_per_tok"
SWITCH, AUXILIARY = "output_router_logits", "router_aux_loss_coef"
"""Keys that say whether the reference adds its load-balancing loss in training, and its weight."""


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of the tensors of experts in a checkpoint.

    Attributes:
        part: name of the layer of experts; empty if its parts are those of the block.
        matrices: Forge's name of a projection -> its name in an expert, if they differ.
        router: name of the router inside the layer.
        bias: name of the router's bias inside the layer.
        table: name of the router's table of token ids inside the layer.
        shared: name of the shared experts inside the layer.
        shared_gate: name of their gate's weight inside the layer; None: the family has none.
        fused: whether all experts of a layer are in two tensors.
        turned: whether these have inputs before outputs (Llama 4).
        fused_part: `part` of a folder in which all experts of a layer are in two tensors but usually are not.
        others: Forge's name of a further tensor of the layer -> its name, from the block on.
        latent: Forge's name of a projection to or from the space of the experts -> its name inside the layer.
        interleaved: whether they always are, with inputs before outputs, gate and up alternating, and biases (gpt-oss).
    """

    part: str = "mlp"
    matrices: Mapping[str, str] = field(default_factory=dict)
    router: str = "gate"
    bias: str | None = None
    table: str | None = None
    shared: str = "shared_experts"
    shared_gate: str | None = None
    fused: bool = False
    turned: bool = False
    fused_part: str = "mlp"
    interleaved: bool = False
    others: Mapping[str, str] = field(default_factory=dict)
    latent: Mapping[str, str] = field(default_factory=dict)


def read_experts(keys: Keys, *names: str) -> dict[str, Any]:
    """Reads `experts` and `top_k`; `names` are the possible keys of the number of experts."""
    given = [key for key in names if keys.given(key)]
    experts = keys.integer((given or names)[0])
    top_k = keys.integer(TOP_K)
    for other in given[1:]:
        keys.only(other, experts)
    return {"experts": experts, "top_k": top_k}


def period_of(sparse: Sequence[bool | None]) -> tuple[int, int] | None:
    """Returns `every` and `first_dense` of `MoEConfig` with which exactly the true layers have experts; None if there are none.
    A layer without a feed-forward layer is None, and may be either."""
    for every in range(1, len(sparse) + 1):
        for first in range(len(sparse)):
            if all(kind is None or kind == (at >= first and (at + 1) % every == 0) for at, kind in enumerate(sparse)):
                return every, first
    return None


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


MOE_SIZES = ("experts", "top_k", "shared", "shared_gate", "branch_norms", "weigh_inputs", "capacity", "ffn_dim", "latent_dim")
"""Settings of experts that determine the logits, besides the router."""


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
    sizes = {name: getattr(moe, name) for name in MOE_SIZES}
    return found | {f"moe.{name}": value for name, value in sizes.items()} | {"moe.router": router}
