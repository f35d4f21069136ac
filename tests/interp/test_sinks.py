"""Attention patterns of heads with sinks."""

import torch

from forge_interp.attention_scores import capture_qk
from forge_models.components.attentions import GQA
from forge_models.inner_values import listening


def test_recomputed_patterns_are_those_with_sinks(make, tokens):
    """Their product with the values is what the heads write."""
    model, rows, seen = make(dtype=torch.float64, spread=10.0, attention=GQA(sinks=True, window=4)), tokens(2, 9), {}
    with torch.no_grad():
        model.blocks["1"].attention.sinks.copy_(torch.linspace(-2, 1, 4))
    with torch.no_grad(), capture_qk(model) as kept, listening(lambda name, x: seen.update({name: x})):
        model(rows)
    pattern = kept.pattern(1)
    v = seen["blocks.1.attention.v"]
    heads = pattern @ v.repeat_interleave(pattern.shape[1] // v.shape[1], 1)
    torch.testing.assert_close(heads, seen["blocks.1.attention.heads"], rtol=0, atol=1e-12)
    assert bool((pattern.sum(-1) < 1).all())
    chosen = kept.pattern(1, heads=[2], queries=[5])
    torch.testing.assert_close(chosen, pattern[:, [2], 5:6], rtol=0, atol=1e-12)
    whole = torch.cat((pattern, 1 - pattern.sum(-1, keepdim=True)), -1)
    torch.testing.assert_close(kept.entropy(1), torch.special.entr(whole).sum(-1), rtol=0, atol=1e-12)
