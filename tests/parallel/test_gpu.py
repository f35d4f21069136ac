"""What only a CUDA device can show. Runs with `pytest -m gpu`."""

from typing import Literal

import pytest
import torch

from forge_core.layout import Layout
from forge_core.protocols.model import Placed
from forge_core.specs import Init, TensorSpec
from forge_models.components.decoder import Decoder
from forge_models.components.objectives import CrossEntropy
from forge_parallel.attention import flash_cpu, flex_blocks
from forge_parallel.boxes import Box
from forge_parallel.clipping import clip
from forge_parallel.components.optimizers import AdamW
from forge_parallel.components.transforms import Float8
from forge_parallel.init import fill
from forge_parallel.parity import Case, Measurement, compare, measure, share, synthetic
from forge_parallel.plan import Plan
from forge_parallel.realization import Blueprint, realize
from forge_parallel.step import Step
from forge_parallel.topology import Topology
from parallel.tiny import VOCAB, Tiny, cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CASE = Case(Tiny, cross_entropy, AdamW(lr=1e-2).build, VOCAB)


def test_initial_weights_of_a_box_are_those_of_the_whole() -> None:
    spec = TensorSpec((None, None), Init("normal", 0.02), "matrix")
    whole, part = torch.empty(300, 700, device="cuda"), torch.empty(100, 50, device="cuda")
    fill(Box((300, 700), (0, 0), whole), spec, "w", 0)
    fill(Box((300, 700), (150, 600), part), spec, "w", 0)
    assert torch.equal(part, whole[150:250, 600:650])
    assert abs(whole.std() / 0.02 - 1) < 0.02


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_of_the_ring_is_that_of_a_cpu(packed: bool, dtype: torch.dtype) -> None:
    """Flex attention and its differentiated join against the flash kernel of a CPU in fp64, which tests compare with torch."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 256, 64), (2, 384, 64), (2, 384, 32), (4, 256, 32))
    q, k, v, grad = (torch.randn(2, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    documents = (torch.arange(640, dtype=torch.int32) // 150).repeat(2, 1) if packed else None
    held = [
        Placed(torch.arange(start, start + length), None if documents is None else documents[:, start : start + length])
        for start, length in ((384, 256), (0, 384))
    ]
    results = []
    for kernel, device, wide in ((flash_cpu, "cpu", torch.float64), (flex_blocks, "cuda", dtype)):
        moved = [x.to(device, wide) for x in (q, k, v, grad)]
        placed = [Placed(x.places.to(device), None if x.documents is None else x.documents.to(device)) for x in held]
        mask = kernel.mask_between(*placed, 300)
        out, sums = kernel.forward(*moved[:3], mask, False, 0.125)
        joined = sums.logaddexp(torch.zeros_like(sums))  # another block has a log-sum-exp of 0 and values of 0
        whole = out * (sums - joined).exp().unsqueeze(-1).to(out.dtype)
        results.append([out, *kernel.backward(moved[3], *moved[:3], whole, joined, mask, False, 0.125)])
    for expected, found in zip(*results, strict=True):
        error = (found.cpu().double() - expected).abs().max() / expected.abs().max()
        assert error < (2e-2 if dtype == torch.bfloat16 else 5e-3)  # flex may multiply fp32 in TF32


def test_no_host_synchronisation_in_a_step() -> None:
    layout = Layout()
    model = realize(Blueprint.of(Tiny), Plan.of([], layout), Topology(layout, torch.device("cuda", 0)), 0, "bf16")
    step, optimizer = Step(model, cross_entropy), AdamW().build(model)
    batches = [batch.to("cuda") for batch in share(synthetic(CASE, 0), 0, 1, 4)]
    step(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = step(batches)
        clip(model, result.norm, 1.0)
        optimizer.step(result.skip)
        optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.numbers()["skipped"] == 0


def test_micro_batches_leave_the_numbers_alone() -> None:
    device = torch.device("cuda", 0)
    whole, cut = (measure(Case(**{**vars(CASE), "micro_batch": size}), Layout(), [], device) for size in (8, 1))
    assert compare(whole, cut).accepted("fp64")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_products_of_the_device_are_the_emulated_ones(recipe: Literal["tensorwise", "rowwise"]) -> None:
    """Kernels may sum with fewer digits than fp32 has; an operand that then differs in its last bit may be cast to a neighbor. So
    the two may be as far apart as float8 is from bf16, and no farther."""
    pytest.importorskip("torchao")
    decoder = Decoder(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=61, max_length=32)
    case = Case(
        decoder.build, CrossEntropy().build(), AdamW().build, 61, rows=4, micro_batch=2, steps=1, compute="bf16", state="fp32"
    )
    device = torch.device("cuda", 0)
    emulated, native = (
        measure(case, Layout(), [Float8(recipe=recipe, emulate=emulate).build()], device) for emulate in (True, False)
    )
    exact = measure(case, Layout(), [], device)

    def distance(found: Measurement) -> float:
        return sum(float((found.gradients[name] - emulated.gradients[name]).square().sum()) for name in found.gradients) ** 0.5

    assert distance(native) < distance(exact)
    assert native.loss[0] == pytest.approx(emulated.loss[0], rel=1e-3)
