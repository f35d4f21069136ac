"""Masks, positions, specs, initial loss, taps and compilation of the decoder."""

import math

import pytest
import torch
from torch.nn import functional as F

from forge_core.protocols.model import AttentionCore
from forge_interp.tap_names import INSIDE
from forge_models.blocks import attention
from forge_models.blocks.attention import LocalAttention
from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import LayerNormConfig, ReLU2, RMSNormConfig
from forge_models.generation import GenerationError, stream
from forge_models.inner_values import listening, tap
from forge_models.objectives import CrossEntropy
from forge_models.shape import Rope
from harness.closeness import assert_no_farther, wide
from harness.siblings import fast


def packed(*lengths):
    """documents and positions (1, T) of a row that holds documents of these lengths."""
    documents = [number for number, length in enumerate(lengths) for _ in range(length)]
    positions = [place for length in lengths for place in range(length)]
    return torch.tensor([documents], dtype=torch.int32), torch.tensor([positions], dtype=torch.int32)


@pytest.mark.parametrize("with_positions", [True, False])
@wide()
def test_a_packed_document_equals_the_document_alone(make, tokens, with_positions):
    model = make(dtype=torch.float64, spread=10.0)
    row = tokens(1, 17)
    documents, positions = packed(5, 1, 11)
    together = model(row, documents=documents, positions=positions if with_positions else None)
    start = 0
    for length in (5, 1, 11):
        alone = model(row[:, start : start + length])
        torch.testing.assert_close(together[:, start : start + length], alone, rtol=0, atol=1e-11)
        start += length


def test_rows_may_be_packed_differently(make, tokens):
    model = make(dtype=torch.float64, spread=10.0)
    rows = tokens(2, 9)
    documents = torch.cat([packed(4, 5)[0], packed(9)[0]])
    both = model(rows, documents=documents)
    torch.testing.assert_close(both[1:], model(rows[1:]), rtol=0, atol=1e-11)
    torch.testing.assert_close(both[:1], model(rows[:1], documents=documents[:1]), rtol=0, atol=1e-11)
    assert float((both[0] - model(rows[:1])[0]).detach().abs().max()) > 1e-2


