"""GPT-2 (Radford et al., 2019): learned positions instead of rotary ones, biases everywhere, a tied head."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import GELU, FeedForward, LayerNormConfig, ReLU
from forge_models.hf.config import ANY_VALUE, Keys, Same
from forge_models.hf.family import Family

SIZES = {"n_embd": "dim", "n_layer": "layers", "n_head": "heads", "n_positions": "max_length", "vocab_size": "vocab_size"}
"""Key of a configuration -> field of `DecoderConfig`."""
WIDTH, EPS, ACTIVATION, SCALED = "n_inner", "layer_norm_epsilon", "activation_function", "scale_attn_weights"
ACTIVATIONS: dict[str, FeedForward] = {
    "gelu_new": GELU(bias=True),
    "gelu_pytorch_tanh": GELU(bias=True),
    "gelu": GELU(exact=True, bias=True),
    "relu": ReLU(bias=True),
}
"""Name of an activation -> feed-forward layer; the first name of equal ones is written."""


class GPT2(Family):
    """q, k and v are one matrix, and every matrix of a block has inputs before outputs.

    Published files have names without `transformer.`, and buffers of the causal mask, which are not read.
    """

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    defaults: ClassVar = {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        WIDTH: None,
        ACTIVATION: "gelu_new",
        EPS: 1e-5,
        "initializer_range": 0.02,
        SCALED: True,
        "tie_word_embeddings": True,
    }
    ignores: ClassVar = {
        "n_ctx": (Same("n_positions"),),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "reorder_and_upcast_attn": (None, False, True),  # only the order of a product, and its precision
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), (None, 0, 0.1)),  # of the training by its authors
        **dict.fromkeys(("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"), ANY_VALUE),
        "summary_first_dropout": ANY_VALUE,  # of heads for other tasks
        "output_past": ANY_VALUE,  # whether to return a cache
    }
    parts: ClassVar = {"attention": "attn", "mlp": "mlp", "attention_norm": "ln_1", "mlp_norm": "ln_2"}
    outside: ClassVar = {
        "embed.weight": "transformer.wte.weight",
        "positions.weight": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    }
    layers: ClassVar = "transformer.h"
    matrices: ClassVar = {"o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj"}
    fused: ClassVar = {"c_attn": ("q_proj", "k_proj", "v_proj")}
    turned: ClassVar = True
    derived: ClassVar = (".attn.bias", ".attn.masked_bias")

    def spelled(self, decoder: DecoderConfig, name: str) -> str:
        """Published files name the tensors of the model without its head."""
        del decoder
        return f"transformer.{name}" if name.partition(".")[0] in ("wte", "wpe", "h", "ln_f") else name

    def read(self, keys: Keys) -> dict[str, Any]:
        fields: dict[str, Any] = {ours: keys.integer(theirs) for theirs, ours in SIZES.items()}
        fields["ffn_dim"] = keys.integer(WIDTH, optional=True) or 4 * fields["dim"]
        fields |= {"init_std": keys.number("initializer_range"), "tied_embeddings": keys.boolean("tie_word_embeddings")}
        fields |= {"norm": LayerNormConfig(eps=keys.number(EPS)), "learned_positions": True}
        fields["mlp"] = ACTIVATIONS.get(str(keys.only(ACTIVATION, *ACTIVATIONS)))
        scale = None if keys.boolean(SCALED) else 1.0
        return fields | {"attention": GQA(qkv_bias=True, output_bias=True, nope_every=1, scale=scale)}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        shape = decoder.shape
        written: dict[str, Any] = {theirs: getattr(shape, ours) for theirs, ours in SIZES.items()}
        written |= {WIDTH: shape.ffn_dim, EPS: getattr(shape.norm, "eps", 0.0), "initializer_range": shape.init_std}
        names = [name for name, mlp in ACTIVATIONS.items() if mlp == shape.mlp]
        written[ACTIVATION] = names[0] if names else getattr(shape.mlp, "activation", None)
        written[SCALED] = getattr(shape.attention, "scale", None) in (None, shape.head_dim**-0.5)
        written |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return written | {"tie_word_embeddings": shape.tied_embeddings, "use_cache": True}
