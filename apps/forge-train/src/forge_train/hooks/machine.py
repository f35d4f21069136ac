"""Hook `machine`: probes device, network, disk and memory of every rank with small tasks whose results are known.

Functions import torch, so that importing this module does not.
"""

import errno
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.component import FREE
from forge_core.errors import ForgeError
from forge_core.files import write_file
from forge_core.machine import available_memory
from forge_core.protocols.run import Run
from forge_core.terminal import size as told
from forge_train.hooks.periodic import Periodic
from forge_train.process.stop import FAULTY

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

PROBE_FILE = ".probe"
"""Prefix of the name of temporary files of the disk probe in the run's directory."""

TIMED: tuple[str, ...] = ("device", "disk", "collective")


@dataclass(kw_only=True)
class Machine(Periodic):
    """Probes device, communication, disk and memory of every machine. A fault ends the run and names the rank and its host; slow
    probes and low memory are warnings.

    Each rank computes a known product, the first rank of each host writes and reads a file in the run's directory, and all ranks
    compute a known sum together.

    All ranks receive the results. A fault ends the run after the same step on all ranks: the rank on the faulty machine with exit
    code 6, the others with 5. Slow probes, a full disk and low memory are reported once, and again when they are over.
    """

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 200
    """Optimizer steps between probes."""
    minutes: Annotated[float, Ge(0)] = 0.0
    """Minimum minutes between probes, by the clock of rank 0, which is read every `every` steps."""
    slow: Annotated[float, Gt(0)] = 10.0
    """Seconds above which a probe is reported as slow. A probe takes milliseconds on a healthy machine."""
    least_memory: Annotated[float, Ge(0)] = 0.5
    """GiB of free host memory below which there is a warning."""

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[Machine]":
        return (cls(every=2),)

    def __post_init__(self) -> None:
        self.since = 0.0
        self.wrong: set[tuple[int, str]] = set()

    def start(self, run: Run) -> None:
        """Collective: gathers the hosts, and prepares the probes."""
        topology = run.topology
        self.world = ProcessGroupWorld() if topology.size > 1 else SingleProcessWorld()
        self.hosts = [name.decode() for name in self.world.all_gather(socket.gethostname().encode())]
        self.writes = self.hosts.index(self.hosts[topology.rank]) == topology.rank and run.directory.is_dir()
        self.compute = device_probe(topology.device)
        self.exchange = collective_probe(topology.rank, topology.size, topology.device, topology.all_reduce)
        self.since = time.monotonic()

    def finish(self, run: Run) -> None:
        """Does nothing: a probe would only delay the final save."""

    def once(self, run: Run) -> None:
        """Probes, unless fewer than `minutes` have passed since the last probe, by the clock of rank 0."""
        due = time.monotonic() - self.since >= 60 * self.minutes
        if self.minutes and not json.loads(self.world.broadcast(json.dumps(due).encode())):
            return
        self.since = time.monotonic()
        super().once(run)

    def act(self, run: Run) -> None:
        """Collective: runs all probes.

        Raises:
            MachineFault: on the rank whose machine is faulty.
            PeerFailure: on the other ranks.
        """
        seconds, full = dict.fromkeys(TIMED, 0.0), ""
        with _timed(seconds, "device"):
            fault = self.compute()
        if self.writes:
            with _timed(seconds, "disk"):
                said, is_full = disk_probe(run.directory / f"{PROBE_FILE}-{run.topology.rank}", run.state.step)
            full, fault = (said, fault) if is_full else ("", fault or said)
        memory = available_memory()
        self._end_where(run, [reply["fault"] for reply in self._told({"fault": fault})])
        if run.topology.size > 1:
            with _timed(seconds, "collective"):
                fault = self.exchange()
        replies = self._told({"fault": fault, "full": full, "memory": memory, **seconds})
        self._end_where(run, [reply["fault"] for reply in replies])
        for rank, reply in enumerate(replies):
            self._warn(run, rank, reply)
        if run.topology.rank == 0:
            free = [reply["memory"] for reply in replies if reply["memory"] is not None]
            numbers = {f"machine/{name}_seconds": max(reply[name] for reply in replies) for name in TIMED}
            run.log(numbers | ({"machine/free_memory": min(free)} if free else {}))

    def _told(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(reply) for reply in self.world.all_gather(json.dumps(mine).encode())]

    def _end_where(self, run: Run, faults: list[str]) -> None:
        from forge_parallel.launch.watch import PeerFailure

        bad = [rank for rank, fault in enumerate(faults) if fault]
        if not bad:
            return
        mine = run.topology.rank if run.topology.rank in bad else bad[0]
        more = f"; so do {len(bad) - 1} more ranks" if len(bad) > 1 else ""
        text = (
            f"after step {run.state.step}, the machine of rank {mine} on {self.hosts[mine]} fails a probe: {faults[mine]}{more}. "
            "Start the run again without this machine or device: it resumes from its newest checkpoint"
        )
        raise MachineFault(text) if run.topology.rank in bad else PeerFailure(text)

    def _warn(self, run: Run, rank: int, reply: dict[str, Any]) -> None:
        for name in TIMED:
            took = f"{reply[name]:.3g} s, more than hook 'machine' allows (slow = {self.slow:.3g})"
            self._say(run, rank, name, reply[name] > self.slow, f"the probe of '{name}' takes {took}")
        self._say(run, rank, "full", bool(reply["full"]), reply["full"])
        free = reply["memory"]
        short = free is not None and free < int(self.least_memory * 2**30)
        self._say(run, rank, "memory", short, f"only {told(free or 0)} of memory are left")

    def _say(self, run: Run, rank: int, what: str, is_wrong: bool, text: str) -> None:
        """Warns once when a problem begins and once when it is over; all ranks warn alike."""
        key, who = (rank, what), f"rank {rank} on {self.hosts[rank]}"
        if is_wrong and key not in self.wrong:
            self.wrong.add(key)
            run.health.warn(f"after step {run.state.step}, {who}: {text}")
        elif not is_wrong and key in self.wrong:
            self.wrong.discard(key)
            run.health.warn(f"after step {run.state.step}, {who}: the probe of '{what}' is well again")


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began