@pytest.fixture
def sdpa_calls(monkeypatch):
    """Mask and causal flag of every call of torch's attention."""
    calls = []
    real = F.scaled_dot_product_attention

    def spy(*args, attn_mask, is_causal, **kwargs):
        calls.append((attn_mask, is_causal))
        return real(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    return calls


def test_without_documents_no_mask_is_made(make, tokens, sdpa_calls):
    make()(tokens(2, 9))
    assert sdpa_calls == [(None, True)] * 2


def test_one_mask_serves_every_layer(make, tokens, sdpa_calls):
    make(layers=3)(tokens(1, 9), documents=packed(4, 5)[0])
    masks = [mask for mask, _ in sdpa_calls]
    assert len(masks) == 3
    assert all(mask is masks[0] for mask in masks)
    expected = torch.block_diag(torch.ones(4, 4).tril(), torch.ones(5, 5).tril()).bool()
    assert torch.equal(masks[0][0, 0], expected)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_core_equals_softmax_by_hand(window):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 7, 6, generator=generator)
    k, v = torch.randn(2, 2, 2, 7, 6, generator=generator)
    documents = torch.cat([packed(3, 4)[0], packed(7)[0]])
    core = LocalAttention()
    assert isinstance(core, AttentionCore)
    out = core(q, k, v, core.prepare(documents, 7, window, "cpu"), 0.3)
    plain = core(q, k, v, core.prepare(None, 7, window, "cpu"), 0.3)
    for b in range(2):
        for h in range(4):
            for t in range(7):
                seen = [s for s in range(t + 1) if window is None or t - s < window]
                for result, keys in ((plain, seen), (out, [s for s in seen if documents[b, s] == documents[b, t]])):
                    weights = torch.softmax(torch.stack([q[b, h, t] @ k[b, h // 2, s] * 0.3 for s in keys]), 0)
                    expected = sum(w * v[b, h // 2, s] for w, s in zip(weights, keys, strict=True))
                    torch.testing.assert_close(result[b, h, t], expected, rtol=1e-5, atol=1e-6)


def test_qk_norm_normalizes_each_head_before_the_rotation(make, tokens):
    model = make(spread=10.0, attention=GQA(qk_norm="head"))
    seen = {}
    with listening(lambda name, x: seen.update({name: x.detach()})):
        model(tokens(2, 9))
    for name in ("blocks.0.attention.q", "blocks.1.attention.k"):  # a rotation keeps lengths
        torch.testing.assert_close(seen[name].square().mean(-1), torch.ones(seen[name].shape[:-1]), rtol=1e-3, atol=0)


# Published sizes, from the models' own cards and files.
PUBLISHED = {
    "llama_3_8b": (
        {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_dim": 14336, "vocab_size": 128256},
        8_030_261_248,
    ),
    "llama_3.2_1b": (
        {
            "dim": 2048,
            "layers": 16,
            "heads": 32,
            "kv_heads": 8,
            "ffn_dim": 8192,
            "vocab_size": 128256,
            "tied_embeddings": True,
        },
        1_235_814_400,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_equals_the_published_one(name):
    fields, expected = PUBLISHED[name]
    with torch.device("meta"):
        model = DecoderConfig(**fields).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_specs_name_blocks_units_ties_and_groups(tied):
    sizes = {"dim": 48, "layers": 2, "heads": 6, "kv_heads": 3, "ffn_dim": 56, "vocab_size": 101}
    model = DecoderConfig(**sizes, tied_embeddings=tied).build()
    specs = model.specs()
    assert specs.tensors["embed.weight"].group == "embedding"
    assert specs.tensors["blocks.1.attention.o_proj.weight"].group == "matrix"
    assert specs.units == {"embed": 48, "heads": 6, "kv_heads": 3, "ffn": 56, "vocab": 101}
    assert specs.blocks == ("blocks.0", "blocks.1")
    assert dict(specs.ties) == ({"head.weight": "embed.weight"} if tied else {})
    assert ("head.weight" in specs.tensors) != tied
    assert (model.head.weight is model.embed.weight) == tied


def test_projections_back_to_the_stream_start_smaller_with_depth():
    specs = DecoderConfig(layers=8, init_std=0.02).build().specs().tensors
    expected = 0.02 / math.sqrt(16)
    assert specs["blocks.3.attention.o_proj.weight"].init.std == pytest.approx(expected)
    assert specs["blocks.3.mlp.down_proj.weight"].init.std == pytest.approx(expected)
    assert specs["blocks.3.mlp.up_proj.weight"].init.std == 0.02


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dim", "vocab", "init_std"), [(32, 97, 0.02), (256, 4096, 0.02), (1024, 512, 0.02), (64, 512, 0.2)])
def test_initial_loss_is_near_log_vocabulary_but_not_equal(make, tokens, tied, dim, vocab, init_std):
    model = make(dim=dim, ffn_dim=dim, vocab_size=vocab, tied_embeddings=tied, init_std=init_std)
    rows = tokens(4, 65, vocab)
    with torch.no_grad():
        terms = model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy().build())
    distance = abs(float(terms.sum / terms.tokens) - math.log(vocab))
    assert 1e-5 < distance < 0.5


def test_nothing_is_kept_outside_of_parameters_and_nothing_is_drawn_by_constructors():
    model = DecoderConfig(dim=32, heads=4, layers=1, vocab_size=50, attention=GQA(qk_norm="head")).build()
    assert not list(model.buffers())
    state = torch.get_rng_state()
    again = DecoderConfig(dim=32, heads=4, layers=1, vocab_size=50).build()
    assert torch.equal(state, torch.get_rng_state())
    # Whoever forgets to draw a weight sees NaN at once.
    assert all(parameter.isnan().all() for parameter in again.parameters())


def test_gradients_reach_a_tied_table_from_both_uses(make, tokens):
    tied = make(tied_embeddings=True)
    loose = make()
    loose.load_state_dict(tied.state_dict())
    rows = tokens(2, 9)
    for model in (tied, loose):
        model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy().build()).sum.backward()
    both = loose.embed.weight.grad + loose.head.weight.grad
    torch.testing.assert_close(tied.embed.weight.grad, both, rtol=1e-5, atol=1e-7)


def test_bf16_parameters_give_bf16_logits_and_an_fp32_loss(make, tokens):
    model = make(dtype=torch.bfloat16)
    rows = tokens(2, 9)
    assert model(rows).dtype == torch.bfloat16
    terms = model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy(z_loss=1e-3).build())
    assert {terms.sum.dtype, *(value.dtype for value in terms.metrics.values())} == {torch.float32}
    assert set(terms.metrics) == {"nll", "z"}
    assert terms.tokens.dtype == torch.int64
    exact = make(dtype=torch.float64)(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy(z_loss=1e-3).build())
    torch.testing.assert_close(terms.sum.double(), exact.sum, rtol=5e-4, atol=0)


def test_refuses_what_does_not_go_together(make, tokens):
    model, rows = make(max_length=8), tokens(1, 8)
    objective = CrossEntropy().build()
    with pytest.raises(ValueError, match="max_length 8"):
        model(tokens(1, 9))
    with pytest.raises(ValueError, match="needs labels"):
        model(rows, objective=objective)
    with pytest.raises(ValueError, match="labels need an objective"):
        model(rows, labels=rows)
    with pytest.raises(ValueError, match=r"labels \(1, 7\) do not fit"):
        model(rows, labels=rows[:, 1:], objective=objective)
    with pytest.raises(ValueError, match=r"labels \(1, 8\) do not fit"):
        model(rows, labels=rows, objective=objective, at=torch.tensor([3]))
    with pytest.raises(ValueError, match="does not take images"):
        model(rows, images=rows)
    with pytest.raises(ValueError, match="one document per row"):
        model(rows, documents=rows, cache=model.new_cache(1, 8))


def test_dynamic_rope_scaling_refuses_a_cache_where_it_would_be_wrong(make, tokens):
    model = make(rope=Rope(scaling="dynamic", factor=2.0, original_max_length=6))
    rows = tokens(1, 7)
    cache = model.new_cache(1, 7)
    model(rows[:, :6], cache=cache)
    with pytest.raises(ValueError, match="does not support a cache of more than original_max_length = 6"):
        model(rows[:, 6:], cache=cache)
    assert model(rows).isfinite().all()
    with pytest.raises(GenerationError, match="dynamic rope scaling 6; ask for at most 3 new"):
        stream(model, [[1, 2, 3]], max_tokens=4)


def test_a_layer_without_rope_computes_as_if_all_tokens_were_at_position_0(make, tokens):
    rows, still = tokens(2, 9), torch.zeros(2, 9, dtype=torch.int32)
    usual = make(dtype=torch.float64, spread=10.0, attention=GQA(qk_norm="head"))
    without = make(dtype=torch.float64, spread=10.0, attention=GQA(qk_norm="head", nope_every=1))
    assert torch.equal(without(rows), usual(rows, positions=still))
    assert not torch.allclose(without(rows), usual(rows))
    listed = make(dtype=torch.float64, spread=10.0, attention=GQA(qk_norm="head", nope_layers=(1,)))
    counted = make(dtype=torch.float64, spread=10.0, attention=GQA(qk_norm="head", nope_every=2))
    assert torch.equal(listed(rows), counted(rows)) and not torch.allclose(listed(rows), without(rows))
    assert [block.attention.rotates for block in counted.blocks.values()] == [True, False] * (len(counted.blocks) // 2)


@wide()
def test_the_logit_multiplier_scales_logits_before_their_cap_and_the_loss_with_them(make, tokens):
    rows, labels = tokens(2, 9), tokens(2, 9, seed=5)
    plain = make(dtype=torch.float64, spread=10.0)
    for cap in (None, 2.0):
        scaled = make(dtype=torch.float64, spread=10.0, logit_multiplier=0.3, soft_cap=cap)
        expected = plain(rows) * 0.3 if cap is None else cap * (plain(rows) * 0.3 / cap).tanh()
        torch.testing.assert_close(scaled(rows), expected, rtol=1e-12, atol=1e-12)
        loss = scaled(rows, labels=labels, objective=CrossEntropy().build()).sum
        torch.testing.assert_close(loss, F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum"))


def test_the_embedding_multiplier_is_rounded_to_the_compute_precision_first(make, tokens):
    model = make(embed_multiplier=32**0.5, dtype=torch.bfloat16)
    seen = {}
    with listening(lambda name, x: seen.update({name: x})):
        model(tokens(1, 9))
    table = model.embed(tokens(1, 9)).float()
    expected = (table * 5.65625).bfloat16()  # sqrt(32) = 5.65685 has no closer neighbor in bf16
    assert torch.equal(seen["blocks.0.residual"], expected)
    assert not torch.equal((table * 32**0.5).bfloat16(), expected)


def test_parts_of_a_pipeline_compose_to_the_whole(make, tokens):
    whole, first, last = make(layers=3), make(layers=3), make(layers=3)
    del first.blocks["2"]
    first.norm = first.head = None
    last.embed = None
    del last.blocks["0"], last.blocks["1"]
    hidden = first(tokens(2, 9))
    assert torch.equal(last(hidden), whole(tokens(2, 9)))
    names = {**first.specs().tensors, **last.specs().tensors}
    assert names == dict(whole.specs().tensors)


def test_taps_hear_every_value_and_change_nothing(make, tokens):
    model, rows = make(spread=10.0), tokens(2, 9)
    quiet = model(rows)
    seen = {}
    with listening(lambda name, x: seen.update({name: x})):
        heard = model(rows)
    assert torch.equal(quiet, heard)
    others = (
        "router",
        "shared",
        "experts",
        "norm",
        "layer_input",
        *(f"attention.{part}" for part in ("latent", "gate", "beta", "log_decay")),
    )
    inside = [name for name in INSIDE if not name.startswith(others)]
    assert list(seen) == [
        "embeddings",
        *(f"blocks.{layer}.{name}" for layer in range(2) for name in inside),
        *("residual", "norm", "logits"),
    ]
    assert seen["blocks.0.attention.k"].shape == (2, 2, 9, 8)
    torch.testing.assert_close(seen["blocks.0.residual"], model.embed(rows))
    torch.testing.assert_close(model.head(model.norm(seen["residual"])), quiet)
    x = torch.ones(2)
    assert tap("anything", x) is x


def test_a_listener_can_edit(make, tokens):
    model, rows = make(), tokens(1, 5)

    def skip_first_attention(name, x):
        return torch.zeros_like(x) if name == "blocks.0.attention.output" else None

    with listening(skip_first_attention):
        edited = model(rows)
    with torch.no_grad():
        model.blocks["0"].attention.o_proj.weight.zero_()
    assert torch.equal(edited, model(rows))


# Dynamo looks at .grad of inner tensors and hides the warning, which an error filter raises first.
DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


COMPILED = {
    "default": {"layers": 1},
    "capped_scores_offset_norms": {
        "attention": GQA(soft_cap=2.0, window=4, global_every=2, qk_norm="head", qkv_bias=True),
        "norm": RMSNormConfig(offset=1),
        "norm_placement": "sandwich",
        "rope": Rope(partial=0.5, local_theta=100.0),
    },
    "latent_layer_norm_relu2": {
        "layers": 1,
        "attention": MLA(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10),
        "kv_heads": None,
        "norm": LayerNormConfig(),
        "mlp": ReLU2(bias=True),
        "norm_placement": "post",
    },
}


@DYNAMO
@pytest.mark.parametrize("name", fast("capped_scores_offset_norms", of=COMPILED))
def test_a_compiled_block_is_one_graph_and_gives_the_same_numbers(make, tokens, name):
    fields = COMPILED[name] | {"dtype": torch.float64, "spread": 5.0}
    model, twin, rows = make(**fields), make(**fields), tokens(2, 9)
    for block in model.blocks.values():
        block.compile(backend="aot_eager", fullgraph=True)
    arguments = {"labels": rows, "objective": CrossEntropy().build(), "documents": packed(4, 5)[0]}
    ours, theirs = model(rows, **arguments), twin(rows, **arguments)
    torch.testing.assert_close(ours.sum, theirs.sum, rtol=1e-12, atol=0)
    ours.sum.backward()
    theirs.sum.backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)
    seen = []
    with listening(lambda name, x: seen.append(name)):  # compiled blocks are heard too, eagerly
        model(rows)
    assert {f"blocks.{layer}.attention.q" for layer in model.blocks} <= set(seen)


@pytest.mark.filterwarnings("ignore")  # inductor itself uses what torch has deprecated
@pytest.mark.slow
def test_inductor_gives_the_same_numbers(make, tokens):
    model, rows = make(), tokens(2, 9)
    with wide():
        exact = make(dtype=torch.float64)(rows)
    expected = model(rows)
    for block in model.blocks.values():
        block.compile(fullgraph=True)
    assert_no_farther(model(rows), expected, exact)
