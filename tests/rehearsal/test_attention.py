"""Which kernel of attention a GPU is given, and that the starts of documents that a loader counts are the right ones."""

from typing import Any

import pytest
import torch

from harness.pool import World

pytestmark = pytest.mark.rehearsal
LENGTH, WIDTH, HEADS, SHARED = 48, 16, 4, 2


def _case(window: int | None, packed: bool) -> Any:
    """(documents or None, starts or None) on the device."""
    from forge_core.batch import Batch

    generator = torch.Generator().manual_seed(3)
    documents = (torch.rand(2, LENGTH, generator=generator) < 0.2).cumsum(1).to(torch.int32)
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    batch = Batch(tokens, tokens, documents=documents if packed else None).with_document_starts().to("cuda")
    return batch.documents, batch.document_starts


def _kernels() -> dict[str, str]:
    """By situation, the name of what the core prepares."""
    from forge_models.blocks.attention import LocalAttention

    found = {}

    def note(
        name: str, core: LocalAttention, packed: bool, window: int | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        documents, starts = _case(window, packed)
        x = torch.zeros(2, LENGTH, 8, dtype=dtype, device="cuda")
        with torch.no_grad():  # with gradients, a soft cap has a mask in rows of less than a block
            found[name] = type(core.prepare_packed(documents, starts, LENGTH, window, x)).__name__

    fits = LocalAttention(width=WIDTH)
    note("whole rows", fits, packed=False)
    note("a window that hides nothing", fits, packed=False, window=LENGTH)
    note("documents", fits, packed=True)
    note("a window", fits, packed=False, window=7)
    note("documents in fp32", fits, packed=True, dtype=torch.float32)
    note("documents in fp16", fits, packed=True, dtype=torch.float16)
    note("documents, other values", LocalAttention(), packed=True)
    note("documents, narrow heads", LocalAttention(width=12), packed=True)
    note("documents, wide heads", LocalAttention(width=512), packed=True)
    note("documents, capped", LocalAttention(capped=True, width=WIDTH), packed=True)
    note("whole rows, capped", LocalAttention(capped=True, width=WIDTH), packed=False)
    note("sdpa, whole rows", LocalAttention("sdpa", width=WIDTH), packed=False)
    note("sdpa, capped", LocalAttention("sdpa", capped=True, width=WIDTH), packed=False)
    note("sdpa, documents", LocalAttention("sdpa", width=WIDTH), packed=True)
    note("flex, documents", LocalAttention("flex", width=WIDTH), packed=True)
    note("varlen, other values", LocalAttention("varlen"), packed=True)
    return found


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_kernel_fits_the_batch(devices: World) -> None:
    (found,) = devices.run(_kernels, 1, group=False)
    assert found == {
        "whole rows": "KernelOrder",
        "a window that hides nothing": "KernelOrder",
        "documents": "Boundaries",
        "a window": "Boundaries",
        "documents in fp32": "BlockMask",
        "documents in fp16": "Boundaries",
        "documents, other values": "BlockMask",
        "documents, narrow heads": "BlockMask",
        "documents, wide heads": "BlockMask",
        "documents, capped": "BlockMask",
        "whole rows, capped": "BlockMask",
        "sdpa, whole rows": "KernelOrder",
        "sdpa, capped": "NoneType",
        "sdpa, documents": "Tensor",
        "flex, documents": "BlockMask",
        "varlen, other values": "Boundaries",
    }


def _by_lengths(window: int | None, packed: bool) -> dict[str, Any]:
    """Output and gradients in bf16 by lengths, in fp64 by a mask, and the waits of the host."""
    from forge_models.blocks.attention import LocalAttention
    from rehearsal.device.waits import counted

    documents, starts = _case(window, packed)
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, HEADS, LENGTH, WIDTH), (2, SHARED, LENGTH, WIDTH), (2, SHARED, LENGTH, WIDTH))
    drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]

    def result(core: LocalAttention, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.to(device="cuda", dtype=dtype).requires_grad_() for x in drawn]
        shared = core.prepare_packed(documents, starts, LENGTH, window, inputs[0])
        out = core(inputs[0], inputs[1], inputs[2], shared, 0.3)
        weight = torch.linspace(-1, 1, out.numel(), device="cuda").to(dtype).view(out.shape)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]

    with counted() as waits:
        found = result(LocalAttention(width=WIDTH), torch.bfloat16)
    expected = result(LocalAttention("sdpa"), torch.float64)
    asked = {site.place: count for site, count in waits.items() if site.file.startswith("forge_")}
    return {"found": [x.cpu() for x in found], "expected": [x.cpu() for x in expected], "waits": asked}


@pytest.mark.parametrize(("window", "packed"), [(None, True), (7, True), (7, False)])
def test_documents_by_lengths_are_documents_by_a_mask(devices: World, window: int | None, packed: bool) -> None:
    """As near as bf16 is, and the host never waits."""
    (result,) = devices.run(_by_lengths, 1, window, packed, group=False)
    assert result["waits"] == {}
    for found, expected in zip(result["found"], result["expected"], strict=True):
        assert float((found.double() - expected).abs().max()) < 0.01 * float(expected.abs().max())
