"""How many processor cores a process may use, which is often fewer than the machine has.

A scheduler pins a process to some cores (its affinity), and a container or a SLURM job is given a share of processor time (a
quota of its control group). Threads beyond that wait for each other: two processes with two threads each on two cores can
be ten times slower than with one.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from forge_core.machine.control_groups import groups, read


@dataclass(frozen=True)
class Threads:
    """Threads that one process computes with, and what decided it."""

    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} thread{'s' if self.count != 1 else ''} per process ({self.reason})"


def threads_per_process(processes: int, chosen: int | None, environment: Mapping[str, str], root: Path = Path("/")) -> Threads:
    """Threads of each of `processes` on this machine: `chosen`, else OMP_NUM_THREADS, else an even share of the cores.

    `torchrun` sets OMP_NUM_THREADS to 1 for several processes where it is unset, which counts as a choice too.
    """
    if chosen is not None:
        return Threads(chosen, "train.threads")
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list is for nested regions
    if first.isdecimal() and int(first) > 0:
        return Threads(int(first), "OMP_NUM_THREADS")
    cores, reason = _usable(root)
    shared = f", shared by {processes} processes" if processes > 1 else ""
    return Threads(max(1, cores // max(processes, 1)), f"{cores} by {reason}{shared}")


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: the least of its affinity, its control group's quota, and the machine's cores.

    `root` is where the file system begins. Programs that start one process per core use it; OMP_NUM_THREADS does not count,
    since it is about the threads of each process.
    """
    return _usable(root)[0]


def allowed_cores() -> frozenset[int]:
    """Numbers of the cores on which this process may run; empty where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _usable(root: Path) -> tuple[int, str]:
    found = [(os.cpu_count() or 1, "processor count")]
    if allowed_cores():
        found.append((len(allowed_cores()), "affinity"))
    if (quota := min(_quotas(root), default=None)) is not None:
        found.append((max(1, ceil(quota)), "control group's quota"))
    return min(found, key=lambda entry: entry[0])


def _quotas(root: Path) -> Iterator[float]:
    """Cores that the control groups of this process grant, version 1 or 2; groups without a limit are left out."""
    for group in groups("cpu", root):
        yield from _ratio(*(read(group / "cpu.max").split() or ("", "")))
        yield from _ratio(read(group / "cpu.cfs_quota_us").strip(), read(group / "cpu.cfs_period_us").strip())


def _ratio(quota: str, period: str) -> Iterator[float]:
    """Microseconds of processor time per microseconds; "max" and -1 mean no limit."""
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        yield int(quota) / int(period)
