"""Attention to compressed keys, against transformers' deepseek_v4, and what must hold for documents, caches and the indexer."""

from math import exp, log

import pytest
import torch

from forge_core.batch import MTPTargets
from forge_interp.attention_scores import rule_of
from forge_interp.tap_names import InterpError
from forge_models.blocks.compressed_attention import SparseCompressedAttention
from forge_models.blocks.compression import windows_of
from forge_models.components.compressed import CompressedMQA
from forge_models.components.decoder import MTPConfig
from forge_models.components.layers import LayerNormConfig, RMSNormConfig
from forge_models.flops import count_flops
from forge_models.objectives import CrossEntropy
from forge_models.shape import CompressedKeys, Rope
from harness.closeness import wide

SIZES = {"window": 5, "q_lora_rank": 10, "o_groups": 2, "o_lora_rank": 7, "sparse_rate": 3, "heavy_rate": 4}
INDEXER = {"index_heads": 6, "index_dim": 6, "top_k": 2}
YARN = Rope(
    theta=300.0,
    local_theta=50.0,
    partial=0.5,
    scaling="yarn",
    factor=4.0,
    original_max_length=16,
    attention_factor=1.0,
)
KINDS = ("window", "sparse", "heavy")
THEIRS = {"window": "sliding_attention", "sparse": "compressed_sparse_attention", "heavy": "heavily_compressed_attention"}
NAMES = {
    "o_a_proj.groups": "o_a_proj.weight",
    "indexer.q_proj": "compressor.indexer.q_b_proj",
    "indexer.weights_proj": "compressor.indexer.scorer.weights_proj",
    "indexer.compressor": "compressor.indexer",
}


@pytest.fixture
def build(make):
    """build(**options) -> a decoder in fp64 with a layer of each kind; norms, sinks and biases are neither ones nor zeros."""

    def build(rope=YARN, dtype=torch.float64, kinds=KINDS, **options):
        attention = CompressedMQA(**SIZES | INDEXER | {"kinds": kinds} | options)
        sizes = {"kv_heads": None, "head_dim": 8, "layers": len(kinds), "norm": RMSNormConfig(eps=1e-5)}
        model = make(**sizes, spread=12.0, rope=rope, attention=attention)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5)
        return model.to(dtype)

    return build


