"""Shows the progress of a run."""

from dataclasses import dataclass
from datetime import datetime
from time import perf_counter
from typing import TYPE_CHECKING

from forge_core.protocols.job import Job
from forge_core.protocols.run import Hook, Run, StepResult
from forge_core.terminal.quantities import clock, count
from forge_train.hooks.clock import Stopwatch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar


class ProgressHook(Hook):
    """One live line on a terminal; elsewhere a line with a time stamp at the first and last step and now and then.

    The time left is that of the steps since this start, evaluation and saving included.
    """

    watch: Stopwatch
    begun: tuple[float, int]

    def __init__(self, every: int = 10, seconds: float = 10.0) -> None:
        self.every, self.seconds = every, seconds
        self.view: _Live | _Lines | None = None
        self.loss = float("nan")
        self.rate = 0.0

    def start(self, run: Run) -> None:
        """Starts the clock and opens the live line."""
        self.watch = Stopwatch(run)
        self.begun = (perf_counter(), run.state.step)
        if run.console is not None:
            live = run.console.is_terminal and not run.console.is_dumb_terminal
            self.view = _Live(run.console, run.job) if live else _Lines(run.console, self.seconds)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Moves the line; reads the numbers when they are due."""
        if self.view is None:
            return
        step, total = run.state.step, run.job.train.max_steps
        fresh = step % self.every == 0 or step in (self.begun[1] + 1, total)
        if fresh:
            self.loss = result.numbers()["loss"]
            seconds, _, tokens = self.watch.lap()
            self.rate = tokens / seconds if seconds > 0 else 0.0
        now = _Now(step, total, self.loss, self.rate, self._left(step, total), fresh)
        self.view.show(now)

    def finish(self, run: Run) -> None:
        """Closes the live line."""
        if self.view is not None:
            self.view.close()

    def _left(self, step: int, total: int) -> float:
        started, first = self.begun
        return (perf_counter() - started) / max(1, step - first) * max(0, total - step)


@dataclass(frozen=True)
class _Now:
    """What a line says; `fresh` when loss and rate are of this step."""

    step: int
    total: int
    loss: float
    rate: float
    left: float
    fresh: bool

    @property
    def last(self) -> bool:
        return self.step >= self.total

    def __str__(self) -> str:
        """`loss 4.1234  21.3k tokens/s  3:40 left`"""
        return f"loss {self.loss:.4f}  {count(self.rate)} tokens/s  {clock(self.left)} left"


class _Lines:
    """`12:30:05  step 120/600 (20%)  loss 4.1234  21.3k tokens/s  3:40 left`"""

    def __init__(self, console: "Console", seconds: float) -> None:
        self.console = console
        self.seconds = seconds
        self.shown: float | None = None

    def show(self, now: _Now) -> None:
        moment = perf_counter()
        soon = self.shown is not None and moment - self.shown < self.seconds
        if not now.fresh or (soon and not now.last):
            return
        self.shown = moment
        text = f"{datetime.now():%H:%M:%S}  step {now.step}/{now.total} ({now.step * 100 // now.total}%)  {now}"
        self.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class _Live:
    """The same on one line that redraws itself at most ten times a second, with a bar."""

    def __init__(self, console: "Console", job: Job) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.bar: Bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
        )
        self.task = self.bar.add_task("the first step takes longest", total=job.train.max_steps)
        self.bar.start()
        console.show_cursor(True)  # hidden by `start`, and a crash would leave it hidden
        self.drawn = 0.0

    def show(self, now: _Now) -> None:
        moment = perf_counter()
        if now.last or moment - self.drawn >= 0.1:
            self.drawn = moment
            self.bar.update(self.task, completed=now.step, description=str(now))
            self.bar.refresh()

    def close(self) -> None:
        self.bar.stop()
