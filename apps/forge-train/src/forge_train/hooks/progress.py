"""Hook `progress`: shows the progress of a run on the terminal."""

from dataclasses import dataclass
from datetime import datetime
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from forge_core.component import FREE
from forge_core.protocols.run import Hook, Run, StepResult
from forge_core.terminal import clock, count, size
from forge_train.hooks.metrics import Utilization, peak_memory
from forge_train.hooks.periodic import Stopwatch

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass(kw_only=True)
class Progress(Hook):
    """Shows step, loss, learning rate, tokens/s, MFU, memory, faults and the time left: a live panel on a terminal, otherwise
    occasional lines of text.

    Lines have time stamps. The first and the last step always have a line. The time left is extrapolated from the steps since
    this start, including evaluation and saving.
    """

    key_class: ClassVar = FREE
    observes = True

    every: Annotated[int, Gt(0)] = 10
    """Optimizer steps between updates of the loss."""
    seconds: Annotated[float, Ge(0)] = 10.0
    """Minimum seconds between lines if the output is not a terminal."""

    def __post_init__(self) -> None:
        self.view: _Live | _Lines | None = None
        self.loss = float("nan")
        self.rate = 0.0

    def start(self, run: Run) -> None:
        """Starts the clock and opens the panel."""
        self.watch = Stopwatch(run)
        self.begun = (perf_counter(), run.state.step)
        if run.console is not None:
            live = run.console.is_terminal and not run.console.is_dumb_terminal
            self.view = _Live(run.console, Utilization.of(run)) if live else _Lines(run.console, self.seconds)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Updates the panel; reads the step's numbers every N steps."""
        if self.view is None:
            return
        step, total = run.state.step, run.job.train.max_steps
        fresh = step % self.every == 0 or step in (self.begun[1] + 1, total)
        if fresh:
            self.loss = result.numbers()["loss"]
            seconds, _, tokens = self.watch.lap()
            self.rate = tokens / seconds if seconds > 0 else 0.0
        self.view.show(_Now(step, total, self.loss, self.rate, self._left(step, total), fresh), run)

    def finish(self, run: Run) -> None:
        """Closes the panel."""
        if self.view is not None:
            self.view.close()

    def leave(self, run: Run) -> None:
        """Closes the panel; the next start opens a new one."""
        self.finish(run)

    def _left(self, step: int, total: int) -> float:
        started, first = self.begun
        return (perf_counter() - started) / max(1, step - first) * max(0, total - step)


@dataclass(frozen=True)
class _Now:
    """Values of a line; `fresh` is True if loss and rate are of this step."""

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

    def show(self, now: _Now, _: Run) -> None:
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
    """A panel that redraws itself at most ten times a second: a bar, the newest numbers, and the last warning of the run."""

    def __init__(self, console: "Console", speed: Utilization) -> None:
        from rich.live import Live

        self.speed = speed
        self.live = Live(console=console, auto_refresh=False)
        self.live.start()
        console.show_cursor(True)  # `start` hides the cursor, and a crash would leave it hidden
        self.drawn = 0.0

    def show(self, now: _Now, run: Run) -> None:
        moment = perf_counter()
        if now.last or moment - self.drawn >= 0.1:
            self.drawn = moment
            self.live.update(self._panel(now, run), refresh=True)

    def close(self) -> None:
        self.live.stop()

    def _panel(self, now: _Now, run: Run) -> "RenderableType":
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        shown = {"loss": f"{now.loss:.4f}", "tokens/s": count(now.rate)}
        if (rate := run.lr) is not None:
            shown["lr"] = f"{rate:.3g}"
        if (share := self.speed.now(now.rate, run).get("mfu")) is not None:
            shown["MFU"] = f"{share:.1%}"
        shown |= {"memory": _memory(run), "left": clock(now.left)}
        table = Table.grid(padding=(0, 3))
        table.add_row(*(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in shown.items()))
        faults = list(run.health.summary())
        warning = [Text(faults[-1], style="yellow")] if faults else []
        bar = Table.grid(padding=(0, 2))
        bar.add_row(Text(f"step {now.step}/{now.total}"), ProgressBar(total=max(now.total, 1), completed=now.step, width=40))
        return Panel(Group(bar, table, *warning), title=run.job.job.name, expand=False)


def _memory(run: Run) -> str:
    """Returns the used memory of this rank's device, or the peak memory of the process if the device has no such counter."""
    from forge_parallel.accelerator import free_memory, memory

    whole, free = memory(run.topology.device), free_memory(run.topology.device)
    return f"{size(whole - free)} of {size(whole)}" if whole and free is not None else size(peak_memory())
