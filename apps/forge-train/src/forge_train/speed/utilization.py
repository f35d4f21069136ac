"""Model FLOP/s of a run and their share of what its devices promise (MFU: Chowdhery et al., 2022)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from forge_core.batch import Batch
from forge_core.protocols.run import Run
from forge_parallel.accelerator import name
from forge_train.doctor.peaks import TERA, peak
from forge_train.doctor.steps.measure import fastest

if TYPE_CHECKING:
    from forge_models.flops import Counts

_SIZES = (256, 512, 1024, 2048)
_SECONDS = 0.02
"""Of the longest product that is tried on a CPU."""


@dataclass(frozen=True)
class Utilization:
    """What turns tokens per second into shares.

    Attributes:
        counts: products of the model; None for one that does not declare them.
        length: tokens of a row.
        devices: all of the run.
        peak: FLOP/s of one device in `precision`; None where it is unknown, and then no share is given.
        precision: that most products are made in: `fp32`, `bf16` or `fp8`.
        device: its name.
    """

    counts: "Counts | None"
    length: int
    devices: int
    peak: float | None
    precision: str
    device: str

    @classmethod
    def of(cls, run: Run) -> "Utilization":
        """Of a run. The peak of a CPU is measured, in at most a tenth of a second or three products."""
        job, here = run.job, run.topology.device
        from forge_models.flops import counts_of

        counts, precision = counts_of(getattr(job, "model", None)), _precision(job)
        promised = None if counts is None else of_device(here, precision)
        length = job.data.sequence_length if counts else 0
        return cls(counts, length, run.topology.size, promised, precision, name(here))

    def numbers(self, rate: float, batches: Sequence[Batch] = (), frozen: Collection[str] = ()) -> dict[str, float]:
        """`model_tflops` of a device, `mfu`, and `mfu_attended`, for `rate` tokens per second of all devices together, without
        padding. Images count as these batches have them; `frozen` are names of parameters that are not trained.

        `mfu_attended` counts only keys that a query meets: those before it in its own document and window, by the rows of these
        batches. `mfu` counts whole rows, as most tables do.
        """
        if self.counts is None:
            return {}
        tokens = sum(batch.tokens.numel() if batch.real is None else int(batch.real.sum()) for batch in batches)
        beyond = self.counts.beyond(batches, frozen) / tokens if tokens else 0.0
        found = {"model_tflops": rate * (self.counts.training(self.length) + beyond) / self.devices / TERA}
        if self.peak is None:
            return found
        found["mfu"] = found["model_tflops"] * TERA / self.peak
        if batches:
            attended = beyond + self.counts.training_with(lambda window: keys_met(batches, self.length, window))
            found["mfu_attended"] = rate * attended / self.devices / self.peak
        return found

    def now(self, rate: float, run: Run) -> dict[str, float]:
        """`numbers` of a run, by the batches of its step on this rank and by what it trains."""
        frozen = {name for name, tensor in run.model.parameters_held() if not tensor.requires_grad}
        return self.numbers(rate, run.batches, frozen)

    def line(self) -> str:
        """The convention, for people."""
        from forge_models.flops import CONVENTION

        if self.counts is None:
            return "mfu: not given, since the model does not declare its matrix products"
        counted = (
            f"{self.counts.training(self.length) / 1e6:,.4g} MFLOP a token ({CONVENTION}; 2 per multiply-add){self.counts.note}"
        )
        if self.peak is None:
            return f"mfu: not given, since the {self.precision} peak of {self.device} is unknown; {counted}"
        how = "measured" if self.device == "cpu" else "dense, by its data sheet"
        many = f"{self.devices} x " if self.devices > 1 else ""
        return f"mfu: {counted}, against {many}{self.peak / TERA:,.4g} TFLOP/s of {self.device} in {self.precision}, {how}"


def of_device(here: torch.device, precision: str) -> float | None:
    """FLOP/s that a device promises in a precision; None where nothing is known. fp32 is without TF32, which Forge leaves off."""
    if here.type == "cpu":
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(precision)
        return None if dtype is None else _measured(dtype, torch.get_num_threads())
    known = peak(name(here))
    return None if known is None else {"bf16": known.bf16, "fp32": known.fp32, "fp8": known.fp8}.get(precision)


def keys_met(batches: Sequence[Batch], length: int, window: int | None) -> float:
    """Mean number of keys that a token of these rows meets: itself and those before it, in its document and window.

    Without `positions` each row is one document.
    """
    total, queries = 0, 0
    for batch in batches:
        if batch.positions is None:
            reached = torch.arange(1, length + 1).expand(len(batch.tokens), length)
        else:
            reached = batch.positions + 1
        if batch.real is not None:
            reached = reached[batch.real]
        total += int((reached if window is None else reached.clamp(max=window)).sum())
        queries += reached.numel()
    return total / max(queries, 1)


def _precision(job: Any) -> str:
    """A transform may say what products are made in."""
    said = [found for transform in getattr(job, "transforms", {}).values() if (found := getattr(transform, "products", None))]
    return said[0] if said else job.precision.compute if hasattr(job, "precision") else "fp32"


@cache
def _measured(dtype: torch.dtype, threads: int) -> float:  # noqa: ARG001 (another number has another speed)
    """FLOP/s of the fastest square product on this CPU with the threads of this process, measured once."""
    best = 0.0
    for size in _SIZES:
        a = torch.ones(size, size, dtype=dtype)
        seconds = fastest(lambda a=a: torch.mm(a, a), torch.device("cpu"), budget=_SECONDS, batch=1)
        best = max(best, 2 * size**3 / seconds)
        if 8 * seconds > _SECONDS:  # the next one would take longer
            break
    return best
