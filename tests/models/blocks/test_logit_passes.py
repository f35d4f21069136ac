"""Logits by oneDNN: as exact as torch's own product, in the memory that was given, and only where they gain."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from forge_models.blocks.head import LEAST, TILE, ChunkedCrossEntropy, project
from harness.closeness import assert_no_farther, below

HERE = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
VOCAB = 2 * TILE + 1000
"""Two tiles and a part of one."""


def problem(vocab=VOCAB, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(96, 64, dtype=dtype), torch.randn(vocab, 64, dtype=dtype), torch.full((96, vocab), torch.nan, dtype=dtype)


def counted(hidden, weight, out):
    """The logits, and how many products of oneDNN's operator made them."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = project(hidden, weight, out)
    return found, sum(event.count for event in seen.key_averages() if event.key == "mkldnn::_linear_pointwise")


@pytest.mark.skipif(not HERE, reason="a torch without MKL or oneDNN")
def test_tiles_are_as_exact_as_one_product():
    hidden, weight, out = problem()
    assert weight.numel() >= LEAST
    found, tiles = counted(hidden, weight, out)
    assert tiles == 3 and found is out
    exact = hidden.double() @ weight.double().T
    assert_no_farther(found, hidden @ weight.T, exact)
    assert below(float((found - exact).abs().max()), 4 * float((hidden @ weight.T - exact).abs().max()))


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(VOCAB, torch.float64), (VOCAB, torch.bfloat16), (LEAST // 64 - 1, torch.float32)], ids=str
)
def test_others_keep_every_bit(vocab, dtype):
    hidden, weight, out = problem(vocab, dtype)
    found, tiles = counted(hidden, weight, out)
    assert tiles == 0 and found is out and torch.equal(found, hidden @ weight.T)


def test_it_is_off_where_torch_shall_not_use_onednn(monkeypatch):
    hidden, weight, out = problem()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    found, tiles = counted(hidden, weight, out)
    assert tiles == 0 and torch.equal(found, hidden @ weight.T)


def test_the_loss_head_by_tiles_equals_cross_entropy():
    """Loss and both gradients at a vocabulary that needs tiles, against torch in fp64 on whole logits."""
    hidden, weight, _ = problem()
    hidden, weight = hidden.requires_grad_(), (weight * 0.1).requires_grad_()
    labels = torch.randint(VOCAB, (96,))
    total = ChunkedCrossEntropy(40)(hidden, weight, labels, 0.0, None)[0]
    found = (total.detach(), *torch.autograd.grad(total, (hidden, weight)))
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, labels, reduction="sum")
    for ours, theirs in zip(found, (exact.detach(), *torch.autograd.grad(exact, wide)), strict=True):
        assert below(float((ours - theirs).norm() / theirs.norm()), 1e-6)
