"""Hook `log`: writes the metrics of steps to the trackers, with model FLOP/s and MFU (Chowdhery et al., 2022)."""

import logging
import resource
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt

from forge_core.batch import Batch
from forge_core.component import FREE
from forge_core.protocols.run import Hook, Run, StepResult
from forge_data.order.phases import length_at
from forge_train.doctor.peaks import TERA, peak
from forge_train.hooks.periodic import Stopwatch

if TYPE_CHECKING:
    import torch

    from forge_models.flops import Counts, Keys


_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Log(Hook):
    """Writes loss, gradient norm, learning rate, throughput and memory to every tracker.

    A line has the numbers of its step. On an accelerator, all ranks wait for these numbers; steps without a line do not wait.

    Values: `loss` (nats per token), `grad_norm` (before clipping), `lr` (if the optimizer has a single learning rate), `skipped`
    (this step), `stage` (number of the training stage, from 1), `skipped_steps` (of the run so far, after the first) and every
    other number of the step, such as `source/LABEL/loss` and `source/LABEL/tokens` of each source of a mixture in this step;
    `data/LABEL/tokens` (read by the run so far, with and without loss) and `data/LABEL/planned_tokens` (planned by the mixture's
    weights); `tokens` (read by the run so far, without padding), `step_tokens` (with loss, in this step), `tokens_per_second` and
    `step_seconds` (means since the last line, over all ranks, without evaluation and saving), `peak_memory` (bytes, resident
    memory of rank 0's process). On an accelerator also `device_memory`, `device_memory_reserved` and `device_memory_retries` of
    rank 0 since the last line; see `forge_parallel.accelerator.take_peaks`.

    Speed: `model_tflops`, `mfu` and `mfu_attended` (see `Utilization`; their convention is printed at the start). Parts of this
    step on rank 0, in seconds: `time/data`, `time/count`, `time/forward`, `time/backward`, `time/reduce`, `time/optimizer` and
    `time/other`; on an accelerator in device time, so work that the device does not wait for takes no time. Hook `profile` shows
    how much of them is exposed communication. `pauses/HOOK`: seconds that this start has waited for a hook that pauses training,
    such as `save` and `evaluate`. Memory of rank 0, in bytes: `memory/parameters`, `memory/gradients`, `memory/optimizer`, and on
    an accelerator `memory/rest`: activations and buffers at the peak.
    """

    key_class: ClassVar = FREE
    observes = True

    every: Annotated[int, Gt(0)] = 10
    """Optimizer steps between lines; the first and the last step are always written."""

    def __post_init__(self) -> None:
        self.first = True
        self.speed: Utilization | None = None

    def start(self, run: Run) -> None:
        """Starts the clock, and prints the convention of MFU."""
        if run.topology.rank == 0:
            self.speed = Utilization.of(run)
            _log.info("%s", self.speed.line())
            if run.console is not None:
                run.console.print(self.speed.line(), highlight=False, soft_wrap=True)
        self.watch = Stopwatch(run)
        self._look_ahead(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Writes a line if one is due: every N steps, at the first step of this start, and at the last step of the run."""
        from forge_parallel.accelerator import take_peaks

        step, due = run.state.step, self._due(run, run.state.step)
        self.first = self.first and not due
        self._look_ahead(run)
        if not due:
            return
        run.judge()  # for `skipped_steps`; collective, although only rank 0 writes
        if run.topology.rank != 0:
            return
        numbers = dict(result.numbers())
        seconds, steps, tokens = self.watch.lap()
        for wish in ("stop", "trace"):
            numbers.pop(wish, None)  # signals of the loop and of a hook, not metrics
        if "tokens" in numbers:
            numbers["step_tokens"] = numbers.pop("tokens")
        if run.health.total:
            numbers["skipped_steps"] = run.health.total
        if (rate := run.lr) is not None:
            numbers["lr"] = rate
        if seconds > 0 and steps > 0:
            numbers["tokens_per_second"] = tokens / seconds
            numbers["step_seconds"] = seconds / steps
            if self.speed is not None:
                numbers |= self.speed.now(tokens / seconds, run)
        if (stage := getattr(run.optimizer, "stage_number", None)) is not None:
            numbers["stage"] = stage + 1
        numbers |= {f"time/{name}": value for name, value in run.times.take().items()}
        numbers |= {f"pauses/{hook}": seconds for hook, seconds in getattr(run.clock, "pauses", {}).items()}
        numbers |= mixture(run.data, step) | take_peaks(run.topology.device)
        numbers |= self._memory(run, numbers.get("device_memory"))
        run.log({**numbers, "tokens": run.state.tokens, "peak_memory": peak_memory()})

    def _due(self, run: Run, step: int) -> bool:
        train = run.job.train
        ends = (train.max_steps, getattr(train, "stop_at", None))
        return self.first or step % self.every == 0 or step in ends

    def _look_ahead(self, run: Run) -> None:
        """Times the parts of the next step if it has a line, on the rank that writes it."""
        run.times.timed = run.topology.rank == 0 and self._due(run, run.state.step + 1)

    def _memory(self, run: Run, peak: float | None) -> dict[str, float]:
        held = held_memory(run)
        rest = {} if peak is None else {"memory/rest": peak - sum(held.values())}
        return {**held, **rest}


def held_memory(run: Run) -> dict[str, int]:
    """Returns the bytes of parameters, gradients and optimizer state on this rank, in this stage of training."""
    parameters = [tensor for _, tensor in run.model.parameters_held()]
    states = [tensor for named in run.optimizer.state().values() for tensor in named.values()]
    return {
        "memory/parameters": sum(map(_bytes, parameters)),
        "memory/gradients": sum(_bytes(tensor) for tensor in parameters if tensor.requires_grad),
        "memory/optimizer": sum(map(_bytes, states)),
    }


def _bytes(tensor: Any) -> int:
    from forge_parallel.placement.boxes import local_box

    local = local_box(tensor).local
    return local.numel() * local.element_size()


def mixture(data: Any, step: int) -> dict[str, float]:
    """Returns read and planned tokens of each source of a mixture; empty for a single source. Does not wait for the device."""
    mix = getattr(data, "mix", None)
    found = mix(step) if mix else {}
    return {
        f"data/{label}/{what}": value
        for label, pair in found.items()
        if len(found) > 1
        for what, value in zip(("tokens", "planned_tokens"), pair, strict=True)
    }


def peak_memory() -> int:
    """Returns the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


_SIZES = (256, 512, 1024, 2048)
_SECONDS = 0.02
"""Maximum seconds of a matrix product that is timed on a CPU."""


@dataclass(frozen=True)
class Utilization:
    """Converts tokens per second to model FLOP/s and MFU.

    Attributes:
        counts: matrix products of the model; None for a model that does not declare them.
        length: tokens per row.
        devices: number of devices of the run.
        peak: peak FLOP/s of one device in `precision`; None if it is unknown, and then there is no MFU.
        precision: precision of most products: `fp32`, `bf16` or `fp8`.
        device: name of the device.
    """

    counts: "Counts | None"
    length: int
    devices: int
    peak: float | None
    precision: str
    device: str

    @classmethod
    def of(cls, run: Run) -> "Utilization":
        """Returns the utilization of a run. Measures the peak of a CPU, in at most a tenth of a second or three products."""
        from forge_models.flops import counts_of
        from forge_parallel.accelerator import name

        job, here = run.job, run.topology.device
        counts, precision = counts_of(getattr(job, "model", None)), _precision(job)
        promised = None if counts is None else of_device(here, precision)
        length = job.data.sequence_length if counts else 0
        return cls(counts, length, run.topology.size, promised, precision, name(here))

    def numbers(self, rate: float, batches: Sequence[Batch] = (), frozen: Collection[str] = ()) -> dict[str, float]:
        """Returns `model_tflops` per device, `mfu` and `mfu_attended`.

        `mfu_attended` counts only keys that a query attends to: earlier keys in its own document and window, or all keys in it if
        attention is bidirectional, in the rows of `batches`. `mfu` counts whole rows, as most publications do.

        Args:
            rate: tokens per second of all devices together, without padding.
            batches: batches of the step, for images and documents.
            frozen: names of parameters that are not trained.
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
            causal = self.counts.causal
            attended = beyond + self.counts.training_with(lambda window: keys_met(batches, self.length, window, causal))
            found["mfu_attended"] = rate * attended / self.devices / self.peak
        return found

    def now(self, rate: float, run: Run) -> dict[str, float]:
        """Returns `numbers` of a run, from this rank's batches of the step and the parameters that it trains."""
        if self.counts is None:
            return {}
        frozen = {name for name, tensor in run.model.parameters_held() if not tensor.requires_grad}
        length = length_at(run.job.data, run.state.step - 1)  # of the step that has ended
        return replace(self, length=length).numbers(rate, run.batches, frozen)

    def line(self) -> str:
        """Returns the convention of MFU as text."""
        from forge_models.flops import CONVENTION

        if self.counts is None:
            return "mfu: not reported, since the model does not declare its matrix products"
        counted = (
            f"{self.counts.training(self.length) / 1e6:,.4g} MFLOP a token ({CONVENTION}; 2 per multiply-add){self.counts.note}"
        )
        if self.peak is None:
            return f"mfu: not reported, since the {self.precision} peak of {self.device} is unknown; {counted}"
        how = "measured" if self.device == "cpu" else "dense, from its data sheet"
        many = f"{self.devices} x " if self.devices > 1 else ""
        return f"mfu: {counted}, against {many}{self.peak / TERA:,.4g} TFLOP/s of {self.device} in {self.precision}, {how}"


def of_device(here: "torch.device", precision: str) -> float | None:
    """Returns the peak FLOP/s of a device in a precision; None if unknown. fp32 is without TF32, which Forge disables."""
    import torch

    from forge_parallel.accelerator import name

    if here.type == "cpu":
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(precision)
        return None if dtype is None else _measured(dtype, torch.get_num_threads())
    known = peak(name(here))
    return None if known is None else {"bf16": known.bf16, "fp32": known.fp32, "fp8": known.fp8}.get(precision)


def keys_met(batches: Sequence[Batch], length: int, window: "Keys", causal: bool = True) -> float:
    """Returns the mean number of keys that a token attends to: itself and earlier tokens in its document and window or chunk, or
    compressed keys of its document, or without `causal` all tokens in its document.

    Without `positions`, each row is one document.
    """
    import torch

    from forge_models.shape import AttentionChunk, CompressedKeys

    total, queries = 0, 0
    for batch in batches:
        if not causal:
            documents = batch.documents
            if documents is None:
                documents = torch.zeros_like(batch.tokens) if batch.real is None else batch.real.long() - 1
            sizes = torch.stack([torch.bincount(row[row >= 0].long(), minlength=length) for row in documents.cpu()])
            total += int(sizes.square().sum())
            queries += int(sizes.sum())
            continue
        if batch.positions is None:
            reached = torch.arange(1, length + 1).expand(len(batch.tokens), length)
        else:
            reached = batch.positions + 1
        if batch.real is not None:
            reached = reached[batch.real]
        if isinstance(window, AttentionChunk):
            reached = (reached - 1) % window + 1
        if isinstance(window, CompressedKeys):
            keys = reached // window.rate
            total += int((keys if window.limit is None else keys.clamp(max=window.limit)).sum())
            queries += reached.numel()
            continue
        total += int((reached if window is None else reached.clamp(max=window)).sum())
        queries += reached.numel()
    return total / max(queries, 1)


def _precision(job: Any) -> str:
    """Returns the precision of most products, which a transform may change."""
    precisions = [own for transform in getattr(job, "transforms", {}).values() if (own := getattr(transform, "products", None))]
    return precisions[0] if precisions else job.precision.compute if hasattr(job, "precision") else "fp32"


@cache
def _measured(dtype: "torch.dtype", threads: int) -> float:  # noqa: ARG001 (another number has another speed)
    """Measures, once, the FLOP/s of the fastest square product on this CPU with the threads of this process."""
    import torch

    from forge_train.doctor.measure import fastest

    best = 0.0
    for size in _SIZES:
        a = torch.ones(size, size, dtype=dtype)
        seconds = fastest(lambda a=a: torch.mm(a, a), torch.device("cpu"), budget=_SECONDS, batch=1)
        best = max(best, 2 * size**3 / seconds)
        if 8 * seconds > _SECONDS:  # the next size takes 8 times as long
            break
    return best
