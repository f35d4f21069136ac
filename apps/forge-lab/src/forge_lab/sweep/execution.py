"""Trains the points of a sweep, several at a time: all to their end, or by successive halving (Jamieson and Talwalkar, 2016).

With halving, a run follows its full-length schedule from the first step and pauses at a rung through `train.stop_at`. A point
that continues is therefore bitwise identical to one that never paused.
"""

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from forge_core.errors import ForgeError
from forge_core.machine import usable_cores
from forge_lab.sweep.files import Outcome, finite, outcome_of, reached, share_data, write_outcome
from forge_lab.sweep.grid import STOP, Sweep
from forge_lab.sweep.points import Point, Search
from forge_lab.sweep.processes import Process, StartProcess, command_of, meaning, start, tail
from forge_train.process.stop import heard

DEVICES = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class RunSlot:
    """Share of this machine for one run.

    Attributes:
        number: index of the slot, from 0.
        environment: environment variables of the run.
        says: short description, printed when a run starts.
    """

    number: int
    environment: Mapping[str, str]
    says: str


def slots(jobs: int, processes: int, accelerators: int, given: Mapping[str, str] = os.environ) -> list[RunSlot]:
    """Returns `jobs` slots on this machine.

    The accelerators in `CUDA_VISIBLE_DEVICES`, or all if it is unset, are divided evenly; if there are more runs than
    accelerators, the runs share them round-robin. OMP_NUM_THREADS of each process is an equal share of the cores, unless it is
    already set.

    Args:
        jobs: number of concurrent runs.
        processes: number of processes of each run.
        accelerators: number of accelerators that this process can use.

    Raises:
        ForgeError: a run has more processes than accelerators.
    """
    named = [item.strip() for item in given.get(DEVICES, "").split(",") if item.strip()]
    devices = (named or [str(index) for index in range(accelerators)])[:accelerators]
    share = max(1, len(devices) // jobs)
    if devices and processes > share:
        raise ForgeError(
            f"--jobs {jobs}: with {len(devices)} accelerators each run gets {share}, but has {processes} processes; "
            f"lower --jobs to {len(devices) // processes}"
            if len(devices) >= processes
            else f"processes = {processes}: this machine has {len(devices)} accelerators; lower it"
        )
    threads = {} if THREADS in given else {THREADS: str(max(1, usable_cores() // (jobs * processes)))}
    found = []
    for number in range(jobs):
        own = [devices[(number * share + index) % len(devices)] for index in range(share)] if devices else []
        placed = {DEVICES: ",".join(own)} if own else {}
        found.append(RunSlot(number, {**threads, **placed}, f"accelerator {','.join(own)}" if own and jobs > 1 else ""))
    return found


class StopRequests:
    """Counts the stop signals that this process receives from a terminal, a scheduler or a user.

    Attributes:
        times: number of signals so far.
        name: name of the first signal; empty before it.
    """

    def __init__(self) -> None:
        self.times = 0
        self.name = ""

    def listening(self) -> AbstractContextManager[None]:
        """Context in which stop signals are counted. It must be entered in the main thread."""
        return heard(self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.times += 1
        self.name = self.name or signal.Signals(number).name


TRIES = {"failed": 2, "lost": 5}
"""Maximum number of starts of a run per start of the sweep, by the way the run ended."""
_SAY_EVERY = 30.0


@dataclass(frozen=True)
class Task:
    """A point to train up to the step `until` (a rung), or to its end if `until` is None."""

    point: Point
    until: int | None = None


@dataclass
class Executor:
    """Runs tasks in the slots of this machine.

    Attributes:
        sweep: sweep of the points.
        places: slots, one per concurrent run.
        say: called with a line about each start and end.
        asked: stop signals that this process received.
        begin: function that starts a process.
        look: seconds between two polls of the processes.
    """

    sweep: Sweep
    places: Sequence[RunSlot]
    say: Callable[[str], None]
    asked: StopRequests = field(default_factory=StopRequests)
    begin: StartProcess = start
    look: float = 0.05

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs every task to its end, or until this process is asked to stop; `outcome_of` then returns the outcome of each.

        A failed run is started once more, after all others. A run that lost a rank or ran out of memory is restarted up to
        `TRIES["lost"]` times in all.
        """
        waiting = deque((task, 1) for task in tasks)
        free, running = deque(self.places), list[_Running]()
        passed_on, total, done, said = 0, len(tasks), 0, time.monotonic()
        while waiting or running:
            if self.asked.times > passed_on:
                passed_on = self.asked.times
                self._stop(running, passed_on)
                waiting.clear()
            while waiting and free:
                task, attempt = waiting.popleft()
                running.append(self._start(task, attempt, free.popleft(), f"{done + len(running) + 1}/{total}"))
            for one in list(running):
                code = one.process.poll()
                if code is None:
                    continue
                running.remove(one)
                free.append(one.slot)
                again = self._end(one, code, stopping=passed_on > 0)
                if again:
                    waiting.append((one.task, one.attempt + 1))
                else:
                    done += 1
            if time.monotonic() - said > _SAY_EVERY and running:
                said = time.monotonic()
                self.say(f"{done} of {total} done; " + ", ".join(self._where(one) for one in running))
            if running:
                time.sleep(self.look)

    def _start(self, task: Task, attempt: int, slot: RunSlot, count: str) -> "_Running":
        point = task.point
        share_data(self.sweep, point)
        stop = [f"--{STOP}={task.until}"] if task.until is not None else []
        command = command_of(["run", str(self.sweep.recipe_of(point)), *stop], self.sweep.grid.processes)
        words = [f"step {task.until}" if task.until else "", slot.says, f"try {attempt}" if attempt > 1 else ""]
        self.say(f"[{count}] {point.name}: started" + "".join(f", {word}" for word in words if word))
        process = self.begin(command, slot.environment, self._output(point))
        return _Running(task, attempt, slot, process, time.monotonic())

    def _end(self, one: "_Running", code: int, stopping: bool) -> bool:
        """Writes the outcome of a run; returns whether to start it again."""
        task, folder = one.task, self.sweep.folder(one.task.point)
        before, end = outcome_of(folder), meaning(code, stopping)
        step, tokens, value = reached(folder, self.sweep.grid.search.metric)
        wanted = task.until or self.sweep.steps(task.point)
        now = replace(
            before,
            status="stopped",
            step=step,
            tokens=tokens,
            value=finite(value),
            code=code,
            starts=before.starts + 1,
            seconds=round(before.seconds + time.monotonic() - one.since, 2),
            said=(),
        )
        lines = tail(self._output(task.point))
        if end == "finished":
            now = self._finished(now, task, wanted, value)
        elif end != "stopped":
            now = replace(now, status="diverged" if end == "diverged" else "failed", said=lines)
            now = replace(now, rungs={**now.rungs, str(wanted): None})
        write_outcome(folder, now)
        again = one.attempt < TRIES.get(end, 1)
        self.say(_told(task.point, now, again, self.sweep.grid.search.metric))
        return again

    def _finished(self, now: Outcome, task: Task, wanted: int, value: float | None) -> Outcome:
        """Returns the outcome of a run that ended normally: at its rung, at its end, or earlier (end of the data, or a hook)."""
        rungs = {**now.rungs, str(wanted): now.value} if task.until is not None else now.rungs
        if value is None:
            said = (f"it has no {self.sweep.grid.search.metric!r} at its last step",)
            return replace(now, status="failed", rungs=rungs, said=said)
        paused = task.until is not None and now.step >= wanted
        return replace(now, status="diverged" if now.value is None else "paused" if paused else "finished", rungs=rungs)

    def _stop(self, running: Sequence["_Running"], times: int) -> None:
        hard = times > 2
        self.say(f"{self.asked.name}: stopping {len(running)} runs " + ("at once" if hard else "after they save"))
        for one in running:
            one.process.stop(hard)

    def _output(self, point: Point) -> Path:
        return self.sweep.directory / "logs" / f"{point.name}.log"

    def _where(self, one: "_Running") -> str:
        step = 0
        with suppress(OSError):  # the run may not have written its metrics file yet
            step = reached(self.sweep.folder(one.task.point), "loss")[0]
        return f"{one.task.point.name} at step {step}/{one.task.until or self.sweep.steps(one.task.point)}"


@dataclass
class _Running:
    task: Task
    attempt: int
    slot: RunSlot
    process: Process
    since: float


def _told(point: Point, now: Outcome, again: bool, metric: str) -> str:
    result = f", {metric} {now.value:.6g}" if now.value is not None else ""
    line = f"{point.name}: {now.status} at step {now.step}{result}"
    if now.status in ("failed", "diverged") and now.said:
        line += f" (exit code {now.code}{', will be restarted' if again else ''}); its last lines:\n"
        line += "\n".join(f"    {text}" for text in now.said)
    return line


def outcomes(sweep: Sweep) -> Mapping[str, Outcome]:
    """Returns the current outcome of every point, by name."""
    return {point.name: outcome_of(sweep.folder(point)) for point in sweep.points}


def train(sweep: Sweep, executor: Executor, say: Callable[[str], None]) -> None:
    """Trains the points of a sweep that have not ended."""
    alive = list(sweep.points)
    for rung in sweep.grid.search.rungs:
        found = outcomes(sweep)
        executor.run([Task(point, rung) for point in alive if not _past(found[point.name], rung)])
        if executor.asked.times:
            return
        found = outcomes(sweep)
        values = {point.name: found[point.name].rungs.get(str(rung)) for point in alive}
        going_on = survivors(alive, values, sweep.grid.search)
        say(f"after step {rung}: {len(going_on)} of {len(alive)} points continue")
        alive = going_on
    found = outcomes(sweep)
    executor.run([Task(point) for point in alive if not found[point.name].ended])


def survivors(points: Sequence[Point], values: Mapping[str, float | None], search: Search) -> list[Point]:
    """Returns the best `search.keep` of the points, in the order of the sweep. Ties rank in that order too. A point without a
    value (failed or diverged) never continues."""
    count = max(1, math.floor(search.keep * len(points) + 0.5))
    sign = 1 if search.mode == "min" else -1
    sound = [(sign * value, index) for index, point in enumerate(points) if (value := values.get(point.name)) is not None]
    return [points[index] for index in sorted(index for _, index in sorted(sound)[:count])]


def _past(outcome: Outcome, rung: int) -> bool:
    """Whether a point has completed a rung; a run that failed at the rung has not."""
    return str(rung) in outcome.rungs and outcome.status != "failed"
