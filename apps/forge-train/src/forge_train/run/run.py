"""A run while it trains: what the loop steps through and what hooks are given."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_core.batch import Batch
from forge_core.errors import ForgeError
from forge_core.protocols.data import Cursor, EvaluationSet, Stream
from forge_core.protocols.model import Optimizer
from forge_core.protocols.run import Hook, Tracker
from forge_parallel.launch.process_group import limit
from forge_parallel.launch.watch import Watch
from forge_parallel.model.parallel_model import ParallelModel, other_weights
from forge_parallel.placement.topology import Topology
from forge_parallel.step.reduce import clip_grad_norm
from forge_parallel.step.step import Step, StepResult
from forge_parallel.step.timing import StepTimer
from forge_train.process.stop import Stop
from forge_train.recipe.schema import Job
from forge_train.run.health import Health
from forge_train.run.observers import Calls

if TYPE_CHECKING:
    from rich.console import Console

DATA = "data"
"""Section of the watch in which a rank waits for its data."""


@dataclass
class State:
    """Where the run stands: completed optimizer steps, tokens that went through the model (padding is none), data position."""

    step: int
    tokens: int
    cursor: Cursor

    def advance(self, cursor: Cursor, tokens: int) -> None:
        """One step is done and its data consumed."""
        self.step += 1
        self.tokens += tokens
        self.cursor = cursor


@dataclass
class Run:
    """Everything assembled. Attributes are what hooks may read; `assemble` makes it.

    Attributes:
        lag: steps that may be queued behind one that has no verdict yet: 0, or 1 where the host would wait for a device. Nothing
            that a verdict decides is ahead of it, since a step that is not finite changes nothing by itself, and what is
            written, evaluated or ended waits for all verdicts first (`judge`).
        batches: of the current step, on the host.
        hook_calls: makes all calls of `hooks`.
        settled: whether a step of this start is complete.
        complete: whether weights, optimizer and data position are those of one step; not while the next one is made.
        unjudged: the newest steps, each with its number.
        elapsed: seconds of training that earlier starts of the run took.
        resumed: whether the state is that of a checkpoint.
        recipe_micro_batch: what the recipe asks for, where a smaller one is used since it did not fit; else 0.
        left_out: whether the last step was not saved, as the time did not suffice.
        wants_trace: whether this rank asks for a profile; the step's numbers carry it to all.
        good_step: collective; step of the newest verified checkpoint with the loss in its band, if there is one.
        trace_wanted_at: the newest step, of those with a verdict, in which some rank asked; 0 for none. Alike on all ranks.
    """

    job: Job
    directory: Path
    topology: Topology
    model: ParallelModel
    optimizer: Optimizer
    factor: Callable[[int], float]
    step: Step
    data: Stream
    evaluations: Mapping[str, EvaluationSet]
    state: State
    console: "Console | None"
    stop: Stop
    parameters: int = 0
    elapsed: float = 0.0
    started: float = field(default_factory=time.monotonic)
    resumed: bool = False
    left_out: bool = False
    recipe_micro_batch: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    paused: float = 0.0
    measured: dict[str, tuple[int, float]] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    due: bool = False
    wants_trace: bool = False
    trace_wanted_at: int = 0
    save: Callable[[], Any] = field(default=lambda: None)
    may_save: Callable[[], bool] = field(default=lambda: True)
    finish_saves: Callable[[], Any] = field(default=lambda: None)
    close: Callable[[], Any] = field(default=lambda: None)
    check: Callable[[], Any] = field(default=lambda: None)
    good_step: Callable[[], int | None] = field(default=lambda: None)
    watch: Watch = field(default_factory=Watch)
    health: Health = field(default_factory=Health)
    hooks: Sequence[Hook] = ()
    hook_calls: Calls = field(default_factory=Calls)
    trackers: Sequence[Tracker] = ()
    phases: StepTimer = field(default_factory=StepTimer)
    batches: Sequence[Batch] = ()
    lag: int = 0
    settled: bool = False
    complete: bool = True
    unjudged: "deque[tuple[int, StepResult]]" = field(default_factory=deque)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the current optimizer step on all ranks, with or without a label; padding is none."""
        return self.data.tokens_at(self.state.step)

    @property
    def seconds(self) -> float:
        """Of the whole run: those of earlier starts, as their checkpoints say, and those since this start, pauses included."""
        return self.elapsed + time.monotonic() - self.started

    @property
    def lr(self) -> float | None:
        """The rate of the newest step, where the optimizer has a single one."""
        return getattr(self.optimizer, "lr", None)

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Before a step's first forward: random numbers depend on (seed, step, data rank) only, so a resumed run draws the
        same ones; and a model whose loss changes over the run is told the step, as is an optimizer of a run in stages."""
        # Steps of another size take another time, and the first one of a start compiles.
        places = sum(batch.tokens.numel() for batch in batches)
        section = f"step of {places} places" if self.settled else "first step"
        # A rank that failed in a hook has passed fewer marks than the others; from here on they count alike again.
        self.watch.passed = max(self.watch.passed, (self.state.step + 1) << 20)
        self.watch.enter(f"step {self.state.step + 1}", section)
        self.batches, self.complete = batches, False
        key = f"{self.job.job.seed}/{self.state.step}/{self.topology.data_rank}".encode()
        torch.manual_seed(int.from_bytes(blake2b(key, digest_size=7).digest(), "little"))
        self.model.at_step(self.state.step, self.job.train.max_steps)
        if callable(tell := getattr(self.optimizer, "at_step", None)):
            tell(self.state.step)

    @torch.no_grad()
    def update(self, result: StepResult) -> None:
        """Clip, optimizer, clear. A step whose loss or norm is not finite changes nothing."""
        self.watch.enter(f"the end of step {self.state.step + 1}", "update")
        if self.job.train.grad_clip is not None:
            clip_grad_norm(self.model, result.norm, self.job.train.grad_clip)
        self.optimizer.set_factor(self.factor(self.state.step) * self.data.lr_scale(self.state.step) * self.health.lr_scale)
        self.optimizer.step(result.skip)
        self.optimizer.zero_grad()

    def conclude(self, result: StepResult) -> None:
        """After the update: the step waits for its verdict, and the one `lag` steps before it gets its own.

        Raises:
            TrainingError: see `judge`.
        """
        self.complete = True
        result.send()
        self.unjudged.append((self.state.step, result))
        self.judge(but=self.lag)

    def judge(self, but: int = 0) -> None:
        """Collective: every complete step has its verdict afterwards, the newest `but` excepted. In the order of the steps, each
        under its own number; which ones are left is the same on all ranks, so all of them stop after the same step.

        Raises:
            TrainingError: too many steps were skipped.
        """
        while len(self.unjudged) > but:
            step, result = self.unjudged.popleft()
            self.stop.after(result)
            if result.numbers()["trace"]:
                self.trace_wanted_at = step
            self.health.after(step, result)

    def settle(self) -> None:
        """After a step of this start: its groups are connected and its kernels compiled, so ranks need not wait for each other as
        long as at the start."""
        self.settled = True
        self.watch.enter(f"the data of step {self.state.step + 1}", DATA)
        seconds = self.job.parallel.step_timeout
        if seconds is not None and self.watch.timeout != seconds:
            self.judge()  # queued is not done: a rank may still compile while this one is ahead
            self.watch.timeout = seconds
            limit(seconds, self.topology.device)

    def weights(self, section: str) -> AbstractContextManager[None]:
        """Inside, the model has the weights that a hook keeps in this section; afterwards its own, bit by bit.

        Raises:
            ForgeError: no hook keeps it.
        """
        for hook in self.hooks:
            kept = hook.tensors(self.model).get(section)
            if kept is not None:  # a stage of a pipeline may have nothing that learns
                return other_weights(self.model, kept)
        raise ForgeError(f"no hook of this run keeps weights {section!r}")

    def log(self, values: Mapping[str, float]) -> None:
        """Writes values of the current step to every tracker, unless a newer job does so in the same directory."""
        if not self.trackers or self.stop.superseded():
            return
        for tracker in self.trackers:
            tracker.write(self.state.step, values)
