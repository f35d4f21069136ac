"""The attention core on a CUDA device. Runs with `pytest -m gpu`."""

import pytest
import torch

from forge_models.blocks.attention import LocalAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTH = 384


def drawn(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, 8, LENGTH, 64), (2, 2, LENGTH, 64), (2, 2, LENGTH, 64))
    return [torch.randn(s, generator=generator, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


def result(core, inputs, documents, window, soft_cap):
    """Output and gradients."""
    shared = core.prepare(documents, LENGTH, window, "cuda")
    extra = () if soft_cap is None else (soft_cap,)
    out = core(*inputs, shared, 0.125, *extra)
    weight = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.filterwarnings("ignore")  # inductor itself uses what torch has deprecated
@pytest.mark.parametrize("kind", ["auto", "flex", "varlen"])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_every_kernel_equals_the_masked_one(kind, soft_cap, window, packed):
    if kind == "varlen" and soft_cap is not None:
        pytest.skip("refused by the component")
    starts = torch.zeros(2, LENGTH, dtype=torch.int32, device="cuda")
    starts[0, 50] = starts[0, 51] = starts[0, 300] = starts[1, 200] = 1
    documents = starts.cumsum(1).int() if packed else None
    inputs = drawn(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = result(LocalAttention("sdpa", capped=soft_cap is not None), exact, documents, window, soft_cap)
    found = result(LocalAttention(kind, capped=soft_cap is not None), inputs, documents, window, soft_cap)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.double() - theirs).abs().max()) < 0.02 * float(theirs.abs().max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["auto", "varlen"])
def test_no_square_mask_exists(kind):
    length = 32768
    documents = (torch.arange(length, device="cuda") // 1000).int()[None]
    q, k, v = (torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    core = LocalAttention(kind)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    core(q, k, v, core.prepare(documents, length, None, "cuda"), 0.125).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < length * length / 4  # bytes: a quarter of one boolean mask
