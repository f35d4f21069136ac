"""Value embeddings: against loops in fp64; what is counted, grouped and refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.recurrent import Hybrid
from forge_models.decoder import Decoder
from forge_models.flops import count_flops
from forge_models.generation import generate
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import misfits
from forge_models.shape import ValueEmbeddings
from forge_train.recipe.load import load_recipe
from forge_vlm.components.encoders import ViT
from forge_vlm.components.model import VLM

TABLES = ValueEmbeddings(layers=(1,), gate_channels=3, scale=1.7)
SMALL = DecoderConfig(
    dim=8,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn_dim=10,
    vocab_size=11,
    max_length=32,
    attention=GQA(value_embeddings=TABLES, qkv_bias=True),
)


def filled(module: nn.Module, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module.eval()


def by_loops(attention: Any, x: Tensor, tokens: Tensor) -> Tensor:
    """The layer without rotary positions, one head of one token after another."""
    of, width, rows = attention.value_embedding, 6, []
    for b, row in enumerate(tokens.tolist()):
        for t in range(len(row)):
            heads = []
            for h in range(4):
                kv = h // 2
                part, own = slice(kv * width, (kv + 1) * width), slice(h * width, (h + 1) * width)
                q = attention.q_proj.weight[own] @ x[b, t] + attention.q_proj.bias[own]
                scores, values = [], []
                for s in range(t + 1):
                    k = attention.k_proj.weight[part] @ x[b, s] + attention.k_proj.bias[part]
                    scores.append(q @ k / width**0.5)
                    gate = 1.7 / (1 + (-(of.gate[kv] @ x[b, s, :3])).exp())
                    value = attention.v_proj.weight[part] @ x[b, s] + attention.v_proj.bias[part]
                    values.append(value + gate * of.weight[row[s], part])
                heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            rows.append(attention.o_proj.weight @ torch.cat(heads))
    return torch.stack(rows).unflatten(0, tokens.shape)


def test_values_and_gradients_equal_loops() -> None:
    still = replace(SMALL, attention=replace(SMALL.attention, nope_every=1))  # type: ignore[type-var]
    attention = filled(still.build()).blocks["1"].attention
    tokens = torch.tensor([[3, 1, 3, 10, 0], [7, 7, 2, 5, 3]])
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    rotation = attention.rotary(torch.arange(5)[None])
    found = attention(x, rotation, attention.core.prepare(None, 5, None, "cpu"), None, tokens)
    expected = by_loops(attention, x, tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    leaves = {"x": x, **dict(attention.named_parameters())}
    weights = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ours = torch.autograd.grad((found * weights).sum(), list(leaves.values()))
    theirs = torch.autograd.grad((expected * weights).sum(), list(leaves.values()))
    for name, one, other in zip(leaves, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=name)
        assert float(one.abs().max()) > 0, name


def test_a_table_of_zeros_changes_nothing() -> None:
    """And all other parameters have the names that they have without a table."""
    model, plain = filled(SMALL.build()), replace(SMALL, attention=GQA(qkv_bias=True)).build().double().eval()
    state = model.state_dict()
    own = {"blocks.1.attention.value_embedding.weight", "blocks.1.attention.value_embedding.gate"}
    assert state.keys() - plain.state_dict().keys() == own
    plain.load_state_dict({name: value for name, value in state.items() if name not in own})
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert not torch.equal(model(tokens), plain(tokens))
        model.blocks["1"].attention.value_embedding.weight.zero_()
        assert torch.equal(model(tokens), plain(tokens))


def test_a_token_reads_its_own_row_in_packed_documents_and_with_a_cache() -> None:
    model = filled(SMALL.build())
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    found = generate(model, prompts, max_tokens=5, prefill=2)
    for prompt, text in zip(prompts, found, strict=True):
        whole = list(prompt)
        for _ in range(5):
            with torch.no_grad():
                whole.append(int(model(torch.tensor([whole]))[0, -1].argmax()))
        assert text == whole[len(prompt) :]


def test_a_part_without_ids_is_refused() -> None:
    model: Decoder = filled(SMALL.build())
    model.embed = None
    with pytest.raises(ValueError, match="value embeddings need the ids of all tokens"):
        model(torch.randn(1, 3, 8, dtype=torch.float64))


def test_tables_are_embeddings_and_only_gates_multiply() -> None:
    plain, found = count_flops(replace(SMALL, attention=GQA(qkv_bias=True)).shape), count_flops(SMALL.shape)
    assert found.matrix - plain.matrix == 2 * 3
    assert found.embedding - plain.embedding == 11 * 12
    assert found.attention - plain.attention == 2 * 3
    assert found.parameters == sum(parameter.numel() for parameter in SMALL.build().parameters())
    assert SMALL.shape.elements - replace(SMALL, attention=GQA()).shape.elements == 11 * 12
    tensors = SMALL.build().specs().tensors
    table, gate = (tensors[f"blocks.1.attention.value_embedding.{name}"] for name in ("weight", "gate"))
    assert (table.group, table.init.kind, table.init.std) == ("embedding", "normal", 0.02)
    assert (gate.group, gate.init.kind) == ("matrix", "zeros")


def test_half_of_the_scale_is_the_factor_at_the_start() -> None:
    of = filled(SMALL.build()).blocks["1"].attention.value_embedding
    with torch.no_grad():
        of.gate.zero_()
        tokens = torch.tensor([[4, 2]])
        torch.testing.assert_close(of(tokens, torch.ones(1, 2, 8, dtype=torch.float64)), 0.85 * of.weight[tokens])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"attention": GQA(value_embeddings=ValueEmbeddings(layers=(0, 2)))}, r"value_embeddings\.layers \[2\] do not exist"),
        ({"attention": GQA(value_embeddings=replace(TABLES, gate_channels=9))}, r"gate_channels 9 exceeds dim 8"),
        (
            {"attention": Hybrid(full=GQA(value_embeddings=ValueEmbeddings(layers=(0, 1))), full_every=2)},
            r"full\.value_embeddings\.layers \[0\] are recurrent",
        ),
    ],
)
def test_layers_that_cannot_have_a_table_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(SMALL, **fields)


@pytest.mark.parametrize("layers", [(), (1, 1)])
def test_a_list_of_layers_names_each_once(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must name at least one layer, and each once"):
        ValueEmbeddings(layers=layers)


def test_what_is_not_proven_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.name = 'vlm' does not support attention\.value_embeddings"):
        VLM(
            dim=16,
            layers=2,
            heads=4,
            vocab_size=40,
            encoder=ViT(size=8, patch=4, dim=8, layers=1, heads=2),
            attention=GQA(value_embeddings=TABLES),
        )
    for name, family in FAMILIES.items():
        assert misfits(family, SMALL), name
    with pytest.raises(ForgeError, match="value_embeddings"):
        load_recipe("debug", ["--model.attention.name=mla", "--model.attention.value_embeddings.layers=[1]"], None, Registry())


@pytest.mark.parametrize(
    "other", [{"v_norm": True}, {"keys_as_values": "all"}, {"window": 3, "global_every": 2, "global_kv_heads": 1}]
)
def test_other_changes_of_values_are_refused_beside_a_table(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"value_embeddings does not support {[*other][-1]}"):
        GQA(value_embeddings=ValueEmbeddings(layers=(0,)), **other)
