"""Attention to keys that an indexer chooses, against transformers' deepseek_v32; its loss against loops over a closed form."""

from dataclasses import replace
from math import exp, log, sqrt

import pytest
import torch

from forge_core.batch import MTPTargets
from forge_interp.attention_scores import rule_of
from forge_interp.tap_names import InterpError
from forge_models.blocks.indexer import IndexedAttention, chosen
from forge_models.components.attentions import MLA, IndexedMLA
from forge_models.components.decoder import MTPConfig
from forge_models.components.recurrent import Hybrid
from forge_models.flops import count_flops
from forge_models.objectives import CrossEntropy
from forge_models.shape import Rope
from harness.closeness import wide

LATENT = {"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
INDEXER = {"norm_eps": 1e-6, "index_heads": 6, "index_dim": 8, "top_k": 3}
YARN = Rope(theta=300.0, scaling="yarn", factor=4.0, original_max_length=16, mscale=1.0, mscale_all_dim=0.8)


@pytest.fixture
def build(make):
    """build(**options) -> a decoder in fp64 with an indexer, whose norms are neither ones nor zeros."""

    def build(rope=YARN, dtype=torch.float64, **options):
        attention = IndexedMLA(**LATENT | INDEXER | options)
        model = make(kv_heads=None, spread=12.0, rope=rope, attention=attention)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        return model.to(dtype)

    return build


def attended(attention, x, documents=None, token_mask=None):
    """Output and statistics of one layer over whole rows."""
    seen = attention.core.prepare(documents, x.shape[1], None, x.device)
    return attention(x, attention.rotary(torch.arange(x.shape[1])), seen, None, token_mask)


def drawn(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@wide()
@pytest.mark.parametrize("keys", ["chosen", "all"])
def test_output_and_gradients_equal_those_of_deepseek_v32(build, keys):
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

    model = build(keys=keys)
    shape, ours = model.shape, model.blocks["0"].attention
    yarn = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.8}
    config = DeepseekV32Config(
        hidden_size=shape.dim,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        num_hidden_layers=2,
        max_position_embeddings=64,
        index_n_heads=6,
        index_head_dim=8,
        index_topk=3 if keys == "chosen" else 64,
        **LATENT,
        rope_parameters={"rope_type": "yarn", "rope_theta": 300.0, **yarn},
        attn_implementation="eager",
    )
    theirs = DeepseekV32Attention(config, 0).double()
    heads, still, turning, rank = shape.heads, 6, 4, 12
    halves = [*range(0, turning, 2), *range(1, turning, 2)]  # of pairs that they rotate as neighbors
    queries = [head * (still + turning) + row for head in range(heads) for row in [*range(still), *(still + h for h in halves)]]
    names = {"q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm", "kv_a_proj": "kv_a_proj_with_mqa"}
    names |= {"indexer.q_proj": "indexer.wq_b", "indexer.k_proj": "indexer.wk"}
    rows = {"q_b_proj": queries, "kv_a_proj": [*range(rank), *(rank + half for half in halves)]}
    pairs = {}
    with torch.no_grad():
        for path, parameter in ours.named_parameters():
            module, _, slot = path.rpartition(".")
            pairs[path] = theirs.get_parameter(f"{names.get(module, module)}.{slot}"), rows.get(module, [*range(len(parameter))])
            pairs[path][0][pairs[path][1]] = parameter
    assert {id(one) for one, _ in pairs.values()} == {id(one) for one in theirs.parameters()}
    x = drawn(2, 11, shape.dim)
    angles = DeepseekV32RotaryEmbedding(config)(x, torch.arange(11)[None])
    hidden = torch.full((11, 11), float("-inf"), dtype=torch.float64).triu(1).expand(2, 1, 11, 11)
    expected = theirs(x, angles, hidden)[0]
    found, _ = attended(ours, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    found.square().sum().backward()
    expected.square().sum().backward()
    for path, parameter in ours.named_parameters():
        other, order = pairs[path]
        if path.startswith("indexer."):
            assert other.grad is None and parameter.grad is not None, path
        else:
            torch.testing.assert_close(parameter.grad, other.grad[order], rtol=1e-9, atol=1e-9, msg=path)


def turned(vector, place, width, theta, back=False):
    """One vector, whose first `width` dimensions are rotated half-split by its position, in plain Python."""
    out = list(vector)
    for i in range(width // 2):
        angle = place / theta ** (2 * i / width) * (-1 if back else 1)
        c, s = torch.tensor(angle).cos().item(), torch.tensor(angle).sin().item()
        out[i], out[i + width // 2] = vector[i] * c - vector[i + width // 2] * s, vector[i + width // 2] * c + vector[i] * s
    return out


@pytest.mark.parametrize("keys", ["chosen", "all"])
def test_the_gradient_of_the_loss_equals_loops_over_its_closed_form(build, keys):
    """With the gradient of KL(p || softmax(I)) with respect to I, softmax(I) - p, pulled back by hand through every step."""
    model = build(rope=Rope(theta=300.0), keys=keys, kl_weight=0.7)
    layer, length = model.blocks["0"].attention, 7
    indexer, heads, width = layer.indexer, 6, 8
    x = drawn(1, length, model.shape.dim)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    token_mask = torch.tensor([[True] * 6 + [False]])
    layer.before_step(torch.tensor(0.25, dtype=torch.float64))
    seen = {}
    layer.head_sum.register_forward_pre_hook(lambda _, given: seen.update(q=given[0][0], k=given[1][0]))
    out, statistics = attended(layer, x, documents, token_mask)
    out.sum().mul(0.0).backward()  # nothing but the loss of the indexer is left
    with torch.no_grad():
        latent = layer.query_latent(x)[0]
        projected = indexer.q_proj(latent).unflatten(-1, (heads, width)).tolist()
        raw = indexer.k_proj(x)[0]
        w = (indexer.weights_proj(x)[0] / sqrt(heads * width)).tolist()
    mean, deviation = raw.mean(-1, keepdim=True), (raw.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    unit = (raw - mean) / deviation
    normed = unit * indexer.k_norm.weight + indexer.k_norm.bias
    q = [[turned(head, t, 4, 300.0) for head in row] for t, row in enumerate(projected)]
    k = [turned(row, t, 4, 300.0) for t, row in enumerate(normed.tolist())]
    dot = [
        [[sum(a * b for a, b in zip(q[t][j], k[s], strict=True)) for s in range(length)] for j in range(heads)]
        for t in range(length)
    ]
    w_grad = torch.zeros(length, heads, dtype=torch.float64)
    q_grad, k_grad = torch.zeros(length, heads, width, dtype=torch.float64), torch.zeros(length, width, dtype=torch.float64)
    total = 0.0
    for t in range(6):
        own = [s for s in range(t + 1) if documents[0, s] == documents[0, t]]
        index = {s: sum(w[t][j] * max(dot[t][j][s], 0.0) for j in range(heads)) for s in own}
        if keys == "chosen":
            own = sorted(own, key=lambda s: (-index[s], s))[:3]
        p = dict.fromkeys(own, 0.0)
        for head in range(4):
            score = {s: exp(float(seen["q"][head, t] @ seen["k"][head, s]) * layer.scale) for s in own}
            p = {s: p[s] + score[s] / sum(score.values()) / 4 for s in own}
        norm = sum(exp(index[s]) for s in own)
        for s in own:
            share = exp(index[s]) / norm
            total += p[s] * log(p[s] / share)
            for j in range(heads):
                if dot[t][j][s] > 0:
                    w_grad[t, j] += (share - p[s]) * dot[t][j][s]
                    q_grad[t, j] += (share - p[s]) * w[t][j] * torch.tensor(k[s], dtype=torch.float64)
                    k_grad[s] += (share - p[s]) * w[t][j] * torch.tensor(q[t][j], dtype=torch.float64)
    assert statistics[0].item() == pytest.approx(total, rel=1e-6)
    assert statistics[1].item() == 6
    back = [[turned(q_grad[t, j].tolist(), t, 4, 300.0, back=True) for j in range(heads)] for t in range(length)]
    of_normed = torch.tensor([turned(k_grad[t].tolist(), t, 4, 300.0, back=True) for t in range(length)], dtype=torch.float64)
    of_unit = of_normed * indexer.k_norm.weight
    of_raw = (of_unit - of_unit.mean(-1, keepdim=True) - unit * (of_unit * unit).mean(-1, keepdim=True)) / deviation
    expected = {
        "q_proj.weight": torch.tensor(back, dtype=torch.float64).flatten(1).T @ latent,
        "k_proj.weight": of_raw.T @ x[0],
        "k_norm.weight": (of_normed * unit).sum(0),
        "k_norm.bias": of_normed.sum(0),
        "weights_proj.weight": w_grad.T @ x[0] / sqrt(heads * width),
    }
    for name, parameter in indexer.named_parameters():
        torch.testing.assert_close(parameter.grad, 0.25 * 0.7 * expected[name], rtol=1e-5, atol=1e-7, msg=name)
    for name, parameter in layer.named_parameters():
        assert name.startswith("indexer.") or not parameter.grad.any(), name


def test_the_loss_changes_no_value_and_trains_nothing_else(build, tokens):
    rows, found = tokens(2, 9), {}
    for weight in (1.0, 3.0):
        model = build(kl_weight=weight)
        terms = model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy())
        terms.sum.backward()
        found[weight] = terms.sum.item(), {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found[1.0][0] == found[3.0][0]
    for name, grad in found[1.0][1].items():
        torch.testing.assert_close(found[3.0][1][name], grad * (3 if ".indexer." in name else 1), rtol=1e-9, atol=1e-14, msg=name)


def test_a_later_token_or_another_document_changes_nothing(build, tokens):
    model, rows = build(), tokens(2, 14)
    changed = rows.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 50
    before, after = model(rows), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])
    documents = torch.tensor([[0] * 6 + [1] * 8] * 2, dtype=torch.int32)
    positions = torch.tensor([[*range(6), *range(8)]] * 2)
    together = model(rows, documents=documents, positions=positions)
    torch.testing.assert_close(together[:, :6], model(rows[:, :6]), rtol=0, atol=1e-10)
    torch.testing.assert_close(together[:, 6:], model(rows[:, 6:]), rtol=0, atol=1e-10)


def test_the_choice_matters_and_all_keys_are_those_of_mla(build, make, tokens):
    rows = tokens(2, 14)
    some, every, whole = build(), build(keys="all"), build(top_k=14)
    assert not torch.allclose(some(rows), every(rows))
    torch.testing.assert_close(whole(rows), every(rows), rtol=0, atol=1e-12)
    plain = make(kv_heads=None, rope=YARN, attention=MLA(**LATENT, norm_eps=1e-6), dtype=torch.float64)
    plain.load_state_dict({name: tensor for name, tensor in every.state_dict().items() if ".indexer." not in name})
    torch.testing.assert_close(every(rows), plain(rows), rtol=0, atol=1e-11)


def test_of_equal_scores_the_earlier_key_is_chosen():
    scores = torch.tensor([[0.0, 0.0, 2.0, 0.0, 0.0, -1.0], [-3.0, -3.0, -3.0, -3.0, -3.0, -3.0]])[None]
    seen = torch.ones(1, 2, 6, dtype=torch.bool)
    assert chosen(scores, seen, 3).int().tolist() == [[[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]]
    seen[0, :, 0] = False
    assert chosen(scores, seen, 3).int().tolist() == [[[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0]]]
    seen[0, :, 2:] = False  # fewer than top_k are visible
    assert chosen(scores, seen, 3).int().tolist() == [[[0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]]]
    assert chosen(scores, torch.ones(1, 2, 6, dtype=torch.bool), 9).all()


def test_a_report_is_the_mean_over_real_tokens_of_all_forwards(build):
    layer = build().blocks["0"].attention
    assert layer.report() == {}
    layer.before_step(torch.ones(()))
    assert layer.statistics().tolist() == [0, 0]
    x = drawn(2, 6, 32)
    one, two = (attended(layer, rows)[1] for rows in (x[:1], x[1:]))
    layer.observe(one)
    layer.observe(two)
    both = attended(layer, x)[1]
    torch.testing.assert_close(layer.statistics(), both, rtol=1e-12, atol=0)
    layer.after_step(layer.statistics(), torch.zeros(()))
    assert layer.report()["kl"].item() == pytest.approx(both[0].item() / 12)
    assert layer.eval()(x, layer.rotary(torch.arange(6)), layer.core.prepare(None, 6, None, x.device))[1] is None


def test_a_rank_with_half_of_the_heads_contributes_half(build):
    """So that sums over ranks that share the heads are those of one rank: of gradients, of the divergence and of tokens."""
    layer, x, found = build().blocks["0"].attention, drawn(2, 6, 32), []
    for ranks in (1, 2):
        layer.context = replace(layer.context, heads=4 * ranks)
        layer.zero_grad()
        out, statistics = attended(layer, x)
        out.sum().mul(0.0).backward()
        found.append((statistics, *(parameter.grad for parameter in layer.indexer.parameters())))
    for one, half in zip(*found, strict=True):
        torch.testing.assert_close(half, one / 2, rtol=1e-12, atol=0)


def test_a_compiled_block_equals_an_eager_one(build, tokens):
    rows = tokens(2, 9)
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = build(dtype=torch.float32)
        if compiled:
            for block in model.blocks.values():
                block.compile(fullgraph=True, backend="aot_eager")
        terms = model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy())
        terms.sum.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=name)


def test_attention_counts_the_chosen_keys_and_the_indexer_all(build):
    shape = build().shape
    counts = count_flops(shape)
    heads, attention, index = shape.heads, 4 * (10 + 5), 6 * 8
    assert dict(counts.widths) == {None: 2 * index, 3: 2 * attention}
    length = 20
    assert counts.forward(length) == 2 * counts.matrix + 2 * (2 * index * length + 2 * attention * 3)
    dense = count_flops(build(keys="all").shape)
    assert dict(dense.widths) == {None: 2 * (index + attention)}
    extra = 6 * 8 * 10 + 8 * 32 + 6 * 32
    assert counts.matrix - count_flops(build().shape.__class__(**{**vars(shape), "attention": MLA(**LATENT)})).matrix == 2 * extra
    assert heads == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 65}, "top_k 65 exceeds max_length 64"),
        ({"index_dim": 2}, "index_dim 2 must be at least qk_rope_head_dim 4"),
        ({"core": "flex"}, "core 'flex' does not support chosen keys"),
    ],
)
def test_settings_that_do_not_fit_are_refused(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_modules_of_multi_token_prediction_have_indexers_too(build, make, tokens):
    rows = tokens(2, 9)
    attention = IndexedMLA(**LATENT | INDEXER)
    model = make(kv_heads=None, spread=12.0, attention=attention, mtp=MTPConfig(depth=1), dtype=torch.float64)
    layers = [module for module in model.modules() if isinstance(module, IndexedAttention)]
    for layer in layers:
        layer.before_step(torch.tensor(0.5, dtype=torch.float64))
    targets = MTPTargets(rows[:, 1:, None], rows[:, 1:, None].roll(-1, 1))
    model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy(), mtp_targets=targets).sum.backward()
    assert [layer.statistics()[1].item() for layer in layers] == [16, 16, 16]
    assert all(parameter.grad.any() for layer in layers for parameter in layer.indexer.parameters())


def test_scores_of_chosen_keys_are_not_recomputed_by_another_rule(build):
    with pytest.raises(InterpError, match="its core is ChosenKeys"):
        rule_of(build(), 0)


def test_a_hybrid_needs_the_whole_rows_that_its_attention_needs():
    full = IndexedMLA(**LATENT | INDEXER)
    assert Hybrid(full_every=2, full=full).whole_rows == full.whole_rows != ()
