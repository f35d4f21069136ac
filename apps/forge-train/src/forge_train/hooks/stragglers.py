"""Hook `stragglers`: finds ranks that are slower than others with the same work, from times that every rank measures itself.

A rank is slow in a window if it takes `ratio` times as long as the median of the others, exceeds their scatter (median absolute
deviation), and costs a noticeable part of the step. A rank becomes a straggler when it is slow in `most` of the last `WINDOWS`
windows, because one slow window may be noise, and stops being one when it is slow in none of them.

Functions import torch, so that importing this module does not.
"""

import json
import logging
import socket
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from annotated_types import Gt

from forge_ckpt.world import ProcessGroupWorld
from forge_core.component import FREE
from forge_core.errors import LayoutError
from forge_core.protocols.run import Hook, Run, StepResult

if TYPE_CHECKING:
    import torch

WINDOWS = 5
MOST = 3
RATIO = 1.5
SCATTERS = 5.0
"""Minimum distance of a slow rank from the others' median, in standard deviations estimated from their absolute deviations."""

SHARE = 0.1
"""Minimum cost of a slow rank, as a share of the time of a step."""

_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution."""


class Time(NamedTuple):
    """Times that a rank measured in a window.

    Attributes:
        own: seconds per step without waiting for other ranks, median over the steps.
        step: seconds per step, including waiting.
        alike: key of the ranks with the same work, such as a pipeline stage; only ranks with equal keys are compared.
    """

    own: float
    step: float
    alike: Hashable = 0


class Slow(NamedTuple):
    """A rank that became a straggler, or stopped being one.

    Attributes:
        own, others: seconds per step of this rank, and the median of the others, in the newest window.
        over: True if the rank stopped being a straggler.
    """

    rank: int
    own: float
    others: float
    over: bool = False


@dataclass
class SlowRanks:
    """Finds stragglers window by window; the result depends only on the times, so all ranks agree.

    Args:
        ratio: minimum ratio of a slow rank's time to the median of the others.
        most: number of slow windows among the last `WINDOWS` that make a straggler.
        resolution: seconds below which differences are ignored.
    """

    ratio: float = RATIO
    most: int = MOST
    resolution: float = 0.0
    named: set[int] = field(default_factory=set)
    _slow: defaultdict[int, deque[bool]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=WINDOWS)))

    def take(self, times: Sequence[Time]) -> list[Slow]:
        """Takes the times of one window by rank, and returns the changes."""
        changed = []
        for rank, mine in enumerate(times):
            others = [time.own for other, time in enumerate(times) if other != rank and time.alike == mine.alike]
            usual = median(others) if others else mine.own
            seen = self._slow[rank]
            seen.append(self._is_slow(mine, others, usual))
            if rank not in self.named and sum(seen) >= self.most:
                self.named.add(rank)
                changed.append(Slow(rank, mine.own, usual))
            elif rank in self.named and not any(seen):
                self.named.discard(rank)
                changed.append(Slow(rank, mine.own, usual, over=True))
        return changed

    def _is_slow(self, mine: Time, others: Sequence[float], usual: float) -> bool:
        scatter = _SIGMA * median(abs(other - usual) for other in others) if others else 0.0
        more = mine.own - usual
        return more > max((self.ratio - 1) * usual, SCATTERS * scatter, SHARE * mine.step, self.resolution)


_log = logging.getLogger(__name__)

_COUNTED = ("step of", "update", "data")
"""Prefixes of the watch's sections that belong to a step; the first step of a start, which compiles, and hooks do not count."""

_RESOLUTION = 0.02
"""Seconds below which differences between hosts are noise of the operating system."""

_PRODUCTS, _ROWS = 8, 2048
"""Number and size of the matrix products that time an accelerator; they take some milliseconds."""


