"""A run while it trains: what the loop steps through and what hooks receive."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_core.batch import Batch
from forge_core.errors import ForgeError
from forge_core.protocols.data import EvaluationSet, Stream
from forge_core.protocols.model import Optimizer
from forge_core.protocols.run import Hook, Tracker
from forge_parallel.launch.process_group import limit
from forge_parallel.launch.watch import Watch
from forge_parallel.model.parallel_model import ParallelModel, other_weights
from forge_parallel.placement.topology import Topology
from forge_parallel.step.reduce import clip_grad_norm
from forge_parallel.step.step import Step, StepResult, StepTimer
from forge_train.process.ranks import JobRanks
from forge_train.process.stop import Stop, TrainingError
from forge_train.recipe.schema import Job
from forge_train.run.checkpoints import Checkpoints, RunContent
from forge_train.run.health import Health, TooManySkipped
from forge_train.run.observers import Calls
from forge_train.run.saves import Saves
from forge_train.run.training import Clock, Decided, Requests, State, Training

if TYPE_CHECKING:
    from rich.console import Console

DATA = "data"
"""Section of the watch in which a rank waits for its data."""


@dataclass
class Run:
    """One start of a run. `forge_train.run.start.start_run` builds it; hooks read it.

    Attributes:
        decided: what the start decided.
        training: model, optimizer, data and position.
        saves: writes checkpoints.
        health: skipped steps and the band of the loss.
        ranks: this process among the ranks of the job.
        stop: whether and why the run ends.
        requests: what hooks request.
        clock: duration of the run.
        results: the newest result of each evaluation, by the name under which it is logged, with its step; equal on all ranks.
        hooks: hooks in order; the same list that checkpoints record.
        calls: makes all calls of `hooks`.
        trackers: where metrics are written; only on rank 0.
        lag: number of steps that may be queued behind one whose numbers have not been read: 0, or 1 where the host would wait
            for a device. Nothing that the numbers decide is ahead of them: a step that is not finite changes nothing by itself,
            and what is written, evaluated or ended waits for `judge` first.
        batches: micro-batches of the current step, on the host.
        unjudged: the newest steps whose numbers have not been read, each with its step number.
        warm: whether a step of this start is complete.
    """

    decided: Decided
    training: Training
    saves: Saves
    health: Health
    ranks: JobRanks
    stop: Stop
    requests: Requests
    clock: Clock
    hooks: list[Hook]
    lag: int = 0
    trackers: Sequence[Tracker] = ()
    results: dict[str, tuple[int, float]] = field(default_factory=dict)
    calls: Calls = field(default_factory=Calls)
    batches: Sequence[Batch] = ()
    unjudged: "deque[tuple[int, StepResult]]" = field(default_factory=deque)
    warm: bool = False

    @classmethod
    def of(cls, decided: Decided, training: Training, checkpoints: Checkpoints, ranks: JobRanks) -> "Run":
        """Connects the parts of a run; nothing is allocated or written."""
        train, hooks, requests, clock = decided.job.train, list(decided.hooks), Requests(), Clock()
        health = Health(train.max_skipped, train.rollback_after, warns=decided.topology.rank == 0)
        content = RunContent(decided, training, hooks, health, requests, clock)
        return cls(
            decided=decided,
            training=training,
            saves=Saves(checkpoints, content, ranks.signals),
            health=health,
            ranks=ranks,
            stop=Stop(train.max_steps, train.stop_at, ranks.signals),
            requests=requests,
            clock=clock,
            hooks=hooks,
            lag=0 if decided.topology.device.type == "cpu" else 1,
        )

    @property
    def job(self) -> Job:
        """The typed recipe, with the micro-batch that fits into memory."""
        return self.decided.job

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved recipe as plain values; may hold secrets."""
        return self.decided.recipe.as_json()

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self.decided.directory

    @property
    def topology(self) -> Topology:
        """This rank's place in the layout, and its collectives."""
        return self.decided.topology

    @property
    def model(self) -> ParallelModel:
        """The trained model."""
        return self.training.model

    @property
    def optimizer(self) -> Optimizer:
        """Updates the model."""
        return self.training.optimizer

    @property
    def step(self) -> Step:
        """Runs and evaluates the model."""
        return self.training.step

    @property
    def times(self) -> StepTimer:
        """Times of the parts of a step."""
        return self.training.times

    @property
    def data(self) -> Stream:
        """Training data."""
        return self.training.data

    @property
    def evaluations(self) -> Mapping[str, EvaluationSet]:
        """Held-out sets by name."""
        return self.training.evaluations

    @property
    def state(self) -> State:
        """How far the run has come."""
        return self.training.state

    @property
    def watch(self) -> Watch:
        """Records what this rank does, so that a rank that hangs can be named."""
        return self.ranks.watch

    @property
    def console(self) -> "Console | None":
        """The terminal of rank 0; None on other ranks."""
        return self.ranks.console

    @property
    def resumed(self) -> bool:
        """Whether this start restored a checkpoint."""
        return bool(self.training.facts)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the current optimizer step on all ranks, with or without a label, without padding."""
        return self.data.tokens_at(self.state.step)

    @property
    def lr(self) -> float | None:
        """Learning rate of the newest step; None if the optimizer has several."""
        return getattr(self.optimizer, "lr", None)

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Prepares a step: seeds the random numbers, and tells model and optimizer the step.

        The seed depends on (`job.seed`, step, data rank) only, so a resumed run draws the same random numbers.
        """
        # Steps of another size take another time, and the first step of a start compiles.
        places = sum(batch.tokens.numel() for batch in batches)
        section = f"step of {places} places" if self.warm else "first step"
        # A rank that failed in a hook has passed fewer marks than the others; from here on all ranks count the same again.
        self.watch.passed = max(self.watch.passed, (self.state.step + 1) << 20)
        self.watch.enter(f"step {self.state.step + 1}", section)
        self.batches, self.state.complete = batches, False
        key = f"{self.job.job.seed}/{self.state.step}/{self.topology.data_rank}".encode()
        torch.manual_seed(int.from_bytes(blake2b(key, digest_size=7).digest(), "little"))
        self.model.at_step(self.state.step, self.job.train.max_steps)
        if callable(tell := getattr(self.optimizer, "at_step", None)):
            tell(self.state.step)

    @torch.no_grad()
    def update(self, result: StepResult) -> None:
        """Clips the gradients, updates the parameters and clears the gradients; a step that is not finite changes nothing."""
        self.watch.enter(f"the end of step {self.state.step + 1}", "update")
        if self.job.train.grad_clip is not None:
            clip_grad_norm(self.model, result.norm, self.job.train.grad_clip)
        step = self.state.step
        self.optimizer.set_factor(self.training.factor(step) * self.data.lr_scale(step) * self.health.lr_scale)
        self.optimizer.step(result.skip)
        self.optimizer.zero_grad()

    def conclude(self, result: StepResult) -> None:
        """Queues a complete step for `judge`, which reads the numbers of the step `lag` steps before it.

        Raises:
            TrainingError: see `judge`.
        """
        result.send()
        self.unjudged.append((self.state.step, result))
        self.judge(but=self.lag)

    def judge(self, but: int = 0) -> None:
        """Collective: reads the numbers of every complete step but the newest `but`, in the order of the steps.

        Which steps are left is the same on all ranks, so all ranks stop after the same step.

        Raises:
            TrainingError: too many steps were skipped.
            RollBack: too many steps in a row were bad.
        """
        while len(self.unjudged) > but:
            step, result = self.unjudged.popleft()
            self.stop.after(result)
            if result.numbers()["trace"]:
                self.requests.trace_step = step
            try:
                self.health.after(step, result)
            except TooManySkipped as cause:
                raise TrainingError(f"{cause} {self.saves.advice()}") from None

    def settle(self) -> None:
        """Ends a step. After the first step of a start, groups are connected and kernels compiled, so ranks that wait for each
        other give up sooner."""
        self.warm = True
        self.watch.enter(f"the data of step {self.state.step + 1}", DATA)
        seconds = self.job.parallel.step_timeout
        if seconds is not None and self.watch.timeout != seconds:
            self.judge()  # a queued step is not done: a rank may still compile while this one is ahead
            self.watch.timeout = seconds
            limit(seconds, self.topology.device)

    def save(self) -> None:
        """Collective: saves a checkpoint of the current step, or begins to.

        Raises:
            TrainingError: a parameter or the optimizer's state is not finite, or too many steps were skipped; nothing was
                written.
            Superseded: another job has started in the run's directory; nothing was written.
        """
        self.judge()  # the health in the checkpoint includes this step
        self.saves.save()

    def weights(self, section: str) -> AbstractContextManager[None]:
        """Inside, the model has the weights that a hook keeps in `section`; afterwards its own again, bit by bit.

        Raises:
            ForgeError: no hook keeps weights in `section`.
        """
        for hook in self.hooks:
            weights = hook.tensors(self.model).get(section)
            if weights is not None:  # a pipeline stage may have no trained parameter
                return other_weights(self.model, weights)
        raise ForgeError(f"no hook of this run keeps weights {section!r}")

    def log(self, values: Mapping[str, float]) -> None:
        """Writes values of the current step to every tracker, unless a newer job does so in the same directory."""
        if not self.trackers or self.stop.superseded():
            return
        for tracker in self.trackers:
            tracker.write(self.state.step, values)
