"""Writes the numbers of a step to the trackers."""

import resource
import sys
from typing import Any

from forge_core.protocols.run import Hook, Run, StepResult
from forge_parallel.accelerator import take_peaks
from forge_train.hooks.clock import Stopwatch


class LogHook(Hook):
    """Writes a line every N steps, at the first step of this start and at the last step of the run.

    A line has the numbers of the step at which it is due. On an accelerator all ranks wait for them; steps without a line do not.

    Values: `loss` (nats per token), `grad_norm` (before clipping), `lr` (where the optimizer has a single one), `skipped` (this
    step), `skipped_steps` (of the run so far, once there is one) and every other number of the step, such as `source/LABEL/loss`
    and `source/LABEL/tokens` (of that step, where it has any) of each source of a mixture; `data/LABEL/tokens` and
    `data/LABEL/planned_tokens` (of the run so far, with and without loss: read, and asked for by the weights); `tokens` (seen by
    the run so far), `step_tokens` (with loss, in this step), `tokens_per_second` and `step_seconds` (means since the last line,
    all ranks together, without evaluation and saving), `peak_memory` (bytes, resident memory of rank 0's process). On an
    accelerator also `device_memory`, `device_memory_reserved` and `device_memory_retries` of rank 0 since the last line, as
    `forge_parallel.accelerator.take_peaks` has them.
    """

    watch: Stopwatch

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.first = True

    def start(self, run: Run) -> None:
        """Starts the clock."""
        self.watch = Stopwatch(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Writes a line when one is due."""
        step, train = run.state.step, run.job.train
        due = self.first or step % self.every == 0 or step in (train.max_steps, getattr(train, "stop_at", None))
        if not due:
            return
        self.first = False
        run.judge()  # for `skipped_steps`; on all ranks, though one of them writes
        if run.topology.rank != 0:
            return
        numbers = dict(result.numbers())
        seconds, steps, tokens = self.watch.lap()
        numbers.pop("stop", None)  # a request to the loop, not a metric
        if "tokens" in numbers:
            numbers["step_tokens"] = numbers.pop("tokens")
        if (health := getattr(run, "health", None)) is not None and health.total:
            numbers["skipped_steps"] = health.total
        if (rate := getattr(run, "lr", None)) is not None:
            numbers["lr"] = rate
        if seconds > 0 and steps > 0:
            numbers["tokens_per_second"] = tokens / seconds
            numbers["step_seconds"] = seconds / steps
        numbers |= mixture(getattr(run, "data", None), step) | take_peaks(run.topology.device)
        run.log({**numbers, "tokens": run.state.tokens, "peak_memory": peak_memory()})


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
