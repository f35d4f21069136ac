"""Captured values, scores and patterns against transformers, on folders that both read."""

from copy import deepcopy

import pytest
import torch

from forge_core.batch import PADDING
from forge_interp.attention_scores import capture_qk
from forge_interp.captures import capture
from forge_interp.tap_names import InterpError
from forge_models.components.attentions import GQA
from forge_models.hf.converter import HfConverter
from forge_train.inference.stored import load_model
from harness.closeness import wide
from models.hf.zoo import CASES, random_model, saved, tokens

FAMILIES = ("llama", "gemma2", "qwen3_moe", "deepseek_v3-yarn", "olmo2")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """Our model and transformers' own, both in fp64, and what the latter says of its inside."""
    theirs = random_model(*CASES[request.param])
    ours = load_model(HfConverter().build().read(saved(theirs, tmp_path_factory.mktemp("hf") / "folder")))
    config = deepcopy(theirs.config)
    config._attn_implementation = config._experts_implementation = "eager"
    ids = tokens(2, 12)
    with wide(), torch.no_grad():
        twin = type(theirs)._from_config(config, dtype=torch.float64).eval()
        twin.load_state_dict(theirs.state_dict())
        said = twin(ids, output_hidden_states=True, output_attentions=True)
    return ours.double(), said, ids


@wide()
def test_the_stream_and_patterns_equal_those_of_transformers(pair):
    ours, said, ids = pair
    with torch.no_grad():
        plain = ours(ids)
        with capture(ours, ["embeddings", "*residual", "*residual_after", "norm", "logits"]) as seen, capture_qk(ours) as kept:
            assert torch.equal(ours(ids), plain)
    layers = len(said.attentions)
    assert kept.layers == list(range(layers))
    torch.testing.assert_close(seen["hook_embed"], said.hidden_states[0], rtol=0, atol=1e-10)
    for layer in range(layers):
        torch.testing.assert_close(seen[f"blocks.{layer}.hook_resid_pre"], said.hidden_states[layer], rtol=1e-10, atol=1e-9)
        torch.testing.assert_close(kept.pattern(layer), said.attentions[layer], rtol=1e-9, atol=1e-10)
        p = said.attentions[layer]
        entropy = -torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0).sum(-1)
        torch.testing.assert_close(kept.entropy(layer), entropy, rtol=1e-8, atol=1e-9)
        if layer:
            assert torch.equal(seen[f"blocks.{layer}.residual"], seen[f"blocks.{layer - 1}.residual_after"])
    torch.testing.assert_close(seen["norm"], said.hidden_states[-1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(seen["logits"], said.logits, rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(kept.pattern(1, heads=[3, 0], queries=[11, 2]), said.attentions[1][:, [3, 0]][:, :, [11, 2]])


def test_scores_are_those_of_the_formula(make, tokens):
    model, rows = make(spread=5.0, dtype=torch.float64, attention=GQA(window=4, scale=0.7), kv_heads=2), tokens(2, 9)
    with capture_qk(model, layers=[1]) as kept, capture(model, ["attention.q", "attention.k"], layers=[1]) as seen:
        model(rows)
    q, k = seen["blocks.1.attention.q"], seen["blocks.1.attention.k"]
    scores = kept.scores(1)
    for row, head, query, key in ((0, 0, 3, 1), (1, 3, 8, 5), (1, 2, 8, 8)):
        expected = 0.7 * float(q[row, query, head] @ k[row, key, head // 2])
        assert float(scores[row, head, query, key]) == pytest.approx(expected, rel=1e-12)
    hidden = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3).logical_not()
    assert bool((scores[..., hidden] == float("-inf")).all())
    assert bool(scores[..., ~hidden].isfinite().all())
    torch.testing.assert_close(kept.max_logit(1), scores.amax((0, 2, 3)), rtol=0, atol=0)
    torch.testing.assert_close(kept.max_logit(1, heads=[2], queries=range(3)), scores[:, 2:3, :3].amax((0, 2, 3)))


def test_documents_do_not_see_each_other(make, tokens):
    model, row = make(spread=5.0), tokens(1, 9)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, PADDING, PADDING]], dtype=torch.int32)
    with capture_qk(model) as kept:
        model(row, documents=documents)
    together = kept.pattern(1)
    assert not together[:, :, 4:7, :4].any()
    with capture_qk(model) as kept:
        model(row[:, 4:7])
    torch.testing.assert_close(together[:, :, 4:7, 4:7], kept.pattern(1), rtol=1e-4, atol=1e-6)


def test_long_rows_are_taken_in_pieces(make, tokens, monkeypatch):
    model, rows = make(spread=5.0), tokens(2, 9)
    with capture_qk(model) as kept:
        model(rows)
    entropy, largest = kept.entropy(0), kept.max_logit(0)
    monkeypatch.setattr("forge_interp.attention_scores.QUERY_CHUNK", 4)
    torch.testing.assert_close(kept.entropy(0), entropy)
    torch.testing.assert_close(kept.max_logit(0), largest)
    assert kept.entropy(0).shape == (2, 4, 9)
    assert bool((kept.entropy(0)[:, :, 0] == 0).all())


class Ring:
    """A core that a strategy put there."""

    def prepare(self, *_):
        return None

    def __call__(self, q, k, v, shared, scale):
        return q


def test_what_has_no_scores_is_refused(make, tokens):
    model, rows = make(), tokens(1, 9)
    with capture_qk(model, layers=[-1]) as kept:
        with pytest.raises(InterpError, match="no forward ran"):
            kept.scores(1)
        model(rows)
    with pytest.raises(InterpError, match="layer 0 was not kept; kept: 1"):
        kept.scores(0)
    with pytest.raises(InterpError, match="head 4 of layer 1 does not exist: it has 4"):
        kept.pattern(1, heads=[4])
    with pytest.raises(InterpError, match="query 9 is beyond the 9 tokens"):
        kept.pattern(1, queries=[9])
    with pytest.raises(InterpError, match="must not be empty"):
        kept.pattern(1, queries=[])
    with pytest.raises(InterpError, match="has a cache"), capture_qk(model):
        model(rows, cache=model.new_cache(1, 9))
    model.blocks["0"].attention.core = Ring()
    with (
        pytest.raises(InterpError, match=r"blocks.0.attention: its core is Ring; scores can be recomputed for LocalAttention"),
        capture_qk(model),
    ):
        pass
