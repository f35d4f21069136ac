"""Detects the cores and memory that a process may use, the processor, and GPUs, without torch.

A process may often use only a part of the machine. A scheduler pins it to some cores (its affinity), and a container or a SLURM
job limits its processor time and memory through control groups. Threads beyond the limit wait for each other: on two cores, two
processes with two threads each can be ten times slower than with one thread each.
"""

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path


def _control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yields the directories of this process's control groups, version 1 or 2, and of their parents; some may not exist."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _upward(root / "sys/fs/cgroup", path)
        elif controller in controllers.split(","):
            for name in (controllers, controller):  # mounted under both names; one is a link
                yield from _upward(root / "sys/fs/cgroup" / name, path)


def _read(path: Path) -> str:
    """Returns the content of a small file; empty if it cannot be read, as on systems other than Linux."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _upward(mount: Path, path: str) -> Iterator[Path]:
    """Yields a group and its parents. In a container, often only the last parts of the path exist."""
    here = Path(path.lstrip("/"))
    for part in (here, *here.parents):
        if ".." not in part.parts:
            yield mount / part


@dataclass(frozen=True)
class Threads:
    """Number of compute threads of a process, and the reason for it."""

    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} thread{'s' if self.count != 1 else ''} per process ({self.reason})"


def threads_per_process(processes: int, chosen: int | None, environment: Mapping[str, str], root: Path = Path("/")) -> Threads:
    """Returns the threads of each of `processes` on this machine: `chosen`, else OMP_NUM_THREADS, else an even share of the
    cores.

    If OMP_NUM_THREADS is unset, `torchrun` sets it to 1 for several processes, which counts as a setting too.
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
    """Returns the cores that this process may use: the minimum of its affinity, its control group's quota, and the machine's
    cores.

    `root` is the root of the file system. Use it to start one process per core; OMP_NUM_THREADS does not count, because it
    sets the threads of each process.
    """
    return _usable(root)[0]


def allowed_cores() -> frozenset[int]:
    """Returns the numbers of the cores on which this process may run; empty if the system does not report them."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _usable(root: Path) -> tuple[int, str]:
    found = [(os.cpu_count() or 1, "processor count")]
    if allowed_cores():
        found.append((len(allowed_cores()), "affinity"))
    if (quota := min(_quotas(root), default=None)) is not None:
        found.append((max(1, ceil(quota)), "control group's quota"))
    return min(found, key=lambda entry: entry[0])


def _quotas(root: Path) -> Iterator[float]:
    """Yields the limits in cores of this process's control groups, version 1 or 2; skips groups without a limit."""
    for group in _control_groups("cpu", root):
        yield from _ratio(*(_read(group / "cpu.max").split() or ("", "")))
        yield from _ratio(_read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip())


def _ratio(quota: str, period: str) -> Iterator[float]:
    """Yields quota / period, both in microseconds; "max" and -1 mean no limit."""
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        yield int(quota) / int(period)


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that can be allocated without swapping, according to the machine and every control group of this
    process; None if the system does not report it. A group's inactive file cache counts as available.
    """
    return min(_limits(root), default=None)


def _limits(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    for group in _control_groups("memory", root):
        for most, held in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = _read(group / most).strip(), _read(group / held).strip()
            if limit.isdecimal() and used.isdecimal():
                yield max(0, int(limit) - int(used) + _cache(group))


def _cache(group: Path) -> int:
    """Returns the bytes of the group's inactive file cache."""
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdecimal():
            return int(value)
    return 0


BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""Flags of processors with bf16 units: of x86 in `flags`, of Arm in `Features`."""
ACCELERATORS = ("dev/nvidiactl", "dev/nvidia0", "dev/kfd", "dev/dxg")
"""Device files of CUDA and ROCm."""


def processor_flags(root: Path = Path("/")) -> frozenset[str]:
    """Returns the flags of the first processor in /proc/cpuinfo; empty if the file does not exist."""
    for line in _lines(root):
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def processor_name(root: Path = Path("/")) -> str:
    """Returns the model name of the processor."""
    models = (line.partition(":")[2].strip() for line in _lines(root) if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def multiplies_bf16(root: Path = Path("/")) -> bool | None:
    """Whether the processor has bf16 units; None if unknown."""
    flags = processor_flags(root)
    return bool(flags & BF16_FLAGS) if flags else None


def has_accelerator(root: Path = Path("/")) -> bool:
    """Whether the system has a GPU device; drivers may still be missing."""
    return any((root / file).exists() for file in ACCELERATORS)


def hides_accelerators(environment: Mapping[str, str]) -> bool:
    """Whether the environment hides all GPUs, so that work runs on the CPU."""
    return any(environment.get(name, "0") in ("", "-1") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))


def idle_accelerator(device: str, environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Returns a warning if the machine has a GPU but `device` is the CPU, unless the environment hides GPUs; else None."""
    if device != "cpu" or hides_accelerators(environment) or not has_accelerator(root):
        return None
    return (
        "this machine shows a GPU, but torch cannot use it, and all work runs on the CPU: `forge-train doctor` says why and what "
        "to install; set CUDA_VISIBLE_DEVICES= to use the CPU on purpose"
    )


def slow_bf16(root: Path = Path("/")) -> str | None:
    """Returns a warning if this machine would compute bf16 without bf16 units, else None."""
    if multiplies_bf16(root) is not False or has_accelerator(root):
        return None
    return (
        f"this machine has no GPU, and its processor ({processor_name(root)}) has no bf16 units: bf16 products can be 400 "
        "times slower than fp32 here"
    )


def _lines(root: Path) -> list[str]:
    try:
        return (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
