"""Small decoders with every block component that is registered, and with every option of ours that changes a block."""

from typing import Any

from forge_core.registry import Registry
from forge_models.components.attentions import GQA, MLA, IndexedMLA
from forge_models.components.compressed import CompressedMQA
from forge_models.components.decoder import LayerInputsConfig
from forge_models.components.experts import (
    MoEConfig,
    NormedTopKConfig,
    SigmoidTopKConfig,
    SoftmaxTopKConfig,
    TopKSigmoidConfig,
)
from forge_models.components.layers import GELU, ClampedSwiGLU, GeGLU, LayerNormConfig, ReLU2, RMSNormConfig, SwiGLU
from forge_models.components.recurrent import GDN, Hybrid
from forge_models.components.state_space import Mamba2
from forge_models.shape import Losses, Rope, Streams, ValueEmbeddings

SIZES = {"dim": 48, "layers": 3, "heads": 6, "head_dim": 10, "ffn_dim": 56, "vocab_size": 101, "max_length": 64}
"""All different, so that a dimension under a wrong name shows."""

LATENT = {"kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 12}

INDEXED = LATENT | {"q_lora_rank": 16, "index_heads": 5, "index_dim": 8, "top_k": 4}

COMPRESSED = {"window": 4, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 9, "sparse_rate": 2, "heavy_rate": 3}
COMPRESSED |= {"index_heads": 5, "index_dim": 12, "top_k": 2}

SMALL: dict[tuple[str, str], dict[str, Any]] = {
    ("attention", "mla"): LATENT,
    ("attention", "indexed_mla"): INDEXED,
    ("attention", "compressed_mqa"): COMPRESSED,
    ("attention", "hybrid"): {"full_every": 2},
}
"""Fields of components whose defaults are large, or are for more layers."""


def registered() -> dict[str, dict[str, Any]]:
    """One decoder for each component that forge-models registers for a block."""
    found: dict[str, dict[str, Any]] = {}
    registry = Registry()
    for slot in ("attention", "mlp", "norm"):
        for entry in registry.of(f"forge.{slot}s"):
            if entry.distribution == "forge-models":
                found[entry.name] = {slot: registry.load_entry(entry)(**SMALL.get((slot, entry.name), {}))}
    for entry in registry.of("forge.routers"):
        if entry.distribution == "forge-models":
            router = registry.load_entry(entry)()
            found[f"experts_{entry.name}"] = {"moe": MoEConfig(experts=4, ffn_dim=24, first_dense=1, router=router)}
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "grouped_heads": {"kv_heads": 3},
    "one_key_head": {"kv_heads": 1, "tied_embeddings": True},
    "windows": {"attention": GQA(window=4)},
    "local_and_global": {
        "attention": GQA(window=3, global_every=2, qk_norm="head"),
        "rope": Rope(theta=500.0, local_theta=50.0, scaling="linear", factor=4.0),
        "kv_heads": 2,
    },
    "chunks_and_unit_heads": {
        "attention": GQA(
            chunk=4,
            global_every=3,
            nope_every=3,
            qk_norm="unit",
            temperature=0.5,
            temperature_length=3,
            temperature_shift=1,
            temperature_layers="nope",
        ),
        "kv_heads": 2,
    },
    "experts_with_weighted_inputs": {
        "moe": MoEConfig(experts=4, top_k=2, shared=1, ffn_dim=24, router=TopKSigmoidConfig(), weigh_inputs=True),
    },
    "capped_scores": {"attention": GQA(soft_cap=2.0, window=4, global_layers=(1,), scale=0.4), "kv_heads": 2, "soft_cap": 5.0},
    "biases_and_full_qk_norm": {
        "attention": GQA(qkv_bias=True, output_bias=True, qk_norm="full"),
        "mlp": SwiGLU(bias=True),
        "kv_heads": 3,
    },
    "query_latent": {"attention": MLA(q_lora_rank=16, **LATENT), "rope": Rope(scaling="yarn", factor=4.0, original_max_length=8)},
    "latent_without_positions": {"attention": MLA(**LATENT, rotates=False)},
    "indexer_in_warm_up": {
        "attention": IndexedMLA(**INDEXED, keys="all", kl_weight=0.5),
        "moe": MoEConfig(experts=4, ffn_dim=24, first_dense=1, router=SoftmaxTopKConfig()),
    },
    "compressed_keys": {
        "attention": CompressedMQA(**COMPRESSED, kinds=("sparse", "window", "heavy")),
        "rope": Rope(theta=500.0, local_theta=50.0, partial=0.6, scaling="yarn", factor=4.0, original_max_length=8),
        "layers": 3,
        "moe": MoEConfig(experts=4, shared=1, ffn_dim=24, router=SoftmaxTopKConfig()),
        "streams": Streams(count=2, sinkhorn=3),
    },
    "post_norms": {"norm_placement": "post", "norm": LayerNormConfig()},
    "sandwich": {
        "norm_placement": "sandwich",
        "norm": RMSNormConfig(offset=1),
        "mlp": GeGLU(exact=True, bias=True),
        "embed_multiplier": 6.9,
        "residual_multiplier": 0.5,
    },
    "norm_without_bias": {"norm": LayerNormConfig(bias=False), "mlp": GELU(bias=True), "attention": GQA(qk_norm="head")},
    "partial_rotation": {
        "rope": Rope(partial=0.4, scaling="llama3", factor=4.0, original_max_length=8),
        "attention": GQA(output_bias=True),
    },
    "experts_in_groups": {
        "moe": MoEConfig(
            experts=8,
            top_k=3,
            shared=2,
            ffn_dim=24,
            every=2,
            router=SigmoidTopKConfig(n_group=4, topk_group=2, scaling=2.5, bias_schedule="warmup", bias_steps=3),
            losses=Losses(sequence=0.1, global_batch=0.1, z=0.1),
        ),
        "mlp": GELU(),
        "norm_placement": "sandwich",
    },
    "experts_with_norms_of_branches": {
        "moe": MoEConfig(experts=4, shared=2, ffn_dim=24, first_dense=1, branch_norms=True, router=NormedTopKConfig(eps=1e-3)),
        "norm_placement": "sandwich",
    },
    "experts_in_a_space_of_their_own": {
        "moe": MoEConfig(experts=4, shared=1, ffn_dim=24, first_dense=1, latent_dim=20, router=SigmoidTopKConfig()),
        "mlp": ReLU2(),
    },
    "experts_by_tables_of_tokens": {
        "moe": MoEConfig(
            experts=5,
            shared=1,
            ffn_dim=24,
            router=SigmoidTopKConfig(scores="sqrt_softplus", scaling=1.5, hash_layers=(1,)),
            losses=Losses(sequence=0.1, global_batch=0.1, z=0.1),
        ),
    },
    "layers_without_rope": {"attention": GQA(nope_every=2, window=4, global_layers=(1,)), "kv_heads": 2},
    "listed_layers_without_rope": {"attention": GQA(nope_layers=(0,))},
    "norm_without_parameters": {"norm": LayerNormConfig(weight=False, bias=False), "attention": GQA(qk_norm="head")},
    "experts_with_a_gate_on_the_shared_one": {
        "moe": MoEConfig(experts=4, shared=2, shared_gate=True, ffn_dim=24, first_dense=1),
    },
    "gated_output": {
        "attention": GQA(output_gate=True, qkv_bias=True, qk_norm="head", window=4, global_every=2),
        "norm": RMSNormConfig(offset=1),
        "kv_heads": 2,
        "rope": Rope(partial=0.4),
    },
    "experts_with_biases_and_clamps": {
        "moe": MoEConfig(experts=4, shared=1, ffn_dim=24, first_dense=1, router=SoftmaxTopKConfig(bias=True)),
        "mlp": ClampedSwiGLU(limit=0.2, bias=True),
    },
    "parallel_residual": {
        "parallel_residual": True,
        "norm": LayerNormConfig(),
        "mlp": GELU(exact=True, bias=True),
        "attention": GQA(qkv_bias=True, output_bias=True),
        "residual_multiplier": 0.7,
    },
    "attention_only": {"attention_only": (0,), "norm_placement": "sandwich"},
    "sparse_or_attention_only": {"attention_only": (1,), "moe": MoEConfig(experts=4, shared=1, ffn_dim=24)},
    "heads_of_global_layers": {
        "attention": GQA(
            window=4,
            global_every=2,
            global_head_dim=14,
            global_kv_heads=2,
            v_norm=True,
            keys_as_values="global",
            qk_norm="head",
            scale=1.0,
        ),
        "rope": Rope(theta=500.0, local_theta=50.0, proportion=0.5),
        "norm_placement": "sandwich",
        "kv_heads": 3,
    },
    "shared_keys_and_values": {
        "attention": GQA(window=4, global_every=2, shared_kv_layers=2, shared_kv_ffn_factor=2, qk_norm="head", qkv_bias=True),
        "layers": 4,
        "kv_heads": 3,
    },
    "inputs_of_layers": {"layer_inputs": LayerInputsConfig(dim=7, vocab_size=103), "mlp": GeGLU()},
    "scalars": {"layer_scalar": True},
    "keys_as_values": {"attention": GQA(keys_as_values="all", qkv_bias=True, output_gate=True), "rope": Rope(proportion=0.3)},
    "sinks": {"attention": GQA(sinks=True, window=4, global_every=2, output_bias=True), "kv_heads": 2},
    "streams": {
        "streams": Streams(count=3, sinkhorn=4),
        "attention": GQA(window=4, global_every=2),
        "norm_placement": "sandwich",
        "residual_multiplier": 0.7,
        "kv_heads": 2,
    },
    "streams_of_experts": {
        "streams": Streams(count=2),
        "attention_only": (1,),
        "attention": IndexedMLA(**INDEXED),
        "moe": MoEConfig(experts=4, shared=1, ffn_dim=24, router=SoftmaxTopKConfig()),
    },
    "streams_of_recurrent_layers": {
        "streams": Streams(),
        "attention": Hybrid(recurrent=GDN(key_heads=3, value_heads=6, key_dim=7, value_dim=9, conv_width=3), full_every=2),
        "tied_embeddings": True,
        "learned_positions": True,
    },
    "value_embeddings": {
        "attention": GQA(
            value_embeddings=ValueEmbeddings(layers=(0, 1), gate_channels=5),
            window=4,
            global_every=2,
            qkv_bias=True,
            output_gate=True,
        ),
        "kv_heads": 2,
        "moe": MoEConfig(experts=4, ffn_dim=24, first_dense=1, router=SoftmaxTopKConfig()),
        "streams": Streams(count=2, sinkhorn=3),
    },
    "value_embeddings_beside_recurrent_layers": {
        "attention": Hybrid(
            recurrent=GDN(key_heads=3, value_heads=6, key_dim=7, value_dim=9, conv_width=3),
            full=GQA(value_embeddings=ValueEmbeddings(layers=(1,), scale=1.5), sinks=True),
            full_every=2,
        ),
        "kv_heads": 3,
    },
    "scaled_logits": {"logit_multiplier": 0.3, "soft_cap": 4.0},
    "shared_key_heads": {
        "attention": Hybrid(
            recurrent=GDN(key_heads=3, value_heads=6, key_dim=7, value_dim=9, conv_width=3, negative_eigenvalues=True),
            full_every=2,
            recurrent_norm_placement="sandwich",
        ),
        "norm_placement": "post",
    },
    "grouped_states": {
        "attention": Hybrid(
            recurrent=Mamba2(
                heads=6, head_dim=7, groups=3, state_dim=9, conv_width=3, bias=True, gate_first=False, step_min=0.01
            ),
            full_every=2,
        ),
    },
    "dynamic_rope": {"rope": Rope(scaling="dynamic", factor=4.0, original_max_length=32)},
}

VARIANTS = registered() | OPTIONS
