"""Experts and routers with biases, and clamped gates, against the layer of gpt-oss in transformers."""

import pytest
import torch

from forge_models.blocks.moe.experts import Experts, biased
from forge_models.blocks.moe.layer import ExpertLayer
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SoftmaxTopKConfig
from forge_models.components.layers import ClampedSwiGLU
from forge_models.shape import ClampedGate

SIZES = {"dim": 16, "layers": 1, "heads": 2, "ffn_dim": 24, "vocab_size": 53, "max_length": 64}
MATRICES = ("gate_proj", "up_proj", "down_proj")


def layer(kernel):
    moe = MoEConfig(experts=5, top_k=3, kernel=kernel, router=SoftmaxTopKConfig(bias=True))
    part = DecoderConfig(**SIZES, mlp=ClampedSwiGLU(limit=0.6, slope=1.3, bias=True), moe=moe).build().blocks["0"].mlp
    assert isinstance(part, ExpertLayer)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(0, 0.4, generator=generator)
    return part


def of_gpt_oss(part):
    """The layer of transformers with the same weights, and the gradients of ours in its order."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 3}
    config = GptOssConfig(**sizes, swiglu_limit=0.6, swiglu_alpha=1.3)
    config._experts_implementation = "eager"
    theirs = GptOssMLP(config).to(part.router.weight.dtype)
    with torch.no_grad():
        for name, tensor in in_their_order(dict(part.named_parameters())).items():
            theirs.get_parameter(name).copy_(tensor)
    return theirs


def in_their_order(tensors):
    gate, up, down = (tensors[f"experts.{name}"].transpose(1, 2) for name in MATRICES)
    return {
        "router.weight": tensors["router.weight"],
        "router.bias": tensors["router.bias"],
        "experts.gate_up_proj": torch.stack((gate, up), -1).flatten(-2),
        "experts.gate_up_proj_bias": torch.stack((tensors["experts.gate_bias"], tensors["experts.up_bias"]), -1).flatten(-2),
        "experts.down_proj": down,
        "experts.down_proj_bias": tensors["experts.down_bias"],
    }


@pytest.mark.parametrize(("kernel", "dtype", "bound"), [("loop", torch.float64, 1e-12), ("grouped", torch.float32, 1e-5)])
def test_output_and_gradients_equal_those_of_gpt_oss(kernel, dtype, bound):
    part = layer(kernel).to(dtype)
    theirs, generator = of_gpt_oss(part), torch.Generator().manual_seed(4)
    x = torch.randn(3, 7, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    found, expected = part(x)[0], theirs(twin)[0].view(3, 7, 16)
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
    weight = torch.randn(found.shape, generator=generator, dtype=torch.float64).to(dtype)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=0, atol=10 * bound)
    gradients = in_their_order({name: p.grad for name, p in part.named_parameters()})
    assert gradients.keys() == dict(theirs.named_parameters()).keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs.get_parameter(name).grad, rtol=0, atol=20 * bound, msg=name)


def test_every_limit_shows():
    """Values beyond the limits on each side, by hand."""
    from forge_models.blocks.layers import activated

    gate, up = torch.tensor([-9.0, -9.0, 9.0, 9.0, 1.0]), torch.tensor([-8.0, 8.0, -8.0, 8.0, 0.5])
    low, high, one = (
        -9 / (1 + torch.tensor(9 * 1.5).exp()),
        7 / (1 + torch.tensor(-7 * 1.5).exp()),
        1 / (1 + torch.tensor(-1.5).exp()),
    )
    expected = torch.stack((-6 * low, 8 * low, -6 * high, 8 * high, 1.5 * one))
    torch.testing.assert_close(activated(ClampedGate(7.0, 1.5), gate, up), expected)


def test_rows_of_no_expert_change_no_bias():
    """As after tokens were dropped: rows beyond the counts have a gradient, but belong to nobody."""
    rows, bias = torch.ones(7, 3, dtype=torch.float64), torch.arange(12.0, dtype=torch.float64).view(4, 3).requires_grad_()
    counts = torch.tensor([2, 0, 3, 0])
    out = biased(rows, bias, counts)
    torch.testing.assert_close(out[:5], rows[:5] + bias[[0, 0, 2, 2, 2]])
    out.backward(torch.arange(21.0, dtype=torch.float64).view(7, 3))
    expected = torch.zeros(4, 3, dtype=torch.float64)
    expected[0], expected[2] = torch.tensor([3.0, 5, 7]), torch.tensor([27.0, 30, 33])
    torch.testing.assert_close(bias.grad, expected)
    none = biased(rows[:0], bias, torch.zeros(4, dtype=torch.int64))
    assert none.shape == (0, 3)
    none.sum().backward()
    assert isinstance(layer("loop").experts, Experts)
