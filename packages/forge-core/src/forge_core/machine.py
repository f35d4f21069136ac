"""What this machine has: the cores and the memory that a process may use, its processor, and whether it has a GPU. No torch.

A process may often use less than the machine has. A scheduler pins it to some cores (its affinity), and a container or a SLURM
job limits its processor time and memory through control groups. Threads beyond the limit wait for each other: two processes with
two threads each on two cores can be ten times slower than with one.
"""

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path


def _control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Directories of this process's groups, version 1 or 2, and of the groups that they are in; some may not exist."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _upward(root / "sys/fs/cgroup", path)
        elif controller in controllers.split(","):
            for name in (controllers, controller):  # mounted under both names, of which one is a link
                yield from _upward(root / "sys/fs/cgroup" / name, path)


def _read(path: Path) -> str:
    """A small file; empty where it cannot be read, as on a system that is not Linux."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _upward(mount: Path, path: str) -> Iterator[Path]:
    """A group and those that it is in. A container often sees only the last ones of the path that it is told."""
    here = Path(path.lstrip("/"))
    for part in (here, *here.parents):
        if ".." not in part.parts:
            yield mount / part


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
    for group in _control_groups("cpu", root):
        yield from _ratio(*(_read(group / "cpu.max").split() or ("", "")))
        yield from _ratio(_read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip())


def _ratio(quota: str, period: str) -> Iterator[float]:
    """Microseconds of processor time per microseconds; "max" and -1 mean no limit."""
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        yield int(quota) / int(period)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping, by the machine and by every control group of this process; None where the system
    does not tell. What a group holds only as a cache of files counts as available.
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
    """Bytes of files that the group holds and that were not used lately."""
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdecimal():
            return int(value)
    return 0


BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""Flags of processors that multiply bf16 numbers themselves: x86's in `flags`, Arm's in `Features`."""
ACCELERATORS = ("dev/nvidiactl", "dev/nvidia0", "dev/kfd", "dev/dxg")
"""Device files of CUDA and ROCm."""


def processor_flags(root: Path = Path("/")) -> frozenset[str]:
    """Flags of the first processor in /proc/cpuinfo; empty where the file does not exist."""
    for line in _lines(root):
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def processor_name(root: Path = Path("/")) -> str:
    """What the processor calls itself."""
    models = (line.partition(":")[2].strip() for line in _lines(root) if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def multiplies_bf16(root: Path = Path("/")) -> bool | None:
    """Whether the processor has units for bf16; None where it does not tell."""
    found = processor_flags(root)
    return bool(found & BF16_FLAGS) if found else None


def has_accelerator(root: Path = Path("/")) -> bool:
    """Whether the system shows a GPU; drivers may still be missing."""
    return any((root / file).exists() for file in ACCELERATORS)


def hides_accelerators(environment: Mapping[str, str]) -> bool:
    """Whether the environment says that no GPU is to be used, so that work runs on the CPU."""
    return any(environment.get(name, "0") in ("", "-1") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))


def idle_accelerator(device: str, environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """A sentence where a GPU is shown and work runs on another `device` type, unless the environment hides GPUs; else None."""
    if device != "cpu" or hides_accelerators(environment) or not has_accelerator(root):
        return None
    return (
        "this machine shows a GPU, but torch cannot use it, and all work runs on the CPU: `forge-train doctor` says why and what "
        "to install; CUDA_VISIBLE_DEVICES= says that it is meant"
    )


def slow_bf16(root: Path = Path("/")) -> str | None:
    """A sentence about bf16 on this machine where it would be computed without units for it, else None."""
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
