"""Rotary positions against the functions of transformers: every scaling, long positions, partial rotation."""

import pytest
import torch

from forge_models.blocks.rope import Rotary, attention_factor, frequencies_of, rotate
from forge_models.shape import Rope

# Ours, and the same in a configuration of transformers.
SCALINGS = {
    "none": (Rope(theta=500.0), {"rope_type": "default", "rope_theta": 500.0}),
    "linear": (Rope(scaling="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "llama3": (
        Rope(theta=500000.0, scaling="llama3", factor=8.0, original_max_length=512, high_freq_factor=4.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
            "rope_theta": 500000.0,
        },
    ),
    "llama3_without_ramp": (
        Rope(theta=500000.0, scaling="llama3", factor=16.0, original_max_length=512, high_freq_factor=1.0),
        {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 512,
            "rope_theta": 500000.0,
        },
    ),
    "yarn": (
        Rope(scaling="yarn", factor=16.0, original_max_length=64),
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    ),
    "yarn_given_factor": (
        Rope(scaling="yarn", factor=4.0, original_max_length=256, attention_factor=0.7, beta_fast=8.0, beta_slow=2.0),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "attention_factor": 0.7,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "rope_theta": 10000.0,
        },
    ),
    "yarn_deepseek": (
        Rope(scaling="yarn", factor=8.0, original_max_length=128, mscale=1.0, mscale_all_dim=0.7, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
            "rope_theta": 10000.0,
        },
    ),
    "dynamic": (
        Rope(scaling="dynamic", factor=2.0, original_max_length=1024),
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    ),
}


def theirs(parameters, head_dim=64, longest=1024):
    """The rotary module of a Llama in transformers."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_equal_transformers_bit_by_bit(name):
    rope, parameters = SCALINGS[name]
    positions = torch.tensor([[0, 1, 2, 77, 511, 1000], [5, 130, 131, 900, 1001, 1023]])
    cos, sin = theirs(parameters)(torch.zeros(1), positions)
    turn = Rotary(64, rope)(positions)
    assert torch.equal(turn.cos.squeeze(1), cos[..., :32])
    assert torch.equal(turn.sin.squeeze(1), sin[..., :32])


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "dynamic"])
def test_frequencies_and_factor_equal_transformers(name):
    rope, parameters = SCALINGS[name]
    module = theirs(parameters)
    assert torch.equal(frequencies_of(rope, 64, torch.device("cpu")), module.inv_freq)
    assert attention_factor(rope) == pytest.approx(module.attention_scaling, rel=1e-12)


def test_scalings_differ_from_each_other():
    found = [frequencies_of(rope, 64, torch.device("cpu")) for name, (rope, _) in SCALINGS.items() if name != "dynamic"]
    for index, one in enumerate(found):
        assert not any(torch.allclose(one, other, rtol=1e-3) for other in found[index + 1 :])


@pytest.mark.parametrize("length", [900, 1024, 1025, 3000])
def test_dynamic_theta_grows_past_the_original_length_as_in_transformers(length):
    rope, parameters = SCALINGS["dynamic"]
    positions = torch.arange(length)
    cos, _ = theirs(parameters)(torch.zeros(1), positions[None])
    torch.testing.assert_close(Rotary(64, rope)(positions).cos, cos[0, :, :32], rtol=0, atol=5e-4)
    plain = Rotary(64, Rope())(positions).cos
    assert torch.equal(Rotary(64, rope)(positions).cos, plain) == (length <= 1024)


def test_dynamic_scaling_looks_at_each_document_alone():
    rope = Rope(scaling="dynamic", factor=2.0, original_max_length=4)
    lengths = (3, 9, 6)
    documents = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
    positions = torch.tensor([[place for length in lengths for place in range(length)]])
    together = Rotary(8, rope)(positions, documents).cos[0, 0]
    alone = torch.cat([Rotary(8, rope)(torch.arange(length)).cos for length in lengths])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_a_part_of_the_head_turns():
    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    turn = Rotary(4, Rope())(torch.arange(5))
    out = rotate(x, turn)
    assert torch.equal(out[..., 4:], x[..., 4:])
    # A pair (a, b) at position p turns to (a + ib) e^(i p f).
    pairs = torch.complex(x[..., :2], x[..., 2:4])
    angles = torch.arange(5)[:, None] / 10000.0 ** torch.tensor([0.0, 0.5])
    expected = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(out[..., :4], torch.cat((expected.real, expected.imag), -1))


@pytest.mark.parametrize("rows", [False, True], ids=["same positions", "positions of each row"])
@pytest.mark.parametrize("width", [16, 8], ids=["whole head", "half of it"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_heads_keep_the_order_of_projections_in_memory(width, rows, compiled):
    """Turned heads, what attention makes of them and the gradient lie as (B, T, heads, ...): flattened without a copy.
    Compiled ones are the eager ones."""
    torch.manual_seed(0)
    projected = torch.randn(2, 9, 3, 16, requires_grad=True)
    positions = torch.randint(50, (2, 9)) if rows else torch.arange(9)
    turn = Rotary(width, Rope())(positions)

    def turned(x, turn):
        return rotate(x.transpose(1, 2), turn)

    run = torch.compile(turned, backend="aot_eager", fullgraph=True) if compiled else turned
    out = run(projected, turn)
    attended = torch.nn.functional.scaled_dot_product_attention(out, out, out, is_causal=True)
    (gradient,) = torch.autograd.grad(out, projected, torch.ones(2, 9, 3, 16).transpose(1, 2))
    assert all(heads.transpose(1, 2).is_contiguous() for heads in (out, attended)) and gradient.is_contiguous()
    exact = rotate(projected.detach().double().transpose(1, 2), turn)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)


def test_gradients_with_an_attention_factor():
    rope = Rope(scaling="yarn", factor=16.0, original_max_length=64)
    turn = Rotary(8, rope)(torch.arange(6))
    x = torch.randn(1, 2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, turn), x)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scaling": "linear"}, "'linear' needs a factor"),
        ({"scaling": "llama3", "factor": 8.0}, "needs original_max_length"),
        ({"factor": 8.0}, "factor has no effect with scaling 'none'; it belongs to linear, dynamic, llama3, yarn"),
        ({"scaling": "linear", "factor": 8.0, "mscale": 1.0}, "mscale has no effect with scaling 'linear'; it belongs to yarn"),
        ({"scaling": "yarn", "factor": 8.0, "original_max_length": 8, "low_freq_factor": 2.0}, "belongs to llama3"),
        ({"scaling": "llama3", "factor": 8.0, "original_max_length": 8, "low_freq_factor": 5.0}, "must not be below"),
    ],
)
def test_rules_between_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        Rope(**fields)