def drawn(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attended(attention, x, documents=None, token_mask=None):
    """Output and statistics of one layer over whole rows."""
    seen = attention.core.prepare(documents, x.shape[1], attention.window, x.device)
    further = (token_mask,) if isinstance(attention, SparseCompressedAttention) else ()
    found = attention(x, attention.rotary(torch.arange(x.shape[1])), seen, None, *further)
    return found if isinstance(found, tuple) else (found, None)


def reference(model, layer):
    """transformers' attention with the parameters of a layer, and its parameter for each of ours."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention

    shape, attention = model.shape, model.shape.attention
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.0}
    partial = {"partial_rotary_factor": 0.5}
    config = DeepseekV4Config(
        hidden_size=shape.dim,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        num_hidden_layers=3,
        layer_types=[THEIRS[kind] for kind in KINDS],
        compress_rates={THEIRS["sparse"]: attention.sparse_rate, THEIRS["heavy"]: attention.heavy_rate},
        sliding_window=attention.window,
        max_position_embeddings=64,
        index_n_heads=attention.index_heads,
        index_head_dim=attention.index_dim,
        index_topk=attention.top_k,
        q_lora_rank=attention.q_lora_rank,
        o_groups=attention.o_groups,
        o_lora_rank=attention.o_lora_rank,
        rms_norm_eps=1e-5,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 50.0, **partial},
            "compress": {"rope_theta": 300.0, **yarn, **partial},
        },
        attn_implementation="eager",
    )
    theirs = DeepseekV4Attention(config, layer).double()
    ours = model.blocks[str(layer)].attention
    pairs = {}
    with torch.no_grad():
        for path, parameter in ours.named_parameters():
            other = path
            for mine, name in NAMES.items():
                other = other.replace(mine, name, 1) if other.startswith(mine) else other
            pairs[path] = theirs.get_parameter(other)
            pairs[path].copy_(parameter.view(pairs[path].shape))
    assert {id(one) for one in pairs.values()} == {id(one) for one in theirs.parameters()}
    return config, theirs, pairs


@wide()
@pytest.mark.parametrize("layer", range(3), ids=KINDS)
@pytest.mark.parametrize("length", [17, 3], ids=["long", "shorter than a window of tokens"])
def test_output_and_gradients_equal_those_of_deepseek_v4(build, layer, length):
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    model = build()
    ours = model.blocks[str(layer)].attention
    config, theirs, pairs = reference(model, layer)
    x, places = drawn(2, length, model.shape.dim), torch.arange(length)[None]
    angles = {name: DeepseekV4RotaryEmbedding(config)(x, places, name) for name in ("main", "compress")}
    distance = places[0][:, None] - places[0]
    hidden = torch.zeros(length, length, dtype=torch.float64).masked_fill((distance < 0) | (distance >= 5), float("-inf"))
    expected = theirs(x, angles, places.expand(2, -1), hidden.expand(2, 1, -1, -1).clone())[0]
    found, _ = attended(ours, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    found.square().sum().backward()
    expected.square().sum().backward()
    for path, parameter in ours.named_parameters():
        if path.startswith("indexer."):
            assert not (pairs[path].grad is not None and pairs[path].grad.any()), path
        elif pairs[path].grad is None:  # transformers computes no compressed keys of less than a window
            assert length == 3 and not parameter.grad.any(), path
        else:
            torch.testing.assert_close(parameter.grad, pairs[path].grad.view(parameter.shape), rtol=1e-9, atol=1e-9, msg=path)


@pytest.mark.parametrize("layer", range(3), ids=KINDS)
def test_a_later_token_changes_nothing_before_it(build, layer):
    attention, x = build().blocks[str(layer)].attention.eval(), drawn(2, 19, 32)
    before = attended(attention, x)[0]
    for place in range(19):
        changed = x.clone()
        changed[:, place] += 1
        after = attended(attention, changed)[0]
        assert torch.equal(before[:, :place], after[:, :place]), place
        assert not torch.isclose(before[:, place], after[:, place]).all(-1).any(), place


def test_documents_of_a_row_equal_rows_of_their_own(build, tokens):
    """Compressed windows begin where a document does, and none has tokens of two."""
    model, lengths = build(), (7, 1, 13, 2, 6)
    rows = tokens(2, sum(lengths))
    documents = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]] * 2, dtype=torch.int32)
    positions = torch.tensor([[place for length in lengths for place in range(length)]] * 2)
    alone = torch.cat([model(part) for part in rows.split(lengths, 1)], 1).detach()
    together = model(rows, documents=documents, positions=positions)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12 * float(alone.abs().max()))
    others = torch.tensor([4, 0, 7, 2, 9], dtype=torch.int32)[documents.long()]  # numbers in any order
    torch.testing.assert_close(model(rows, documents=others, positions=positions), together, rtol=0, atol=0)


def test_a_document_has_no_gradient_from_another(build):
    documents = torch.tensor([[0] * 10 + [1] * 9], dtype=torch.int32)
    for layer in range(3):
        attention, x = build().blocks[str(layer)].attention, drawn(1, 19, 32).requires_grad_()
        attended(attention, x, documents)[0][:, 10:].square().sum().backward()
        assert not x.grad[:, :10].any() and x.grad[:, 10:].all(), layer


def test_windows_by_hand():
    """Documents of 5, 1 and 4 tokens, then padding; windows of 2."""
    documents = torch.tensor([[0] * 5 + [1] + [2] * 4 + [-1] * 2, [3] * 12], dtype=torch.int32)
    found = windows_of(documents, 12, 3, 2, "cpu")
    assert found.last.tolist() == [[1, 3, 7, 9, 11, 11], [1, 3, 5, 7, 9, 11]]
    assert found.begins.tolist() == [[True, False, True, False, True, True], [True] + [False] * 5]
    assert found.first(2).tolist()[0] == [0, 2, 6, 8, 10, 10]
    seen = [[row.nonzero().flatten().tolist() for row in rows] for rows in found.entries.squeeze(1)]
    assert seen[0] == [[], [0], [0], [0, 1], [0, 1], [], [], [2], [2], [2, 3], [], [4]]
    assert seen[1] == [[*range((place + 1) // 2)] for place in range(12)]
    assert found.keys[0, 0, 4].nonzero().flatten().tolist() == [2, 3, 4]
    whole = windows_of(None, 12, 3, 2, "cpu")
    assert torch.equal(whole.entries, found.entries[1:]) and torch.equal(whole.last, found.last[1:])
    assert torch.equal(whole.begins, found.begins[1:]) and torch.equal(whole.keys, found.keys[1:])


def test_a_cache_equals_the_whole_forward_and_can_go_back(build, tokens):
    model, rows = build().eval(), tokens(2, 23)
    with torch.no_grad():
        whole = model(rows)
        for chunks in ((1,) * 23, (5, 1, 9, 8), (2, 21)):
            cache = model.new_cache(2, 23)
            found = torch.cat([model(part, cache=cache) for part in rows.split(chunks, 1)], 1)
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-11)
        cache = model.new_cache(2, 30)
        model(rows[:, :9], cache=cache)
        model(tokens(2, 7, seed=8), cache=cache)  # a draft that is rejected
        cache.rewind(9)
        torch.testing.assert_close(model(rows[:, 9:], cache=cache), whole[:, 9:], rtol=0, atol=1e-11)


def test_positions_of_a_row_may_begin_later(build, tokens):
    """Attention depends on distances: the output is rotated back by the position of the query."""
    model, rows = build(rope=Rope(theta=300.0, partial=0.5)), tokens(2, 17)
    at = torch.arange(17)
    torch.testing.assert_close(model(rows, positions=at + 13), model(rows, positions=at), rtol=0, atol=1e-4)


def test_the_indexer_learns_from_attention_to_the_chosen_keys(build):
    """Its loss against loops; nothing else of the layer gets a gradient from it."""
    model = build(kl_weight=0.7)
    layer, length, rate = model.blocks["1"].attention, 11, 3
    x, documents = drawn(1, length, 32), torch.tensor([[0] * 8 + [1] * 3], dtype=torch.int32)
    token_mask = torch.tensor([[True] * 10 + [False]])
    layer.before_step(torch.tensor(0.25, dtype=torch.float64))
    kept = {}
    layer.head_sum.register_forward_pre_hook(lambda _, given: kept.update(q=given[0][0], k=given[1][0, 0], seen=given[2][0]))
    layer.indexer.register_forward_hook(lambda *given: kept.update(scores=given[2]))
    out, statistics = attended(layer, x, documents, token_mask)
    kept["scores"].retain_grad()
    out.sum().mul(0.0).backward()
    total, expected = 0.0, torch.zeros(length, length // rate, dtype=torch.float64)
    for t in range(10):
        entries = [0] if 2 <= t < 5 else [0, 1] if 5 <= t < 8 else []
        index = {e: kept["scores"][0, t, e].item() for e in entries}
        p = dict.fromkeys(entries, 0.0)
        for head in range(4):
            seen = [s for s in range(length) if kept["seen"][t, s]] + [length + e for e in entries]
            score = {s: exp((kept["q"][head, t] @ kept["k"][s]).item() * layer.scale) for s in seen}
            norm = sum(score.values()) + exp(layer.sinks[head].item())
            p = {e: p[e] + score[length + e] / norm for e in entries}
        norm = sum(exp(value) for value in index.values())
        for e in entries:
            p_e, share = p[e] / sum(p.values()), exp(index[e]) / norm
            total += p_e * log(p_e / share)
            expected[t, e] = 0.25 * 0.7 * (share - p_e)
    assert total > 0.1
    assert statistics.tolist() == pytest.approx([total, 10], rel=1e-9)
    torch.testing.assert_close(kept["scores"].grad[0], expected, rtol=1e-9, atol=1e-12)
    for name, parameter in layer.named_parameters():
        assert name.startswith("indexer.") == bool(parameter.grad.any()), name
    assert layer.eval()(x, layer.rotary(torch.arange(length)), layer.core.prepare(None, length, 5, x.device))[1] is None


def test_the_choice_of_the_indexer_matters_only_below_all_entries(build, tokens):
    rows = tokens(2, 12)
    some, three, four = (build(top_k=top_k)(rows) for top_k in (1, 3, 4))
    assert not torch.allclose(some, four)
    assert torch.equal(three[:, :11], four[:, :11]) and not torch.allclose(three[:, 11], four[:, 11])


def test_modules_of_multi_token_prediction_see_a_window(build, make, tokens):
    rows = tokens(2, 9)
    attention = CompressedMQA(**SIZES | INDEXER, kinds=("heavy", "sparse"))
    sizes = {"kv_heads": None, "head_dim": 8, "rope": Rope(partial=0.5), "attention": attention, "mtp": MTPConfig(depth=1)}
    model = make(**sizes, spread=12.0, dtype=torch.float64)
    assert type(model.mtp.depths["1"].block.attention).__name__ == "WindowAttention"
    assert model.shape.windows() == (None, None, 5)
    targets = MTPTargets(rows[:, 1:, None], rows[:, 1:, None].roll(-1, 1))
    model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy(), mtp_targets=targets).sum.backward()
    assert model.mtp.depths["1"].block.attention.sinks.grad.all()


def test_without_kinds_layers_are_those_of_deepseek_v4_pro():
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    published = DeepseekV4Config(num_hidden_layers=7).layer_types
    assert [THEIRS[CompressedMQA().kind_at(layer, 7)] for layer in range(7)] == published


@pytest.mark.slow
def test_a_compiled_block_equals_an_eager_one(build, tokens):
    rows, found = tokens(2, 9), []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = build(dtype=torch.float32)
        if compiled:
            for block in model.blocks.values():
                block.compile(fullgraph=True, backend="aot_eager")
        model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy()).sum.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=name)


def test_products_are_counted_by_the_keys_of_a_query(build):
    model = build()
    counts, length = count_flops(model.shape), 20
    attention, index = 2 * 4 * 8, 6 * 6
    assert dict(counts.widths) == {
        5: 3 * attention,
        CompressedKeys(3, 2): attention,
        CompressedKeys(3): index,
        CompressedKeys(4): attention,
    }
    assert counts.forward(length) == 2 * counts.matrix + 2 * (attention * (3 * 5 + 2 + 5) + index * 6)
    means = {CompressedKeys(3, 2): 0.0, CompressedKeys(3): 0.0, CompressedKeys(4): 0.0, 5: 0.0}
    windows = {3: windows_of(None, length, 5, 3, "cpu"), 4: windows_of(None, length, 5, 4, "cpu")}
    for keys in means:
        if isinstance(keys, CompressedKeys):
            seen = windows[keys.rate].entries.sum(-1).double()
            means[keys] = seen.clamp(max=keys.limit or length).mean().item()
            assert keys.mean(length) == pytest.approx(means[keys])
        else:
            means[keys] = windows[3].keys.sum(-1).double().mean().item()
    products = sum(counts.widths[keys] * mean for keys, mean in means.items())
    assert counts.forward(length, causal=True) == pytest.approx(2 * counts.matrix + 2 * products)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name != "embed.weight")
    assert counts.matrix == weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 22}, "top_k 22 exceeds max_length 64 / sparse_rate 3"),
        ({"index_dim": 3}, "index_dim 3 must be at least 4"),
        ({"o_groups": 3}, "o_groups 3 must divide heads 4"),
        ({"kinds": ("window",)}, "kinds has 1 entries, but the model has 3 layers"),
        ({"kinds": ("heavy", "sparse", "heavy"), "rope": {"local_theta": 9.0}}, "local_theta needs layers that see a window"),
        ({"rope": {"scaling": "dynamic", "factor": 2.0, "original_max_length": 8}}, "does not support rope.scaling = 'dynamic'"),
        ({"rope": {"partial": 0.4}}, "3 of head_dim 8 dimensions rotate"),
        ({"rope": {"partial": 0.1}}, "0 of head_dim 8 dimensions rotate"),
        ({"kv_heads": 2}, "one key for all heads; remove kv_heads 2"),
        ({"norm": LayerNormConfig()}, None),  # has an eps
    ],
)
def test_settings_that_do_not_fit_are_refused(make, options, message):
    fields = {name: options[name] for name in ("kv_heads", "norm") if name in options}
    options = {name: value for name, value in options.items() if name not in fields}
    rope, options = Rope(**{"partial": 0.5} | options.get("rope", {})), {k: v for k, v in options.items() if k != "rope"}
    attention = CompressedMQA(**SIZES | INDEXER | {"kinds": KINDS} | options)
    sizes = {"head_dim": 8, "layers": 3, "rope": rope, "attention": attention} | {"kv_heads": None} | fields
    if message is None:
        make(**sizes)
        return
    with pytest.raises(ValueError, match=message):
        make(**sizes)


def test_scores_are_not_recomputed_by_another_rule(build):
    with pytest.raises(InterpError, match="its core is SharedKeysWithSinks"):
        rule_of(build(), 0)
