"""Which kernel torch chose for what Forge asks of it, and how long it takes."""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from forge_train.doctor.step import Check, Settings
from forge_train.doctor.steps.measure import device, fastest

_KERNELS = {
    "flash": "flash",
    "cudnn": "cuDNN",
    "efficient": "memory-efficient",
    "fused_attention_math": "math",
    "attention_math": "math",
}
_LENGTH, _CPU_LENGTH = 2048, 128
_EXPECTED = "a kernel that never holds length x length numbers"


def examine_kernels(_: Settings) -> Iterator[Check]:
    """The step: attention as blocks call it, then products of experts."""
    here = device()
    cpu = here.type == "cpu"
    length, dtype = (_CPU_LENGTH, torch.float32) if cpu else (_LENGTH, torch.bfloat16)
    for width in (64, 128, 256):
        for label, options in _calls(length, here).items():
            yield _attention(f"attention, heads of {width}, {label}", width, length, dtype, here, options)
    yield _experts(here, dtype)


def _calls(length: int, here: torch.device) -> Mapping[str, dict[str, object]]:
    mask = torch.ones(length, length, dtype=torch.bool, device=here).tril()
    return {
        "causal": {"is_causal": True},
        "masked": {"attn_mask": mask},
        "causal, 4 heads to a key": {"is_causal": True, "enable_gqa": True},
    }


def _attention(
    label: str, width: int, length: int, dtype: torch.dtype, here: torch.device, options: Mapping[str, object]
) -> Check:
    """Forward and backward; the kernel is what the profiler saw."""
    few = 2 if options.get("enable_gqa") else 8
    q = torch.randn(2, 8, length, width, device=here, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, few, length, width, device=here, dtype=dtype, requires_grad=True) for _ in range(2))

    def work() -> None:
        F.scaled_dot_product_attention(q, k, v, **options).sum().backward()  # pyright: ignore[reportArgumentType]

    with torch.profiler.profile() as profile:
        work()
    seen = " ".join(event.name for event in profile.events() or () if "scaled_dot_product" in event.name)
    found = next((told for part, told in _KERNELS.items() if part in seen), "unknown")
    milliseconds = 1e3 * fastest(work, here, 0.05)
    if found == "math" and here.type != "cpu":
        remedy = "a dtype of 16 bits and heads of at most 128 have better ones; is this torch built with flash attention?"
        return Check(label, "SLOW", milliseconds, f"ms, {found}", _EXPECTED, remedy, "lower")
    return Check(label, "PASS", milliseconds, f"ms, {found}", _EXPECTED, "", "lower")


def _experts(here: torch.device, dtype: torch.dtype) -> Check:
    """One product for all experts, some of which have no rows, against one for each in fp32."""
    from forge_models.accelerator import groups_fault
    from forge_models.moe.experts import unfit

    label = "products of experts"
    if fault := unfit(dtype, 64) or groups_fault(here, dtype, 4):
        return Check(label, "SKIPPED", f"a loop over experts: {fault}", remedy="model.moe.kernel = 'loop' says so in recipes")
    counts = [100, 0, 17, 139]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 64, generator=generator).to(here, dtype)
    weights = torch.randn(len(counts), 64, 64, generator=generator).to(here, dtype)
    ends = torch.tensor(counts, device=here).cumsum(0, dtype=torch.int32)
    grouped = F.grouped_mm(rows, weights, offs=ends).float()
    exact = torch.cat([part.float() @ weight.float() for part, weight in zip(rows.split(counts), weights, strict=True)])
    error = float((grouped - exact).norm() / exact.norm())
    expected = "1 % from a loop in fp32, at most"
    if not error <= 1e-2:
        return Check(label, "FAIL", error, expected=expected, remedy="model.moe.kernel = 'loop'; report it with this file")
    return Check(label, "PASS", error, expected=expected)
