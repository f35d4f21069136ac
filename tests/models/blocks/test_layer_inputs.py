"""Per-layer embeddings, and layers that attend to keys and values of others: formulas, names and refusals."""

from math import sqrt
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from forge_core.errors import ConfigError
from forge_core.registry import Registry
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig, LayerInputsConfig, MTPConfig
from forge_models.components.experts import MoEConfig
from forge_models.components.layers import ClampedSwiGLU, GeGLU
from forge_models.components.recurrent import Hybrid
from forge_models.shape import Streams, ValueEmbeddings
from forge_train.recipe.load import load_recipe

SIZES: dict[str, Any] = {"dim": 16, "layers": 6, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "vocab_size": 40, "max_length": 32}
EPS = 1e-5


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def filled(**fields: Any) -> Any:
    model: Any = DecoderConfig(**SIZES, **fields).build().double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3, generator=generator)
    return model


@torch.no_grad()
def test_vectors_of_layers_equal_their_formula() -> None:
    model = filled(layer_inputs=LayerInputsConfig(dim=3, vocab_size=44), mlp=GeGLU())
    part, tokens = model.layer_inputs, torch.tensor([[3, 1, 39]])
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    found = part(x, tokens)
    for layer in range(6):
        rows = slice(3 * layer, 3 * layer + 3)
        projected = normed(x @ part.projection.weight[rows].T / 4, part.norm.weight)
        expected = (projected + sqrt(3) * part.table.weight[tokens][..., rows]) / sqrt(2)
        torch.testing.assert_close(found[:, :, layer], expected, rtol=0, atol=1e-12)
    block = model.blocks["2"].layer_input
    hidden = F.gelu(x @ block.gate.weight.T, approximate="tanh") * found[:, :, 2]
    expected = x + normed(hidden @ block.projection.weight.T, block.norm.weight)
    torch.testing.assert_close(block(x, found[:, :, 2]), expected, rtol=0, atol=1e-12)


