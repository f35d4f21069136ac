"""Norms in low precision: statistics in fp32, one rounding; weights near zero keep their digits."""

import pytest
import torch

from forge_models.components.layers import LayerNormConfig, RMSNormConfig


def drawn(norm, middle):
    module = norm.build(64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(64, generator=generator) * 0.01 + middle)
    x = torch.randn(5, 64, generator=generator) * 3 + 20  # a large mean, which low precision would not survive
    return module.bfloat16(), x.bfloat16()


@pytest.mark.parametrize(
    "norm", [LayerNormConfig(), LayerNormConfig(bias=False), RMSNormConfig(), RMSNormConfig(offset=1)], ids=str
)
def test_bf16_is_fp64_rounded_once(norm):
    module, x = drawn(norm, 0.0 if getattr(norm, "offset", 0) else 1.0)
    wide, weight = x.double(), module.weight.double()
    if isinstance(norm, LayerNormConfig):
        centered = wide - wide.mean(-1, keepdim=True)
        exact = centered / (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight
        exact = exact + module.bias.double() if norm.bias else exact
    else:
        exact = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (weight + norm.offset)
    found = module(x)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last of 8 binary digits, and what fp32 adds.
    assert bool(((found.double() - exact).abs() <= exact.abs() * (2**-8 + 1e-5) + 1e-5).all())


@pytest.mark.parametrize("offset", [0, 1])
def test_gradients_of_the_rms_norm(offset):
    module = RMSNormConfig(offset=offset).build(7).double()
    torch.nn.init.normal_(module.weight)
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(module, {"weight": w}, x), (x, module.weight))
