"""Measures how fast the device computes, copies, and runs the kernels that torch chooses, and compares with its peak."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.nn.functional as F

from forge_core.machine import multiplies_bf16
from forge_parallel.accelerator import FLOAT8, float8_fault, name
from forge_train.doctor.measure import device, fastest
from forge_train.doctor.peaks import Peak, peak
from forge_train.doctor.step import Check, DoctorSettings
from forge_train.recipe.load import load_recipe

_MATMUL_SQUARE = 8192
_CPU_MATMUL_SQUARE, _CPU_MATMUL_ROWS = 512, 256
_MATMUL_SHARE = 0.6
"""Share of the data sheet's peak that a large product reaches on a healthy GPU."""
_MATMUL_REMEDY = "check for throttling (nvidia-smi -q -d PERFORMANCE,CLOCK,POWER), for MIG, and for other processes on the GPU"


@dataclass(frozen=True)
class ProductKind:
    """A kind of product: dtype, torch's precision setting for fp32, and the device's peak in operations per second, if known."""

    name: str
    dtype: torch.dtype
    precision: str
    peak: float | None


def examine_matmul(settings: DoctorSettings) -> Iterator[Check]:
    """Step `matmul`: measures a large square product in each precision, then products with the shapes of the recipe."""
    here = device()
    cpu = here.type == "cpu"
    known = None if cpu else peak(name(here))
    told = f"{name(here)}: report only" if known is None else ""
    for kind in _kinds(known, cpu):
        yield _judged(
            kind.name, _flops(_product(kind, here, *[_CPU_MATMUL_SQUARE if cpu else _MATMUL_SQUARE] * 3), here), kind.peak, told
        )
    if not cpu:
        yield _float8(here, known, told)
    for shape, rows in sorted(shapes(settings).items()):
        rows = min(rows, _CPU_MATMUL_ROWS) if cpu else rows
        kind = ProductKind("", torch.float32 if cpu else torch.bfloat16, "highest", None)
        rate, _ = _flops(_product(kind, here, rows, shape[1], shape[0]), here)
        share = f", {rate / known.bf16:.0%} of the peak" if known else ""
        label = f"{rows} x {shape[1]} x {shape[0]} of the recipe, {'fp32' if cpu else 'bf16'}"
        yield Check(label, "PASS", rate / 1e12, "TFLOP/s", f"report only{share}", "", "higher")


def _kinds(known: Peak | None, cpu: bool) -> Iterator[ProductKind]:
    yield ProductKind("fp32", torch.float32, "highest", known.fp32 if known else None)
    if not cpu:
        yield ProductKind("tf32", torch.float32, "high", known.tf32 if known else None)
        yield ProductKind("bf16", torch.bfloat16, "highest", known.bf16 if known else None)


def _product(kind: ProductKind, here: torch.device, *sizes: int) -> tuple[Callable[[], object], int]:
    """Returns a product of (n, k) and (k, m) matrices, and its number of operations."""
    n, k, m = sizes
    torch.set_float32_matmul_precision(kind.precision)
    a, b = torch.randn(n, k, device=here, dtype=kind.dtype), torch.randn(m, k, device=here, dtype=kind.dtype)
    return lambda: torch.nn.functional.linear(a, b), 2 * n * k * m


def _flops(product: tuple[Callable[[], object], int], here: torch.device) -> tuple[float, float]:
    """Returns operations per second, and seconds per product."""
    seconds = fastest(product[0], here, 0.2 if here.type == "cpu" else 1.0)
    return product[1] / seconds, seconds


def _judged(label: str, measured: tuple[float, float], most: float | None, told: str) -> Check:
    rate = measured[0]
    if most is None:
        return Check(label, "PASS", rate / 1e12, "TFLOP/s", told or "report only", "", "higher")
    slow = rate < _MATMUL_SHARE * most
    expected = f"{_MATMUL_SHARE:.0%} of {most / 1e12:.0f} TFLOP/s"
    return Check(label, "SLOW" if slow else "PASS", rate / 1e12, "TFLOP/s", expected, _MATMUL_REMEDY if slow else "", "higher")