_ROWS = 256
_COPIED = 1 << 20
_WRITTEN = 1 << 18
_ATTEMPTS, _PAUSE = 3, 0.5
"""Network file systems may fail temporarily: the write is retried after increasing pauses."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class MachineFault(ForgeError):
    """The machine of this rank failed a probe."""

    exit_code = FAULTY


def device_probe(device: "torch.device") -> Callable[[], str]:
    """Returns a function that probes the device and returns its fault, or an empty text.

    The probe multiplies matrices of small integers, whose product is exact in every format, and copies a mebibyte to the device
    and back. The host waits for it.
    """
    import torch

    row = torch.arange(_ROWS * _ROWS).reshape(_ROWS, _ROWS)
    left, right = row % 7 - 3, row % 5 - 2
    expected, pattern = (left @ right).float(), torch.arange(_COPIED // 4, dtype=torch.int32)
    there = left.float().to(device), right.float().to(device)

    def probe() -> str:
        try:
            product, copied = (there[0] @ there[1]).cpu(), pattern.to(device).cpu()
        except Exception as cause:  # noqa: BLE001 (a broken device may raise anything)
            return f"the device fails: {_first(cause)}"
        if not torch.equal(product, expected):
            return f"the device multiplies wrong: {int((product != expected).sum())} of {expected.numel()} numbers differ"
        return "" if torch.equal(copied, pattern) else "the device returns other bytes than were copied to it"

    return probe


def disk_probe(path: Path, number: int) -> tuple[str, bool]:
    """Writes a file of a quarter of a mebibyte, flushes it, reads it back and removes it.

    Returns the fault, or an empty text, and True if the only fault is a full disk.

    Args:
        path: the file.
        number: varies the content of the file.
    """
    content = (number % 2**32).to_bytes(4, "little") * (_WRITTEN // 4)
    cause = None
    try:
        for attempt in range(_ATTEMPTS):
            time.sleep(attempt * _PAUSE)
            try:
                write_file(path, content)
                return ("" if path.read_bytes() == content else f"{path} has other bytes than were written"), False
            except OSError as failure:
                cause = failure
                if failure.errno in _FULL:
                    break
    finally:
        with suppress(OSError):
            path.unlink()
    assert cause is not None, "every attempt failed"
    return f"{path} cannot be written: {cause.strerror or cause}", cause.errno in _FULL


def collective_probe(rank: int, size: int, device: "torch.device", all_reduce: Callable[[Any], Any]) -> Callable[[], str]:
    """Returns a collective function that checks a sum of integers over all ranks, which is exact, and returns its fault."""
    import torch

    pattern = torch.arange(_COPIED // 8, dtype=torch.float64, device=device) % 1000
    expected = (pattern * (size * (size + 1) // 2)).cpu()

    def probe() -> str:
        found = all_reduce(pattern * (rank + 1)).cpu()
        wrong = int((found != expected).sum())
        return f"a sum over all ranks is wrong in {wrong} of {expected.numel()} numbers" if wrong else ""

    return probe


def _first(cause: Exception) -> str:
    return (str(cause).splitlines() or [type(cause).__name__])[0]
