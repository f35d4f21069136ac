"""Products of experts on a device: the borders of groups are wherever tokens fall, and CUDA's kernel takes them there; without a
kernel, experts are multiplied one by one."""

import logging

import pytest
import torch
from torch.nn import functional as F

from forge_models.blocks.moe.experts import Experts
from forge_models.components.decoder import DecoderConfig
from harness.pool import World

pytestmark = pytest.mark.rehearsal
DECODER = DecoderConfig(dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=24, vocab_size=8, max_length=8)
COUNTS = ([100, 0, 17, 139], [0, 0, 0, 0], [1, 255, 0, 0], [3, 5, 7, 0])
UNASSIGNED = 5


def _run(counts: list[int], device: str, dtype: torch.dtype, kernel: str) -> list[torch.Tensor]:
    """The outputs of rows that belong to an expert, and the gradients of all rows and of each matrix."""
    generator = torch.Generator().manual_seed(0)
    experts = Experts(DECODER.shape.context(0), len(counts), "silu", True, kernel)  # type: ignore[arg-type]
    experts = experts.to_empty(device="cpu")
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    experts = experts.to(device)
    rows = torch.randn(sum(counts) + UNASSIGNED, 16, generator=generator).to(device, dtype).requires_grad_()
    slope = torch.randn(sum(counts), 16, generator=generator).to(device, dtype)
    out = experts(rows, torch.tensor(counts, device=device))[: sum(counts)]
    (out * slope).sum().backward()
    found = [out, rows.grad[: sum(counts)], *(parameter.grad for parameter in experts.parameters())]  # type: ignore[index]
    return [x.detach().cpu().double() for x in found]


def _grouped_and_by_hand() -> list[tuple[float, float]]:
    """How far a device's grouped products in bf16, and a CPU's products one by one in bf16, are from fp64."""
    found = []
    for counts in COUNTS:
        exact = _run(counts, "cpu", torch.float64, "loop")
        grouped, loop = _run(counts, "cuda", torch.bfloat16, "grouped"), _run(counts, "cpu", torch.bfloat16, "loop")
        for one, other, right in zip(grouped, loop, exact, strict=True):
            scale = float(right.abs().max()) if right.numel() else 1.0
            found.append(tuple(float((x - right).abs().max()) / (scale or 1.0) if x.numel() else 0.0 for x in (one, other)))
    return found


def test_groups_end_wherever_tokens_fall(devices: World) -> None:
    """Forward and backward: rows are what is contiguous in every factor that is cut."""
    (found,) = devices.run(_grouped_and_by_hand, 1, group=False)
    assert len(found) == 5 * len(COUNTS)
    assert [pair for pair in found if not pair[0] <= max(2 * pair[1], 1e-12)] == []


def _refused() -> list[str]:
    rows = torch.zeros(24, 16, dtype=torch.bfloat16, device="cuda")
    ends = torch.tensor([3, 24], dtype=torch.int32, device="cuda")
    weights = torch.zeros(2, 16, 16, dtype=torch.bfloat16, device="cuda")
    said = []
    for a, b in (
        (rows.t().contiguous(), rows),  # sums over what is contiguous
        (rows.t(), rows.t().contiguous().t()),
        (rows[:, :12].contiguous(), weights[:, :12]),
        (rows.flatten()[1:369].view(23, 16), weights),
        (rows[:, :1].expand(24, 16), weights),
    ):
        try:
            F.grouped_mm(a, b, offs=ends)
            said.append("")
        except RuntimeError as refusal:
            said.append(str(refusal).partition(",")[0])
    return said


def test_the_device_refuses_what_cuda_refuses(devices: World) -> None:
    (found,) = devices.run(_refused, 1, group=False)
    along = "expected input tensor dynamic dimension byte size to be non-negative multiple of 16"
    aligned = ["strides should be multiple of 16 bytes", "expected data_ptr to be aligned to 16 bytes"]
    assert found == [along, along, *aligned, "Invalid strides/sizes"]


def _looped() -> tuple[list[str], dict[str, int]]:
    """What is said, and where the host waits, in two calls of each precision and width without a kernel."""
    from rehearsal.device.waits import counted

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("forge_models.accelerator").addHandler(handler)
    waits = {}
    for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
        experts = Experts(DECODER.shape.context(0), 4, "silu", True).to_empty(device="cuda").to(dtype)
        for parameter in experts.parameters():
            parameter.data.fill_(0.1)
        rows, counts = torch.ones(9, 16, dtype=dtype, device="cuda"), torch.tensor([4, 0, 5, 0], device="cuda")
        with counted() as total:
            for _ in range(2):
                experts(rows, counts).sum().backward()
        waits[name] = sum(total.values())
    return said, waits


def test_experts_are_multiplied_one_by_one_where_no_kernel_is_and_that_is_said_once(devices: World) -> None:
    """One wait a layer. torch's own way would be one for each product and each of its gradients."""
    ((said, waits),) = devices.run(_looped, 1, group=False, fresh=True)
    assert waits == {"fp64": 2, "fp32": 2, "bf16": 0}
    assert [line.partition(": grouped_mm")[2] for line in said] == [
        " takes bf16, fp16 and fp32, not torch.float64",
        " has a kernel for bf16, not torch.float32",
    ]
