"""What the shape of a decoder says before it is built is true of the built one."""

from typing import Any

import pytest
import torch
from torch import nn

from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.components.experts import MoEConfig
from forge_models.components.layers import GELU
from forge_models.shape import Losses, Rope
from forge_parallel.checks import split_widths

SIZES: dict[str, Any] = {"dim": 32, "heads": 4, "kv_heads": 2, "layers": 3, "ffn_dim": 40, "vocab_size": 64, "max_length": 32}
LATENT = MLA(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
DYNAMIC = Rope(scaling="dynamic", factor=2.0, original_max_length=16)
MODELS = {
    "plain": DecoderConfig(**SIZES),
    "tied": DecoderConfig(**SIZES, tied_embeddings=True, mlp=GELU(), rope=DYNAMIC),
    "capped": DecoderConfig(**SIZES, attention=GQA(soft_cap=5.0, qk_norm="full", qkv_bias=True)),
    "latent": DecoderConfig(**{**SIZES, "kv_heads": None}, attention=LATENT),
    "latent queries": DecoderConfig(**{**SIZES, "kv_heads": None}, attention=MLA(q_lora_rank=10)),
    "local": DecoderConfig(
        **SIZES, attention=GQA(window=4), rope=Rope(scaling="dynamic", factor=2.0, original_max_length=16, local_theta=5.0)
    ),
    "experts": DecoderConfig(**SIZES, moe=MoEConfig(experts=4, shared=2, first_dense=1, ffn_dim=24, losses=Losses(sequence=0.1))),
    "only experts": DecoderConfig(**SIZES, moe=MoEConfig(experts=4), mtp=MTPConfig(depth=2)),
    "every other": DecoderConfig(**{**SIZES, "layers": 5}, moe=MoEConfig(experts=4, every=2, first_dense=2), mtp=MTPConfig()),
}


@pytest.mark.parametrize("name", MODELS)
def test_e7_a_shape_agrees_with_the_built_model(name: str) -> None:
    config = MODELS[name]
    shape = config.shape
    with torch.device("meta"):
        built: Any = config.build()
    specs = built.specs()
    assert (shape.units, shape.whole_rows, shape.whole_stream, shape.mtp_depth) == (
        specs.units,
        specs.whole_rows,
        specs.whole_stream,
        specs.mtp_depth,
    )
    assert shape.blocks == len(specs.blocks) == config.layers + specs.mtp_depth
    assert (getattr(shape.attention, "soft_cap", None) is not None) == any(
        getattr(getattr(module, "core", None), "capped", False) for module in built.modules()
    )
    hidden, experts = shape.matrices()
    linear = {
        path: ((module.out_features, module.in_features), specs.tensors[f"{path}.weight"].dims)
        for path, module in built.named_modules()
        if isinstance(module, nn.Linear)
        and f"{path}.weight" in specs.tensors
        and specs.tensors[f"{path}.weight"].group == "matrix"
    }
    assert {path: (matrix.shape, matrix.dims) for path, matrix in hidden.items()} == linear
    stacked = {n: (tuple(built.get_parameter(n).shape[1:]), s.dims[1:]) for n, s in specs.tensors.items() if "expert" in s.dims}
    assert {name: (matrix.shape, matrix.dims) for name, matrix in experts.items()} == stacked
    cut = {
        p.shape[dims.index("ffn")]
        for path, (_, dims) in linear.items()
        if "ffn" in dims
        for p in [built.get_submodule(path).weight]
    }
    assert {rows for key, rows in split_widths(config) if key != "model.vocab_size"} == cut
    matrices = sum(p.numel() for n, p in built.named_parameters() if specs.tensors[n].group != "vector" and "router" not in n)
    others = sum(built.get_parameter(n).numel() for n in specs.tensors if ".projection." in n)
    assert shape.elements == matrices - others


@pytest.mark.parametrize(
    ("key", "value"),
    [("layers", 10**23), ("vocab_size", 10**14), ("dim", 2 * 10**9), ("ffn_dim", 10**15), ("head_dim", 2 * 10**14)],
)
def test_m1_a_size_that_no_machine_holds_names_its_key(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{key} {value} gives \S+ parameters"):
        DecoderConfig(**{key: value})


def test_m1_a_thousand_times_the_largest_models_is_taken() -> None:
    assert DecoderConfig(layers=1000, dim=65536, heads=512, ffn_dim=262144).shape.elements > 5e13
