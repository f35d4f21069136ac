"""GPT-NeoX (Black et al., 2022) and Pythia (Biderman et al., 2023): attention and feed-forward layer are added together."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import GELU, LayerNormConfig
from forge_models.hf.config import ANY_VALUE, Keys, Same
from forge_models.hf.family import Family, read_base, read_biases, write_base, write_biases
from forge_models.hf.rope import PARTIAL

EPS, THETA, SHARE, PARALLEL = "layer_norm_eps", "rotary_emb_base", "rotary_pct", "use_parallel_residual"
ACTIVATION = ("hidden_act", "gelu")


class GPTNeoX(Family):
    """Layer norms with biases, GELU, biases everywhere, and one matrix with q, k and v of each head in turn."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    defaults: ClassVar = {
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        EPS: 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": True,
        PARALLEL: True,
    }
    ignores: ClassVar = {
        "num_key_value_heads": (None, Same("num_attention_heads")),
        "classifier_dropout": ANY_VALUE,
        "attention_dropout": (None, 0, 0.1),  # of the training by its authors; it changes no logit
        "hidden_dropout": (None, 0, 0.1),
    }
    parts: ClassVar = {**Family.parts, "attention": "attention"}
    outside: ClassVar = {
        "embed.weight": "gpt_neox.embed_in.weight",
        "norm.weight": "gpt_neox.final_layer_norm.weight",
        "norm.bias": "gpt_neox.final_layer_norm.bias",
        "head.weight": "embed_out.weight",
    }
    layers: ClassVar = "gpt_neox.layers"
    matrices: ClassVar = {"o_proj": "dense", "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h"}
    joint: ClassVar = "query_key_value"

    def read(self, keys: Keys) -> dict[str, Any]:
        theta = (keys.number(THETA) if keys.given(THETA) else 0.0) or 10_000.0
        share = (keys.number(SHARE) if keys.given(SHARE) else 0.0) or 0.25
        if share > 1:
            keys.fault(SHARE, f"expected a number above 0, 1 at most, not {share}")
            share = 1.0
        for key, value in (("rope_theta", theta), (PARTIAL, share)):  # the reference reads these keys in tables only
            if keys.given(key):
                keys.only(key, None, value)
        fields = read_base(keys, eps=EPS, activation=ACTIVATION, theta=theta, partial=share)
        dim, heads = fields["dim"], fields["heads"]
        fields |= {"kv_heads": heads, "head_dim": dim // heads if heads else 0, "norm": LayerNormConfig(eps=keys.number(EPS))}
        fields |= {"parallel_residual": keys.boolean(PARALLEL), "mlp": GELU(exact=True, bias=True)}
        return fields | {"attention": GQA(**read_biases(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = write_base(self, decoder, eps=EPS, activation=ACTIVATION) | write_biases(decoder)
        written |= {THETA: written.pop("rope_theta"), SHARE: decoder.rope.partial, PARALLEL: decoder.parallel_residual}
        del written["num_key_value_heads"]
        return written
