"""What a storm does to a run, from outside of it: to its processes, to its checkpoints, and to what it may write.

Each fault is a function of the run that it strikes and of the rank that was drawn for it; it says what it did, or nothing where
there was nothing to strike.
"""

import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from forge_ckpt.format.names import MANIFEST, committed


@dataclass
class Struck:
    """A run as faults see it.

    Attributes:
        launcher: its process, the ranks being its children.
        folder: of the storm.
        checkpoints: directory of the run's checkpoints.
        damaged: checkpoints that a fault has damaged. There is always an older one that it has not: who damages all of them
            leaves nothing to go on from.
        undo: what ends a fault that lasts, with the moment when it does.
    """

    launcher: int
    folder: Path
    checkpoints: Path
    damaged: set[str] = field(default_factory=set)
    undo: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def ranks(self) -> list[int]:
        """Processes of the ranks, in their order."""
        return children(self.launcher)

    def send(self, process: int, number: int) -> None:
        """A signal to a process that may be gone."""
        with suppress(ProcessLookupError):
            os.kill(process, number)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Does something after a while."""
        self.undo.append((time.monotonic() + seconds, what))

    def settle(self, all_of_them: bool = False) -> None:
        """Does what is due."""
        now = time.monotonic()
        due = [each for each in self.undo if all_of_them or each[0] <= now]
        self.undo = [each for each in self.undo if each not in due]
        for _, what in due:
            what()


def children(process: int) -> list[int]:
    """Of a process, the oldest first."""
    try:
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def a_rank_is_killed(run: Struck, rank: int) -> str:
    return _killed(run, rank)


def a_rank_hangs(run: Struck, rank: int) -> str:
    """It is stopped and never continued: the watch of the others has to end the run."""
    if rank >= len(run.ranks()):
        return ""
    run.send(run.ranks()[rank], signal.SIGSTOP)
    return f"rank {rank} is stopped for good"


def a_rank_is_slow(run: Struck, rank: int) -> str:
    """It is stopped for most of three seconds, a little at a time."""
    if rank >= len(run.ranks()):
        return ""
    process = run.ranks()[rank]
    for beat in range(10):
        run.later(0.3 * beat, lambda: run.send(process, signal.SIGSTOP))
        run.later(0.3 * beat + 0.25, lambda: run.send(process, signal.SIGCONT))
    return f"rank {rank} is slow for three seconds"


def the_launcher_is_killed(run: Struck, rank: int) -> str:
    """Its ranks go with it, as with a node."""
    run.send(run.launcher, signal.SIGKILL)
    return "the launcher is killed"


def the_scheduler_warns(run: Struck, rank: int) -> str:
    number = (signal.SIGTERM, signal.SIGUSR1)[rank % 2]
    run.send(run.launcher, number)
    return f"the launcher gets {signal.Signals(number).name}"


def one_rank_is_asked_to_stop(run: Struck, rank: int) -> str:
    if rank >= len(run.ranks()):
        return ""
    run.send(run.ranks()[rank], signal.SIGUSR2)
    return f"rank {rank} alone gets SIGUSR2"


def a_byte_flips(run: Struck, rank: int) -> str:
    """In the newest checkpoint; then a rank is killed, so that it is needed."""
    if (newest := _spared(run)) is None:
        return ""
    files = sorted(newest.glob("*.bin"))
    file = files[rank % len(files)]
    with file.open("r+b") as opened:
        at = file.stat().st_size * 2 // 3
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 16]))
    return f"a bit flips in {newest.name}/{file.name}, and {_killed(run, rank)}"


def a_manifest_is_lost(run: Struck, rank: int) -> str:
    if (newest := _spared(run)) is None:
        return ""
    (newest / MANIFEST).unlink(missing_ok=True)
    return f"{newest.name} loses its manifest, and {_killed(run, rank)}"


def nothing_can_be_written(run: Struck, rank: int) -> str:
    """For four seconds the kernel refuses to let files of one rank, and of what writes for it, grow beyond a few bytes."""
    if rank >= len(run.ranks()):
        return ""
    process = run.ranks()[rank]
    processes = [process, *children(process)]

    def limit(most: int) -> None:
        for each in processes:
            with suppress(ProcessLookupError):
                resource.prlimit(each, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    limit(64)
    run.later(4, lambda: limit(resource.RLIM_INFINITY))
    return f"files of rank {rank} cannot grow for four seconds"


def a_saver_is_killed(run: Struck, rank: int) -> str:
    """What writes checkpoints in the background, where there is one."""
    ranks = run.ranks()
    savers = children(ranks[rank]) if rank < len(ranks) else []
    if not savers:
        return ""
    run.send(savers[-1], signal.SIGKILL)
    return f"the saver of rank {rank} is killed"


def a_gradient_is_not_finite(run: Struck, rank: int) -> str:
    (run.folder / f"wish-{rank}").touch()
    return f"a gradient of rank {rank} will be NaN"


FAULTS: dict[str, Callable[[Struck, int], str]] = {
    function.__name__: function
    for function in (
        a_rank_is_killed,
        a_rank_hangs,
        a_rank_is_slow,
        the_launcher_is_killed,
        the_scheduler_warns,
        one_rank_is_asked_to_stop,
        a_byte_flips,
        a_manifest_is_lost,
        nothing_can_be_written,
        a_saver_is_killed,
        a_gradient_is_not_finite,
    )
}


def _killed(run: Struck, rank: int) -> str:
    ranks = run.ranks()
    if rank >= len(ranks):
        return "no rank is running"
    run.send(ranks[rank], signal.SIGKILL)
    return f"rank {rank} is killed"


def _spared(run: Struck) -> Path | None:
    """The newest checkpoint, where the one before it is as it was written."""
    try:
        found = committed(path.name for path in run.checkpoints.iterdir())
    except OSError:
        return None
    if len(found) < 2 or {found[0].name, found[1].name} & run.damaged:
        return None
    run.damaged.add(found[0].name)
    return run.checkpoints / found[0].name
