"""Matrix products: how fast, against what the device promises, also at the shapes of the recipe."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from forge_parallel.accelerator import FLOAT8, float8_fault, name
from forge_train.doctor.peaks import Peak, peak
from forge_train.doctor.step import Check, Settings
from forge_train.doctor.steps.measure import device, fastest
from forge_train.recipe.load import load

_SQUARE = 8192
_CPU_SQUARE, _CPU_ROWS = 512, 256
_SHARE = 0.6
"""Of what a data sheet promises, what a large product reaches on a GPU that is well."""
_REMEDY = "look for throttling (nvidia-smi -q -d PERFORMANCE,CLOCK,POWER), for MIG, and for other processes on the GPU"


@dataclass(frozen=True)
class Kind:
    """A way to multiply: by its dtype and torch's setting for fp32, and the peak of the device, where it is known."""

    name: str
    dtype: torch.dtype
    precision: str
    peak: float | None


def examine_matmul(settings: Settings) -> Iterator[Check]:
    """The step: a large square product in each precision, then the recipe's own products in the recipe's precision."""
    here = device()
    cpu = here.type == "cpu"
    known = None if cpu else peak(name(here))
    told = f"{name(here)}: report only" if known is None else ""
    for kind in _kinds(known, cpu):
        yield _judged(kind.name, _flops(_product(kind, here, *[_CPU_SQUARE if cpu else _SQUARE] * 3), here), kind.peak, told)
    if not cpu:
        yield _float8(here, known, told)
    for shape, rows in sorted(shapes(settings).items()):
        rows = min(rows, _CPU_ROWS) if cpu else rows
        kind = Kind("", torch.float32 if cpu else torch.bfloat16, "highest", None)
        rate, _ = _flops(_product(kind, here, rows, shape[1], shape[0]), here)
        share = f", {rate / known.bf16:.0%} of the peak" if known else ""
        label = f"{rows} x {shape[1]} x {shape[0]} of the recipe, {'fp32' if cpu else 'bf16'}"
        yield Check(label, "PASS", rate / 1e12, "TFLOP/s", f"report only{share}", "", "higher")


def _kinds(known: Peak | None, cpu: bool) -> Iterator[Kind]:
    yield Kind("fp32", torch.float32, "highest", known.fp32 if known else None)
    if not cpu:
        yield Kind("tf32", torch.float32, "high", known.tf32 if known else None)
        yield Kind("bf16", torch.bfloat16, "highest", known.bf16 if known else None)


def _product(kind: Kind, here: torch.device, *sizes: int) -> tuple[Callable[[], object], int]:
    """A product of (n, k) and (k, m) matrices, and its operations."""
    n, k, m = sizes
    torch.set_float32_matmul_precision(kind.precision)
    a, b = torch.randn(n, k, device=here, dtype=kind.dtype), torch.randn(m, k, device=here, dtype=kind.dtype)
    return lambda: torch.nn.functional.linear(a, b), 2 * n * k * m


def _flops(product: tuple[Callable[[], object], int], here: torch.device) -> tuple[float, float]:
    """Operations per second, and seconds."""
    seconds = fastest(product[0], here, 0.2 if here.type == "cpu" else 1.0)
    return product[1] / seconds, seconds


def _judged(label: str, measured: tuple[float, float], most: float | None, told: str) -> Check:
    rate = measured[0]
    if most is None:
        return Check(label, "PASS", rate / 1e12, "TFLOP/s", told or "report only", "", "higher")
    slow = rate < _SHARE * most
    expected = f"{_SHARE:.0%} of {most / 1e12:.0f} TFLOP/s"
    return Check(label, "SLOW" if slow else "PASS", rate / 1e12, "TFLOP/s", expected, _REMEDY if slow else "", "higher")


def _float8(here: torch.device, known: Peak | None, told: str) -> Check:
    """One scale for each operand."""
    label = "float8, tensorwise"
    if fault := float8_fault(here):
        least = "{}.{}".format(*FLOAT8)
        return Check(label, "SKIPPED", fault, expected=f"compute capability {least} or more")
    one = torch.ones((), device=here)
    a = torch.randn(_SQUARE, _SQUARE, device=here).to(torch.float8_e4m3fn)
    b = torch.randn(_SQUARE, _SQUARE, device=here).to(torch.float8_e4m3fn)
    nn = torch.nn.functional
    both = nn.ScalingType.TensorWise

    def product() -> object:
        return nn.scaled_mm(a, b.t(), one, both, one, both, output_dtype=torch.bfloat16)

    return _judged(label, _flops((product, 2 * _SQUARE**3), here), known.fp8 if known else None, told)


def shapes(settings: Settings) -> dict[tuple[int, int], int]:
    """(outputs, inputs) of every kind of matrix in the recipe's model -> rows of one micro-batch; experts get their share."""
    from forge_models.outline import matrices

    job = load(settings.recipe, settings.overrides).job
    shape = getattr(job.model, "shape", None)
    if shape is None:
        return {}
    rows = job.train.micro_batch * job.data.sequence_length
    hidden, experts = matrices(shape)
    found: dict[tuple[int, int], int] = {matrix.shape: rows for matrix in hidden.values()}
    found[shape.vocab_size, shape.dim] = rows
    if shape.moe is not None:
        share = max(1, rows * shape.moe.top_k // shape.moe.experts)
        found |= {matrix.shape: share for matrix in experts.values()}
    return found
