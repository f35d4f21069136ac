"""Nemotron-H (NVIDIA, 2025) and Nemotron 3: Mamba-2, attention without positions, feed-forward layers and experts.

A checkpoint has a layer, with its own norm, for each of these parts. A block of Forge is a Mamba-2 or attention layer and the
feed-forward layer or the experts behind it, if there are any.
"""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.components.layers import ReLU2, RMSNormConfig
from forge_models.components.recurrent import Hybrid, RecurrentLayer
from forge_models.components.state_space import Mamba2
from forge_models.hf.config import ANY_VALUE, Keys
from forge_models.hf.families.deepseek import read_sigmoid_router, write_sigmoid_router
from forge_models.hf.family import Family
from forge_models.hf.layers import FULL, ExpertNames, normalized, period_of, read_experts, write_experts
from forge_models.hf.recurrent import LINEAR, state_space_places

MLP, MOE = "mlp", "moe"
TYPES, PATTERN = "layers_block_type", "hybrid_override_pattern"
"""Keys of the kinds of layers: as a list, and as one letter each."""
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
OLDER = {"mamba": LINEAR, "attention": FULL}
"""Older names of kinds in the list."""
EXPERTS_WIDTH, SHARED_WIDTH = "moe_intermediate_size", "moe_shared_expert_intermediate_size"

SIZES = {"hidden_size": "dim", "num_attention_heads": "heads", "vocab_size": "vocab_size", "head_dim": "head_dim"}
SIZES |= {"intermediate_size": "ffn_dim", "max_position_embeddings": "max_length"}
"""Key -> field of `DecoderConfig`."""
STATES = {"mamba_num_heads": "heads", "mamba_head_dim": "head_dim", "n_groups": "groups", "ssm_state_size": "state_dim"}
STATES |= {"conv_kernel": "conv_width"}
"""Key -> field of `Mamba2`."""


