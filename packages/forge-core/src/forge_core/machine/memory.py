"""How much memory this process may still use, which is often less than the machine has free."""

from collections.abc import Iterator
from pathlib import Path

from forge_core.machine.control_groups import groups, read


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping, by the machine and by every control group of this process; None where the system
    does not tell. What a group holds only as a cache of files counts as available.
    """
    return min(_limits(root), default=None)


def _limits(root: Path) -> Iterator[int]:
    for line in read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    for group in groups("memory", root):
        for most, held in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = read(group / most).strip(), read(group / held).strip()
            if limit.isdecimal() and used.isdecimal():
                yield max(0, int(limit) - int(used) + _cache(group))


def _cache(group: Path) -> int:
    """Bytes of files that the group holds and that were not used lately."""
    for line in read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdecimal():
            return int(value)
    return 0
