"""Counts against torch's counter, real parameters and figures worked out by hand."""

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forge_models.components.blocks import GQA
from forge_models.components.decoder import Decoder
from forge_models.components.objectives import CrossEntropy
from forge_models.flops import count


@pytest.mark.parametrize("fields", [{}, {"tied_embeddings": True}, {"kv_heads": 1, "head_dim": 6}])
def test_equal_torchs_counter(make, tokens, fields):
    model = make(**fields)
    counts = count(model.config)
    rows = tokens(2, 13)
    # The fused kernel counts as 0 on a CPU; the plain one computes the full square and counts as matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        terms = model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy().build())
        terms.sum.backward()
    assert counter.get_total_flops() == counts.training(12) * 2 * 12
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(rows[:, :-1])
    assert counter.get_total_flops() == counts.forward(12) * 2 * 12


@pytest.mark.parametrize("fields", [{}, {"tied_embeddings": True}, {"attention": GQA(qk_norm=True), "head_dim": 6}])
def test_parameters_equal_the_model(make, fields):
    model = make(**fields)
    counts = count(model.config)
    assert counts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert counts.mlp == sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)


def test_llama_3_8b_by_hand():
    counts = count(Decoder(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=128256))
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    assert counts.parameters == 8_030_261_248
    assert counts.training(4096) == 6 * matrices + 12 * 32 * 4096 * 4096
    # A causal query meets 1, 2, .. T keys.
    keys = sum(range(1, 4097)) / 4096
    assert counts.training(4096, causal=True) == 6 * matrices + 12 * 32 * 4096 * keys


def test_unknown_parts_are_refused():
    class Other(GQA):
        pass

    with pytest.raises(ValueError, match="Other"):
        count(Decoder(attention=Other()))


def test_counting_needs_no_torch():
    code = "import sys, forge_models.flops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