class NemotronH(Family):
    """Nemotron-H and Nemotron 3. Its MTP modules do not affect logits and are not read."""

    model_type = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "sliding_window": None,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        EXPERTS_WIDTH: 7688,
        SHARED_WIDTH: 7688,
        "moe_latent_size": None,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    }
    ignores: ClassVar = dict.fromkeys(
        # settings of initial weights, of kernels, of their caches and of MTP, and keys that the reference does not read
        (
            *("expand", "chunk_size", "time_step_max", "time_step_floor", "time_step_limit", "time_step_rank"),
            *("rescale_prenorm_residual", "mamba_proj_bias", "mamba_ssm_cache_dtype", "use_mamba_kernels", "rms_norm_eps"),
            *("moe_shared_expert_overlap", "num_logits_to_keep", "num_nextn_predict_layers", "mtp_layers_block_type"),
            *("mtp_hybrid_override_pattern", "output_router_logits", "residual_in_fp32", "attention_head_dim"),
        ),
        ANY_VALUE,
    )
    parts: ClassVar = {"attention": "mixer", "mlp": "mixer", "attention_norm": "norm", "mlp_norm": "norm"}
    outside: ClassVar = {"embed.weight": "backbone.embeddings.weight", "norm.weight": "backbone.norm_f.weight"}
    layers = "backbone.layers"
    experts: ClassVar = ExpertNames(
        part="mixer",
        bias="gate.e_score_correction_bias",
        latent={"latent_in": "fc1_latent_proj", "latent_out": "fc2_latent_proj"},
    )
    recurrent: ClassVar = "mixer"
    recurrent_parts: ClassVar[tuple[type[RecurrentLayer], ...]] = (Mamba2,)
    recurrent_places: ClassVar = staticmethod(state_space_places)
    mtp_modules: ClassVar = ("mtp.",)

    def read(self, keys: Keys) -> dict[str, Any]:
        fields: dict[str, Any] = {ours: keys.integer(theirs) for theirs, ours in SIZES.items()}
        fields["kv_heads"] = keys.integer("num_key_value_heads", optional=True) or fields["heads"]
        fields |= {"norm": RMSNormConfig(eps=keys.number("layer_norm_epsilon")), "init_std": keys.number("initializer_range")}
        fields["tied_embeddings"] = bool(keys.only("tie_word_embeddings", False))  # the reference never ties
        for key, value in {"attention_bias": False, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}.items():
            keys.only(key, value)
        keys.only("sliding_window", None)
        fields["mlp"] = ReLU2(bias=keys.boolean("mlp_bias"))
        sizes: dict[str, Any] = {ours: keys.integer(theirs) or 1 for theirs, ours in STATES.items()}
        recurrent = keys.make(
            Mamba2,
            **sizes,
            conv_bias=keys.boolean("use_conv_bias"),
            bias=keys.boolean("use_bias"),
            step_min=keys.not_negative("time_step_min"),
            norm_eps=fields["norm"].eps,
        )
        types = _types(keys)
        fields |= _blocks(keys, types, recurrent)
        fields["moe"] = self._experts(keys, types)
        return fields

    def _experts(self, keys: Keys, types: list[str]) -> MoEConfig | None:
        if MOE not in types:
            for key in ("n_routed_experts", "num_experts_per_tok", EXPERTS_WIDTH, SHARED_WIDTH, "n_shared_experts"):
                keys.get(key)
            for key in ("moe_latent_size", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"):
                keys.get(key)
            return None
        keys.only("n_shared_experts", 1)  # the reference has one, of a width of its own
        keys.only("mlp_bias", False)  # its experts have no biases, but its shared expert would have
        width, shared = keys.integer(EXPERTS_WIDTH), keys.integer(SHARED_WIDTH)
        if width and shared % width:
            keys.fault(SHARED_WIDTH, f"{shared} is not a multiple of {EXPERTS_WIDTH} {width}, which is not implemented")
        where = period_of([None if kind is None else kind == MOE for kind in _feed_forward(types)])
        if where is None:
            keys.fault(TYPES, "mixes feed-forward layers and experts in a way that is not implemented; they must alternate")
            where = (1, 0)
        return keys.make(
            MoEConfig,
            **read_experts(keys, "n_routed_experts", "num_local_experts"),
            ffn_dim=width,
            latent_dim=keys.integer("moe_latent_size", optional=True) or None,
            shared=shared // width if width else 0,
            every=where[0],
            first_dense=where[1],
            router=read_sigmoid_router(keys),
        )

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        shape, moe = decoder.shape, decoder.shape.moe
        written: dict[str, Any] = {theirs: getattr(shape, ours) for theirs, ours in SIZES.items()}
        written |= {"num_key_value_heads": shape.kv_heads, "layer_norm_epsilon": getattr(shape.norm, "eps", 0.0)}
        written |= {"initializer_range": shape.init_std, "tie_word_embeddings": False, "mlp_hidden_act": "relu2"}
        written |= {"attention_dropout": 0.0, "use_cache": True, "attention_bias": False, "sliding_window": None}
        written["mlp_bias"] = getattr(shape.mlp, "bias", False)
        recurrent = getattr(shape.attention, "recurrent", None)
        if isinstance(recurrent, Mamba2):
            part = recurrent.resolved(shape.context(0))
            written |= {theirs: getattr(part, ours) for theirs, ours in STATES.items()} | {"mamba_hidden_act": "silu"}
            written |= {"use_conv_bias": part.conv_bias, "use_bias": part.bias, "time_step_min": part.step_min}
        written[TYPES] = list(_layers(decoder))
        if moe is not None:
            written |= write_experts(moe, "n_routed_experts") | write_sigmoid_router(moe.router)
            written |= {EXPERTS_WIDTH: moe.ffn_dim, SHARED_WIDTH: moe.shared * moe.ffn_dim, "n_shared_experts": 1}
            written |= {"norm_topk_prob": normalized(moe), "moe_latent_size": moe.latent_dim}
        return written

    def layer_of(self, decoder: DecoderConfig, block: int, part: str) -> int:
        """See `Family.layer_of`; a block has one layer, or two with a feed-forward layer."""
        before = sum(2 if decoder.shape.has_feed_forward(earlier) else 1 for earlier in range(block))
        return before + (1 if part.startswith("mlp") else 0)


def _types(keys: Keys) -> list[str]:
    """Reads the kind of every layer; empty after a fault."""
    types: Any = keys.values[TYPES] if keys.given(TYPES) else None
    count = keys.integer("num_hidden_layers") if keys.given("num_hidden_layers") else 0
    pattern: Any = keys.values[PATTERN] if keys.given(PATTERN) else None
    if types is None and isinstance(pattern, str) and pattern and not set(pattern) - set(LETTERS):
        types = [LETTERS[letter] for letter in pattern]
    elif types is None:
        keys.fault(PATTERN if pattern is not None else TYPES, f"expected one of {', '.join(LETTERS)} for each layer, or {TYPES}")
        return []
    known = (*LETTERS.values(), *OLDER)
    if not isinstance(types, list) or not types or any(type_ not in known for type_ in types):
        keys.fault(TYPES, f"expected a list of {', '.join(LETTERS.values())}")
        return []
    types = [OLDER.get(type_, type_) for type_ in types]
    letters = "".join(next(letter for letter, kind in LETTERS.items() if kind == type_) for type_ in types)
    if pattern not in (None, letters):
        keys.fault(PATTERN, f"{pattern!r} differs from {TYPES}, whose letters are {letters}; keep one of them")
    if count not in (0, len(types)):
        keys.fault("num_hidden_layers", f"differs from the {len(types)} layers that are listed; make them equal")
    return types


def _blocks(keys: Keys, types: list[str], recurrent: Mamba2 | None) -> dict[str, Any]:
    """Returns the number of blocks, those without a feed-forward layer, and the attention."""
    kinds: list[str] = []
    alone: list[int] = []
    for at, type_ in enumerate(types):
        if type_ in (LINEAR, FULL):
            kinds.append("full" if type_ == FULL else "recurrent")
            alone.append(len(kinds) - 1)
        elif not alone or alone[-1] != len(kinds) - 1:
            keys.fault(TYPES, f"layer {at} is {type_!r} without attention or Mamba-2 before it, which is not implemented")
            break
        else:
            alone.pop()
    full = GQA(nope_every=1)
    if set(kinds) == {"full"}:
        attention: Any = full
    else:
        attention = keys.make(Hybrid, recurrent=recurrent, full=full, kinds=tuple(kinds))
    return {"layers": len(kinds) or 1, "attention_only": tuple(alone), "attention": attention}


def _feed_forward(types: list[str]) -> list[str | None]:
    """Returns the kind of each block's feed-forward layer; None if it has none."""
    found: list[str | None] = []
    for type_ in types:
        if type_ in (LINEAR, FULL):
            found.append(None)
        elif found:
            found[-1] = type_
    return found


def _layers(decoder: DecoderConfig) -> Any:
    """Yields the kinds of a checkpoint's layers."""
    shape = decoder.shape
    attention = shape.attention
    for block in range(decoder.layers):
        full = not isinstance(attention, Hybrid) or attention.is_full(block)
        yield FULL if full else LINEAR
        if shape.has_feed_forward(block):
            yield MOE if shape.has_experts(block) else MLP