def test_layers_without_keys_and_values_take_those_of_their_kind() -> None:
    model = filled(attention=GQA(window=4, global_every=3, shared_kv_layers=3, shared_kv_ffn_factor=2))
    assert [block.takes for block in model.blocks.values()] == [None, None, None, "local", "local", "global"]
    assert [block.gives for block in model.blocks.values()] == [None, "local", "global", None, None, None]
    names = {name.removeprefix("blocks.4.") for name in model.state_dict() if name.startswith("blocks.4.attention")}
    assert names == {"attention_norm.weight", "attention.q_proj.weight", "attention.o_proj.weight"}
    assert model.blocks["4"].mlp.up_proj.weight.shape == (48, 16) and model.blocks["2"].mlp.up_proj.weight.shape == (24, 16)
    assert {"k_proj", "v_proj"}.isdisjoint(model.shape.attention.matrices(model.shape.context(3)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"qk_norm": "unit"},
        {"nope_every": 1},
        {"temperature": 0.5, "temperature_length": 2, "output_gate": True, "soft_cap": 3.0},
    ],
)
@torch.no_grad()
def test_taken_keys_and_values_are_those_of_the_layer_that_gives_them(fields: dict[str, Any]) -> None:
    model = filled(attention=GQA(shared_kv_layers=1, **fields))
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    giver, taker = model.blocks["4"].attention, model.blocks["5"].attention
    rotation = giver.rotary(torch.arange(5))
    _, (k, v) = giver(x, rotation, None)
    other = torch.randn(1, 5, 16, dtype=torch.float64)
    found = taker(other, rotation, None, None, (k, v))
    twin = filled(attention=GQA(**fields)).blocks["5"].attention
    twin.q_proj, twin.o_proj = taker.q_proj, taker.o_proj
    q, gate = twin._queries(other)
    unturned = giver._heads(giver.k_proj(x))
    expected = twin.o_proj(twin.attend(q, unturned, v, rotation, None, None, gate))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_cache_holds_nothing_of_layers_that_take() -> None:
    model = filled(attention=GQA(window=4, global_every=3, shared_kv_layers=3))
    cache = model.new_cache(1, 8)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), cache=cache)
    assert [layer.k is None for layer in cache.layers.values()] == [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": GQA(shared_kv_layers=6)}, "shared_kv_layers 6 must be fewer than the model's 6 layers"),
        ({"attention": GQA(window=3, global_every=6, shared_kv_layers=1)}, "leaves no global layer with keys and values"),
        ({"attention": GQA(window=3, global_layers=(0, 1), shared_kv_layers=4)}, "leaves no local layer with keys and values"),
        (
            {"attention": GQA(shared_kv_layers=1, shared_kv_ffn_factor=2), "moe": MoEConfig(experts=4)},
            "shared_kv_ffn_factor has no effect on layers with experts",
        ),
        ({"layer_inputs": LayerInputsConfig(vocab_size=39)}, r"layer_inputs\.vocab_size 39 must be at least vocab_size 40"),
        ({"layer_inputs": LayerInputsConfig(), "mlp": ClampedSwiGLU()}, "layer_inputs need the activation of the mlp"),
        ({"attention": Hybrid(full=GQA(shared_kv_layers=1))}, r"full\.shared_kv_layers does not go with recurrent layers"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**SIZES, **fields)


def test_fields_that_need_each_other_are_refused_alone() -> None:
    with pytest.raises(ValueError, match="shared_kv_ffn_factor needs shared_kv_layers"):
        GQA(shared_kv_ffn_factor=2)
    with pytest.raises(ValueError, match="value_embeddings does not support shared_kv_layers"):
        GQA(shared_kv_layers=1, value_embeddings=ValueEmbeddings(layers=(0,)))
    for other in ({"layer_inputs": LayerInputsConfig()}, {"attention": GQA(shared_kv_layers=1)}):
        with pytest.raises(ValueError, match=r"streams .*(layer_inputs|shared_kv_layers)"):
            DecoderConfig(**SIZES, streams=Streams(count=2), **other)
    with pytest.raises(ValueError, match="causal = false does not support shared_kv_layers"):
        GQA(causal=False, shared_kv_layers=1)


def test_compiled_blocks_with_more_inputs_than_the_stream_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.layer_inputs: are not proven with compilation; remove \[transforms"):
        load_recipe("debug", ["--model.layer_inputs.dim=8", "--transforms.compile.mode=default"], 1, Registry())
    with pytest.raises(
        ConfigError, match=r"shared_kv_layers: = 1 is not proven with compilation: .* remove \[transforms.compile\]"
    ):
        load_recipe("debug", ["--model.attention.shared_kv_layers=1", "--transforms.compile.mode=default"], 1, Registry())


def test_blocks_of_mtp_modules_have_keys_of_their_own_and_no_vectors() -> None:
    model = filled(attention=GQA(shared_kv_layers=2), layer_inputs=LayerInputsConfig(dim=3), mtp=MTPConfig(depth=2))
    for module in model.mtp.depths.values():
        assert (module.block.layer_input, module.block.takes, module.block.gives) == (None, None, None)
    matrices = model.shape.matrices()[0]
    assert "mtp.depths.2.block.attention.k_proj" in matrices
    assert not any(name.startswith("mtp") and "layer_input" in name for name in matrices)


@torch.no_grad()
def test_each_block_gets_the_vectors_of_its_layer() -> None:
    model, tokens = filled(layer_inputs=LayerInputsConfig(dim=3)), torch.tensor([[1, 2, 3]])
    seen: dict[str, torch.Tensor] = {}
    for name, block in model.blocks.items():
        block.layer_input.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[1]}))
    model(tokens)
    vectors = model.layer_inputs(model.embed(tokens), tokens)
    assert all(torch.equal(seen[str(layer)], vectors[:, :, layer]) for layer in range(6))
    assert not torch.equal(vectors[:, :, 0], vectors[:, :, 1])
