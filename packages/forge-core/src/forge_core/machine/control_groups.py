"""The control groups that this process is in: where a container or a scheduler limits its processor time and memory."""

from collections.abc import Iterator
from pathlib import Path


def groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Directories of this process's groups, version 1 or 2, and of the groups that they are in; some may not exist."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _upward(root / "sys/fs/cgroup", path)
        elif controller in controllers.split(","):
            for name in (controllers, controller):  # mounted under both names, of which one is a link
                yield from _upward(root / "sys/fs/cgroup" / name, path)


def read(path: Path) -> str:
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
