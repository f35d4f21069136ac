"""Writes the numbers of a step to the trackers."""

import logging
import resource
import sys
from typing import Any

from forge_core.protocols.run import Hook, Run, StepResult
from forge_parallel.accelerator import take_peaks
from forge_parallel.placement.boxes import local_box
from forge_train.hooks.clock import Stopwatch
from forge_train.speed.utilization import Utilization

_log = logging.getLogger(__name__)


class LogHook(Hook):
    """Writes a line every N steps, at the first step of this start and at the last step of the run.

    A line has the numbers of the step at which it is due. On an accelerator all ranks wait for them; steps without a line do not.

    Values: `loss` (nats per token), `grad_norm` (before clipping), `lr` (where the optimizer has a single one), `skipped` (this
    step), `stage` (its number, from 1, of a run in stages), `skipped_steps` (of the run so far, once there is one) and every
    other number of the step, such as `source/LABEL/loss` and `source/LABEL/tokens` (of that step, where it has any) of each
    source of a mixture; `data/LABEL/tokens` and `data/LABEL/planned_tokens` (of the run so far, with and without loss: read, and
    asked for by the weights); `tokens` (read by the run so far, without padding), `step_tokens` (with loss, in this step),
    `tokens_per_second` and `step_seconds` (means since the last line, all ranks together, without evaluation and saving),
    `peak_memory` (bytes, resident memory of rank 0's process). On an accelerator also `device_memory`, `device_memory_reserved`
    and `device_memory_retries` of rank 0 since the last line, as `forge_parallel.accelerator.take_peaks` has them.

    Of the speed: `model_tflops`, `mfu` and `mfu_attended` (`forge_train.speed.utilization`; their convention is printed at the
    start). Of this step on rank 0: `time/data`, `time/count`, `time/forward`, `time/backward`, `time/reduce`, `time/optimizer`
    and `time/other` in seconds, on an accelerator of the device, so that what it does not wait for takes none; hook `profile`
    says how much of them is exposed communication. Of the memory of rank 0 in bytes: `memory/parameters`, `memory/gradients`,
    `memory/optimizer`, and on an accelerator `memory/rest`, what was held besides at the peak: activations and buffers.
    """

    observes = True

    watch: Stopwatch

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.first = True
        self.speed: Utilization | None = None

    def start(self, run: Run) -> None:
        """Starts the clock, and says what MFU means here."""
        if run.topology.rank == 0:
            self.speed = Utilization.of(run)
            _log.info("%s", self.speed.line())
            if run.console is not None:
                run.console.print(self.speed.line(), highlight=False, soft_wrap=True)
        self.watch = Stopwatch(run)
        self._look_ahead(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Writes a line when one is due."""
        step, due = run.state.step, self._due(run, run.state.step)
        self.first = self.first and not due
        self._look_ahead(run)
        if not due:
            return
        run.judge()  # for `skipped_steps`; on all ranks, though one of them writes
        if run.topology.rank != 0:
            return
        numbers = dict(result.numbers())
        seconds, steps, tokens = self.watch.lap()
        for wish in ("stop", "trace"):
            numbers.pop(wish, None)  # of the loop and of a hook, not metrics
        if "tokens" in numbers:
            numbers["step_tokens"] = numbers.pop("tokens")
        if (health := getattr(run, "health", None)) is not None and health.total:
            numbers["skipped_steps"] = health.total
        if (rate := getattr(run, "lr", None)) is not None:
            numbers["lr"] = rate
        if seconds > 0 and steps > 0:
            numbers["tokens_per_second"] = tokens / seconds
            numbers["step_seconds"] = seconds / steps
            if self.speed is not None:
                numbers |= self.speed.now(tokens / seconds, run)
        if (stage := getattr(run.optimizer, "stage_number", None)) is not None:
            numbers["stage"] = stage + 1
        numbers |= {f"time/{name}": value for name, value in run.phases.take().items()}
        numbers |= mixture(getattr(run, "data", None), step) | take_peaks(run.topology.device)
        numbers |= self._memory(run, numbers.get("device_memory"))
        run.log({**numbers, "tokens": run.state.tokens, "peak_memory": peak_memory()})

    def _due(self, run: Run, step: int) -> bool:
        train = run.job.train
        ends = (train.max_steps, getattr(train, "stop_at", None))
        return self.first or step % self.every == 0 or step in ends

    def _look_ahead(self, run: Run) -> None:
        """Parts of the next step are timed where it has a line, on the rank that writes it."""
        run.phases.timed = run.topology.rank == 0 and self._due(run, run.state.step + 1)

    def _memory(self, run: Run, peak: float | None) -> dict[str, float]:
        held = held_memory(run)
        rest = {} if peak is None else {"memory/rest": peak - sum(held.values())}
        return {**held, **rest}


def held_memory(run: Run) -> dict[str, int]:
    """Bytes that this rank holds all the time, in this stage of training; gradients are as large as what they belong to."""
    parameters = [tensor for _, tensor in run.model.parameters_held()]
    states = [tensor for named in run.optimizer.state().values() for tensor in named.values()]
    return {
        "memory/parameters": sum(map(_bytes, parameters)),
        "memory/gradients": sum(_bytes(tensor) for tensor in parameters if tensor.requires_grad),
        "memory/optimizer": sum(map(_bytes, states)),
    }


def _bytes(tensor: Any) -> int:
    local = local_box(tensor).local
    return local.numel() * local.element_size()


def mixture(data: Any, step: int) -> dict[str, float]:
    """Tokens of each source that the run has read and that its weights asked for, where it mixes several: no device is asked."""
    mix = getattr(data, "mix", None)
    found = mix(step) if mix else {}
    return {
        f"data/{label}/{what}": value
        for label, pair in found.items()
        if len(found) > 1
        for what, value in zip(("tokens", "planned_tokens"), pair, strict=True)
    }


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