@dataclass(kw_only=True)
class Stragglers(Hook):
    """Names ranks, with their hosts, that are slower than others with the same work, so that all other ranks wait for them.

    In forward and backward, ranks wait for each other, so these times are equal on all ranks. A rank's own time is what it needs
    before its first communication: reading data and preparing the step. On an accelerator, the host queues the whole step without
    waiting, so this time counts, too; to measure the device, a fixed amount of work is timed on it without a wait of the host.
    The times of all ranks are exchanged through the host, once every N steps.
    """

    key_class: ClassVar = FREE
    observes = True

    every: Annotated[int, Gt(1)] = 20
    """Optimizer steps per window, after which all ranks compare their times. Three slow windows of five make a straggler."""
    ratio: Annotated[float, Gt(1)] = RATIO
    """A rank is slow if its own work in a step takes more than this multiple of the median of the others."""

    def __post_init__(self) -> None:
        self.world: ProcessGroupWorld | None = None
        self.seen: Mapping[str, float] = {}
        self.ready = 0.0
        self.steps: list[tuple[float, float]] = []
        self.hosts: list[str] = []
        self.device: _Device | None = None

    def check(self, run: Run) -> None:
        """Raises a LayoutError if no two ranks have the same work."""
        layout = run.topology.layout
        if layout.world > 1 and layout.pp == layout.world:
            raise LayoutError(
                f"hook 'stragglers' compares ranks with the same work, but each of the {layout.pp} ranks has its own pipeline "
                "stage; remove the hook, or use several ranks per stage"
            )

    def start(self, run: Run) -> None:
        """Prepares the comparison; does nothing on a single rank."""
        topology = run.topology
        if topology.size == 1:
            return
        self.world = ProcessGroupWorld()
        self.hosts = [name.decode() for name in self.world.all_gather(socket.gethostname().encode())]
        self.by_host, self.by_device = (SlowRanks(self.ratio, resolution=seconds) for seconds in (_RESOLUTION, 0.0))
        if topology.device.type != "cpu":
            self.device = _Device(topology.device)
        self.seen = run.watch.seconds()

    def before_step(self, run: Run) -> None:
        """Records this rank's time until the first communication of the step."""
        if self.world is not None:
            self.ready = _of_step(self._since(run))

    def after_step(self, run: Run, result: StepResult) -> None:
        """Records the time of the step, and compares ranks if the step is due."""
        if self.world is None:
            return
        seconds = self._since(run)
        queued = 0.0 if self.device is None else sum(value for name, value in seconds.items() if name.startswith("step of"))
        self.steps.append((self.ready + queued, self.ready + _of_step(seconds)))
        if run.state.step % self.every == 0:
            self._compare(run, self.world)

    def _since(self, run: Run) -> dict[str, float]:
        """Returns the seconds of each section of the watch since the last call."""
        before, self.seen = self.seen, run.watch.seconds()
        return {name: value - before.get(name, 0.0) for name, value in self.seen.items()}

    def _compare(self, run: Run, world: ProcessGroupWorld) -> None:
        """Collective: exchanges the times of all ranks, reports changes, and logs numbers."""
        mine = [median(column) for column in zip(*self.steps, strict=True)]
        self.steps.clear()
        products = self.device.seconds() if self.device else None
        told = [json.loads(each) for each in world.all_gather(json.dumps([*mine, products]).encode())]
        stages = [run.topology.layout.coordinates(rank)["pp"] for rank in range(run.topology.size)]
        work = [Time(own, step, stage) for (own, step, _), stage in zip(told, stages, strict=True)]
        found = [(slow, "of a step by itself") for slow in self.by_host.take(work)]
        measured = [seconds for _, _, seconds in told if seconds is not None]
        if len(measured) == len(told):
            found += [(slow, "for the same products") for slow in self.by_device.take([Time(each, each) for each in measured])]
        for slow, what in found:
            self._say(run, slow, what)
        if self.device:
            self.device.work()
        if run.topology.rank == 0:
            run.log(_numbers([time.own for time in work], self.by_host.named | self.by_device.named))

    def _say(self, run: Run, slow: Slow, what: str) -> None:
        who = f"rank {slow.rank} on {self.hosts[slow.rank]}"
        if slow.over:
            text = f"after step {run.state.step}, {who} is as fast as the others again"
        else:
            text = (
                f"after step {run.state.step}, {who} is slower than the others: {_told(slow.own)} {what}, where their median "
                f"is {_told(slow.others)}; all ranks wait for it. Look at what else runs there, at its clocks and its storage"
            )
        run.health.warn(text)


class _Device:
    """Times a fixed amount of work on an accelerator, between two events in its queue."""

    def __init__(self, device: "torch.device") -> None:
        import torch

        self.device = device
        self.left = torch.ones(_ROWS, _ROWS, dtype=torch.bfloat16, device=device)
        self.into = torch.empty_like(self.left)
        self.between: tuple[Any, Any] | None = None

    def work(self) -> None:
        """Queues the work."""
        import torch

        from forge_parallel.accelerator import timed_event

        before = timed_event(self.device)
        for _ in range(_PRODUCTS):
            torch.mm(self.left, self.left, out=self.into)
        self.between = before, timed_event(self.device)

    def seconds(self) -> float | None:
        """Returns the seconds of the last queued work, which has finished by the time of this call; None before the first."""
        return None if self.between is None else self.between[0].elapsed_time(self.between[1]) / 1000


def _of_step(seconds: Mapping[str, float]) -> float:
    """Returns the seconds of the sections that belong to a step."""
    return sum(value for name, value in seconds.items() if name.startswith(_COUNTED))


def _numbers(own: Sequence[float], named: set[int]) -> dict[str, float]:
    """Returns the numbers to log: the slowest rank, its ratio to the median of all, and the number of stragglers."""
    usual, most = median(own), max(own)
    slowest = {"stragglers/slowest_rank": float(own.index(most)), "stragglers/named": float(len(named))}
    return slowest | ({"stragglers/slowest_ratio": most / usual} if usual > 0 else {})


def _told(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
