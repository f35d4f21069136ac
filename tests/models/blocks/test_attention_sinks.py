"""Sinks of attention: one logit of each head that enters the softmax and is dropped."""

import pytest
import torch
from torch.nn.attention import flex_attention

from forge_models.blocks import attention
from forge_models.blocks.attention import LocalAttention
from forge_models.components.attentions import GQA
from harness.closeness import wide


def with_sinks(make, **options):
    """A model in fp64 whose sinks are neither 0 nor equal."""
    model = make(dtype=torch.float64, spread=10.0, attention=GQA(sinks=True, **options))
    with torch.no_grad():
        for block in model.blocks.values():
            block.attention.sinks.copy_(torch.linspace(-2, 1, len(block.attention.sinks)))
    return model


@wide()
def test_output_and_gradients_equal_those_of_gpt_oss(make):
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

    model = make(dtype=torch.float64, attention=GQA(sinks=True, qkv_bias=True, output_bias=True), head_dim=12)
    shape, ours = model.shape, model.blocks["0"].attention
    config = GptOssConfig(
        hidden_size=shape.dim,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=2,
        head_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        attn_implementation="eager",
    )
    theirs = GptOssAttention(config, 1).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            ours.get_parameter(name).copy_(parameter)
    x = torch.randn(2, 9, shape.dim, generator=generator, dtype=torch.float64)
    angles = GptOssRotaryEmbedding(config)(x, torch.arange(9)[None])
    expected = theirs(x, angles, torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)[None, None])[0]
    found = ours(x, ours.rotary(torch.arange(9)), None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs.get_parameter(name).grad, rtol=1e-9, atol=1e-10)


def test_a_sink_of_minus_infinity_is_attention_without_one(make, tokens):
    model, plain = with_sinks(make), make(dtype=torch.float64, spread=10.0, attention=GQA())
    weights = model.state_dict()
    plain.load_state_dict({name: tensor for name, tensor in weights.items() if not name.endswith("sinks")})
    assert not torch.allclose(model(tokens(2, 9)), plain(tokens(2, 9)))
    with torch.no_grad():
        for block in model.blocks.values():
            block.attention.sinks.fill_(-1e4)
    torch.testing.assert_close(model(tokens(2, 9)), plain(tokens(2, 9)), rtol=0, atol=1e-12)


def test_flex_equals_the_softmax_written_out(monkeypatch):
    """In the plain form that torch has of it, with documents and a window."""
    plain = {"_validate_device": lambda *_: None, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}
    for name, value in plain.items():
        monkeypatch.setattr(flex_attention, name, value)
    monkeypatch.setattr(attention, "_compiled", lambda name: getattr(flex_attention, name))
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, 128, 16, generator=generator, dtype=torch.float64) for h in (6, 2, 2))
    leaves = [x.requires_grad_() for x in (q, k, v, torch.linspace(-3, 3, 6, dtype=torch.float64))]
    documents = (torch.arange(128) // 40).int().expand(2, -1)
    grad = torch.randn(2, 6, 128, 16, generator=generator, dtype=torch.float64)

    def results(out):
        return [out, *torch.autograd.grad(out, leaves, grad)]

    blocks = attention.block_mask(documents, 128, 9, torch.device("cpu"))
    seen = attention.mask(documents, 128, 9, torch.device("cpu"))
    found = results(attention.flex(q, k, v, blocks, 0.3, None, leaves[3]))
    expected = results(LocalAttention()(q, k, v, seen, 0.3, sinks=leaves[3]))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_a_later_token_changes_no_earlier_logit(make, tokens):
    model, rows = with_sinks(make, window=4), tokens(2, 9)
    changed = rows.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 50
    before, after = model(rows), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6], after[:, 6])


def test_kernels_without_sinks_are_refused_by_name():
    with pytest.raises(ValueError, match="core 'varlen' does not support sinks"):
        GQA(sinks=True, core="varlen")