def _float8(here: torch.device, known: Peak | None, told: str) -> Check:
    """Measures a float8 product with one scale for each operand."""
    label = "float8, tensorwise"
    if fault := float8_fault(here):
        least = "{}.{}".format(*FLOAT8)
        return Check(label, "SKIPPED", fault, expected=f"compute capability {least} or more")
    one = torch.ones((), device=here)
    a = torch.randn(_MATMUL_SQUARE, _MATMUL_SQUARE, device=here).to(torch.float8_e4m3fn)
    b = torch.randn(_MATMUL_SQUARE, _MATMUL_SQUARE, device=here).to(torch.float8_e4m3fn)
    nn = torch.nn.functional
    both = nn.ScalingType.TensorWise

    def product() -> object:
        return nn.scaled_mm(a, b.t(), one, both, one, both, output_dtype=torch.bfloat16)

    return _judged(label, _flops((product, 2 * _MATMUL_SQUARE**3), here), known.fp8 if known else None, told)


def shapes(settings: DoctorSettings) -> dict[tuple[int, int], int]:
    """Returns (outputs, inputs) of each kind of matrix in the recipe's model -> rows per micro-batch, or per expert."""
    job = load_recipe(settings.recipe, settings.overrides).job
    shape = getattr(job.model, "shape", None)
    if shape is None:
        return {}
    rows = job.train.micro_batch * job.data.sequence_length
    hidden, experts = shape.matrices()
    found: dict[tuple[int, int], int] = {matrix.shape: rows for matrix in hidden.values()}
    found[shape.vocab_size, shape.dim] = rows
    if shape.moe is not None:
        share = max(1, rows * shape.moe.top_k // shape.moe.experts)
        found |= {matrix.shape: share for matrix in experts.values()}
    return found


_GPU_COPY_BYTES, _CPU_COPY_BYTES = 1 << 28, 1 << 25
_LINK = 10e9
"""Minimum bytes per second of a PCIe 3.0 link with 16 lanes; later generations have two to five times as much."""
_HBM = 0.7


@dataclass(frozen=True)
class CopyDirection:
    """One copy: source, target, bytes of traffic, and the bytes per second below which it counts as slow (0: never)."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    traffic: int
    least: float
    remedy: str = ""


def examine_bandwidth(_: DoctorSettings) -> Iterator[Check]:
    """Step `bandwidth`: measures copies. Traffic of a copy within one memory counts twice, because it is read and written."""
    here = device()
    length = _CPU_COPY_BYTES if here.type == "cpu" else _GPU_COPY_BYTES
    for copy in _copies(here, length):
        rate = copy.traffic / fastest(lambda: copy.target.copy_(copy.source, non_blocking=True), here)  # noqa: B023 (called at once)
        slow = rate < copy.least
        expected = f"{copy.least / 1e9:.0f} GB/s at least" if copy.least else "report only"
        remedy = copy.remedy if slow else ""
        yield Check(copy.name, "SLOW" if slow else "PASS", rate / 1e9, "GB/s", expected, remedy, "higher")


def _copies(here: torch.device, length: int) -> Iterator[CopyDirection]:
    pageable = torch.ones(length, dtype=torch.uint8)
    yield CopyDirection("host memory", pageable, torch.empty_like(pageable), 2 * length, 0.0)
    if here.type == "cpu":
        return
    pinned, there = pageable.pin_memory(), torch.empty(length, dtype=torch.uint8, device=here)
    link = "check that the GPU is in a slot of 16 lanes (nvidia-smi -q -d PCI), and the process on the GPU's NUMA node"
    yield CopyDirection("host to device, pinned", pinned, there, length, _LINK, link)
    yield CopyDirection("device to host, pinned", there, pinned, length, _LINK, link)
    yield CopyDirection("host to device, pageable", pageable, there, length, 0.0)
    yield CopyDirection("device to host, pageable", there, pageable, length, 0.0)
    known = peak(name(here))
    least = known.memory * _HBM if known else 0.0
    remedy = "check for throttling and ECC (nvidia-smi -q -d PERFORMANCE,ECC), and for other processes on the GPU"
    yield CopyDirection("device memory", there, torch.empty_like(there), 2 * length, least, remedy)


_KERNELS = {
    "flash": "flash",
    "cudnn": "cuDNN",
    "efficient": "memory-efficient",
    "fused_attention_math": "math",
    "attention_math": "math",
}
_ATTENTION_LENGTH, _CPU_ATTENTION_LENGTH = 2048, 128
_ATTENTION_EXPECTED = "a kernel without length x length memory"


def examine_kernels(_: DoctorSettings) -> Iterator[Check]:
    """Step `kernels`: checks attention as blocks call it, then products of experts."""
    here = device()
    cpu = here.type == "cpu"
    length, dtype = (_CPU_ATTENTION_LENGTH, torch.float32) if cpu else (_ATTENTION_LENGTH, torch.bfloat16)
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
    """Measures forward and backward of attention; the profiler says which kernel ran."""
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
        remedy = "use a 16-bit dtype and heads of at most 128, and a torch that is built with flash attention"
        return Check(label, "SLOW", milliseconds, f"ms, {found}", _ATTENTION_EXPECTED, remedy, "lower")
    return Check(label, "PASS", milliseconds, f"ms, {found}", _ATTENTION_EXPECTED, "", "lower")


def _experts(here: torch.device, dtype: torch.dtype) -> Check:
    """Compares a grouped product for all experts, some without rows, with one product per expert in fp32."""
    from forge_models.accelerator import groups_fault
    from forge_models.blocks.moe.experts import unfit

    label = "products of experts"
    if fault := unfit(dtype, 64) or groups_fault(here, dtype, 4):
        return Check(label, "SKIPPED", f"a loop over experts: {fault}", remedy="set model.moe.kernel = 'loop' in recipes")
    counts = [100, 0, 17, 139]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 64, generator=generator).to(here, dtype)
    weights = torch.randn(len(counts), 64, 64, generator=generator).to(here, dtype)
    ends = torch.tensor(counts, device=here).cumsum(0, dtype=torch.int32)
    grouped = F.grouped_mm(rows, weights, offs=ends).float()
    exact = torch.cat([part.float() @ weight.float() for part, weight in zip(rows.split(counts), weights, strict=True)])
    error = float((grouped - exact).norm() / exact.norm())
    expected = "at most 1 % from a loop in fp32"
    if not error <= 1e-2:
        return Check(label, "FAIL", error, expected=expected, remedy="set model.moe.kernel = 'loop'; report it with this file")
    return Check(label, "PASS", error, expected=expected)


CPU_SIZE = 256  # 2 * 256^3 = 34 MFLOP: 0.12 s on a CPU that manages 0.28 GFLOP/s, the slowest seen
CPU_SECONDS = 0.08


def cpu_speed(dtype: torch.dtype, clock: Callable[[], float] = perf_counter) -> float:
    """Returns FLOP/s of the fastest of several products of (256, 256) matrices; takes 0.08 s, or as long as one product."""
    a = torch.ones(CPU_SIZE, CPU_SIZE, dtype=dtype)
    begin, fastest = clock(), float("inf")
    while True:
        start = clock()
        torch.mm(a, a)
        end = clock()
        fastest = min(fastest, end - start)
        if end - begin >= CPU_SECONDS:
            return 2 * CPU_SIZE**3 / max(fastest, 1e-9)


def bf16_remark(clock: Callable[[], float] = perf_counter) -> str | None:
    """Returns a warning with both speeds if bf16 is slower than fp32 on this CPU, else None. Measures only if the processor does
    not report bf16 units."""
    if multiplies_bf16():
        return None
    bf16, fp32 = cpu_speed(torch.bfloat16, clock), cpu_speed(torch.float32, clock)
    if bf16 >= fp32:
        return None
    return (
        f"warning: this CPU has no bf16 units: {bf16 / 1e9:.3g} GFLOP/s in bf16, {fp32 / 1e9:.3g} in fp32, "
        f"{fp32 / bf16:.0f} times as fast; set precision.compute = 'fp32'"
    )
