"""Identifies a process, so that another command can find out later whether it still runs.

A process number alone does not identify a process: numbers are used again, also after a reboot, and each container has its own.
"""

import os
import socket
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_SECONDS = 10.0


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of some host.

    Attributes:
        host: name of the host.
        boot: the boot of the host, and the namespace in which the process number is valid; empty if the system has none.
        pid: process number.
        began: time at which the process began, in the words of its system.
    """

    host: str
    boot: str
    pid: int
    began: str

    @classmethod
    def of_this(cls) -> "ProcessIdentity":
        """Returns the identity of this process."""
        return cls(socket.gethostname(), _boot(), os.getpid(), _seen(os.getpid()))

    def is_alive(self) -> bool | None:
        """Returns whether the process still runs; None if it belongs to another host, boot or container."""
        if (self.host, self.boot) != (socket.gethostname(), _boot()):
            return None
        return bool(self.began) and _seen(self.pid) == self.began

    def began_at(self) -> float | None:
        """Returns when the process began, in seconds since 1970; None if unknown. Only on the host of the process."""
        if self.began.isdigit():  # clock ticks since the boot
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(self.began) / os.sysconf("SC_CLK_TCK")
            return time.time() - age
        try:
            return datetime.strptime(self.began, "%a %b %d %H:%M:%S %Y").timestamp()  # ps prints local time
        except ValueError:
            return None


@cache
def _boot() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _seen(pid: int) -> str:
    """Returns when a process of this host began; empty if it has ended, also if its parent has not yet noticed."""
    if not (_PROC / "self/stat").exists():
        return _listed(pid)
    try:
        facts = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    state, began = facts[0], facts[19]
    return "" if state in "ZX" else began


def _listed(pid: int) -> str:
    """Does the same with `ps`, for systems without /proc."""
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environment).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    state, _, began = " ".join(told.split()).partition(" ")
    return "" if state.startswith("Z") else began
