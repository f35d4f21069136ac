"""Every option of a block against the family that has it: logits and gradients of tiny random models of transformers."""

from math import sqrt

import pytest
import torch

from forge_models.components.attentions import GQA, MLA
from forge_models.components.layers import GELU, GeGLU, LayerNormConfig, ReLU, ReLU2, RMSNormConfig, SwiGLU
from forge_models.shape import Rope
from harness.closeness import wide

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 0,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.8}

# Family of transformers: its configuration, ours, and what our parts of a block are called there.
FAMILIES = {
    "Qwen2": ({"use_sliding_window": False}, {"attention": GQA(qkv_bias=True)}, {}),
    "Qwen3": ({"head_dim": 12}, {"attention": GQA(qk_norm="head"), "head_dim": 12}, {}),
    "Mistral": ({"sliding_window": 5, "head_dim": 8}, {"attention": GQA(window=5)}, {}),
    "Llama": (
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN | {"rope_theta": 10000.0}},
        {
            "attention": GQA(qkv_bias=True, output_bias=True),
            "mlp": SwiGLU(bias=True),
            "rope": Rope(scaling="yarn", factor=4.0, original_max_length=16, mscale=1.0, mscale_all_dim=0.8),
        },
        {},
    ),
    "Gemma2": (
        {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
        {
            "head_dim": 12,
            "attention": GQA(window=5, global_every=2, soft_cap=3.0, scale=20**-0.5),
            "mlp": GeGLU(),
            "norm": RMSNormConfig(eps=1e-6, offset=1),
            "norm_placement": "sandwich",
            "embed_multiplier": sqrt(32),
            "soft_cap": 30.0,
            "tied_embeddings": True,
        },
        {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
    "Gemma3": (
        {
            "head_dim": 12,
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        {
            "head_dim": 12,
            "attention": GQA(window=5, global_layers=(2,), scale=20**-0.5, qk_norm="head"),
            "mlp": GeGLU(),
            "rope": Rope(theta=1e6, local_theta=100.0, scaling="linear", factor=8.0),
            "norm": RMSNormConfig(eps=1e-6, offset=1),
            "norm_placement": "sandwich",
            "embed_multiplier": sqrt(32),
            "tied_embeddings": True,
        },
        {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
    "Olmo2": (
        {},
        {"attention": GQA(qk_norm="full"), "norm_placement": "post"},
        {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    ),
    "Granite": (
        {"residual_multiplier": 0.3, "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "logits_scaling": 1.0},
        {"residual_multiplier": 0.3, "embed_multiplier": 12.0, "attention": GQA(scale=0.2)},
        {},
    ),
    "DeepseekV3": (
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 4,  # no layer has experts
            "rope_interleave": False,
            "q_lora_rank": 14,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "rope_parameters": YARN | {"rope_theta": 10000.0},
        },
        {
            "kv_heads": None,
            "attention": MLA(q_lora_rank=14, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10),
            "rope": Rope(scaling="yarn", factor=4.0, original_max_length=16, mscale=1.0, mscale_all_dim=0.8),
        },
        {},
    ),
    "StableLm": (
        {"partial_rotary_factor": 0.5, "qk_layernorm": False, "layer_norm_eps": 1e-5, "hidden_act": "silu"},
        {"rope": Rope(partial=0.5), "norm": LayerNormConfig()},
        {},
    ),
}
PARTS = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
    "q_a_norm": "q_a_layernorm",
    "kv_a_norm": "kv_a_layernorm",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "embed": "embed_tokens",
}


def their_name(name, parts):
    """Name of the same tensor in transformers."""
    pieces = name.removeprefix("blocks.").split(".")
    renamed = ".".join((PARTS | parts).get(piece, piece) for piece in pieces)
    if name.startswith("blocks."):
        return f"model.layers.{renamed}"
    return "lm_head.weight" if name == "head.weight" else f"model.{renamed}"


def their_model(family, fields):
    import transformers

    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{name}Config")(**COMMON | fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
@wide()
def test_logits_and_gradients_equal_those_of_the_family(make, tokens, family):
    their_fields, ours, parts = FAMILIES[family]
    twin = their_model(family, {"rms_norm_eps": 1e-6, "tie_word_embeddings": False} | their_fields | _tied(ours))
    model = make(dtype=torch.float64, **{"layers": 4, "norm": RMSNormConfig(eps=1e-6)} | ours)
    generator = torch.Generator().manual_seed(3)
    middle = 1.0 - getattr(model.shape.norm, "offset", 0)
    theirs = dict(twin.named_parameters())
    names = {name: their_name(name, parts) for name, _ in model.named_parameters()}
    assert set(names.values()) == theirs.keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator) * 0.2
            if parameter.dim() == 1 and "norm" in name and "weight" in name:
                value += middle
            parameter.copy_(value)
            theirs[names[name]].copy_(value)
    rows = tokens(2, 40)
    mine, expected = model(rows), twin(rows).logits
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-11)
    mine.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in model.named_parameters():
        other = theirs[names[name]].grad
        torch.testing.assert_close(parameter.grad, other, rtol=0, atol=1e-11 * float(other.abs().max()), msg=name)


def _tied(ours):
    return {"tie_word_embeddings": True} if ours.get("tied_embeddings") else {}


def _tanh_gelu(x):
    return 0.5 * x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


def _exact_gelu(x):
    return 0.5 * x * (1 + torch.special.erf(x / sqrt(2)))


@pytest.mark.parametrize(
    ("part", "activation"),
    [
        (SwiGLU(bias=True), lambda x: x / (1 + (-x).exp())),
        (GeGLU(bias=True), _tanh_gelu),
        (GeGLU(exact=True), _exact_gelu),
        (GELU(bias=True), _tanh_gelu),
        (GELU(exact=True), _exact_gelu),
        (ReLU(bias=True), lambda x: (x + x.abs()) / 2),
        (ReLU2(), lambda x: ((x + x.abs()) / 2) ** 2),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_mlps_equal_their_matrices_by_hand(make, part, activation):
    mlp = make(mlp=part, spread=10.0).double().blocks["1"].mlp

    def applied(layer, x):
        out = x @ layer.weight.T
        if layer.bias is None:
            return out
        torch.nn.init.normal_(layer.bias)
        return out + layer.bias

    x = torch.randn(3, 32, dtype=torch.float64)
    hidden = activation(applied(mlp.gate_proj if part.gated else mlp.up_proj, x))
    if part.gated:
        hidden = hidden * applied(mlp.up_proj, x)
    assert len(list(mlp.children())) == (3 if part.gated else 2)
    expected = applied(mlp.down_proj, hidden)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)
