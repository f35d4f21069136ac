"""The gate on the output of attention against the attention of Qwen3-Next in transformers."""

import pytest
import torch

from forge_models.components.attentions import GQA
from forge_models.components.layers import RMSNormConfig
from forge_models.shape import Rope
from harness.closeness import wide


@pytest.mark.parametrize("bias", [False, True])
@wide()
def test_output_and_gradients_equal_those_of_qwen3_next(make, tokens, bias):
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

    attention = GQA(output_gate=True, qk_norm="head", qkv_bias=bias, output_bias=bias)
    rope, norm = Rope(theta=300.0, partial=0.5), RMSNormConfig(offset=1, eps=1e-3)
    model = make(dtype=torch.float64, spread=10.0, attention=attention, head_dim=12, rope=rope, norm=norm)
    ours = model.blocks["0"].attention
    shape = model.shape
    config = Qwen3NextConfig(
        hidden_size=shape.dim,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=12,
        attention_bias=bias,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        attn_implementation="eager",
    )
    theirs = Qwen3NextAttention(config, 0).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            dict(ours.named_parameters())[name].copy_(parameter)
    x = torch.randn(2, 9, shape.dim, generator=generator, dtype=torch.float64)
    angles = Qwen3NextRotaryEmbedding(config)(x, torch.arange(9)[None])
    hidden = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected = theirs(x, angles, hidden)[0]
    found = ours(x, ours.rotary(torch.arange(9)), None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs.get_parameter(name).grad, rtol=1e-9, atol=1e-10)


def test_a_later_token_changes_no_earlier_logit(make, tokens):
    model, rows = make(dtype=torch.float64, spread=10.0, attention=GQA(output_gate=True)), tokens(2, 9)
    changed = rows.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 50
    before, after = model(rows), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6], after[:, 6])
    documents = torch.tensor([[0] * 4 + [1] * 5] * 2, dtype=torch.int32)
    together = model(rows, documents=documents, positions=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2))
    torch.testing.assert_close(together[:, :4], model(rows[:, :4]), rtol=0, atol=1e-12)
