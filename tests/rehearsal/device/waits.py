"""Counts where the host waits for the device."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True, order=True)
class Site:
    """A line that waits, the innermost one of Forge's packages; of torch where none of them is on the stack.

    Attributes:
        file: below the folder of sources, such as `forge_models/blocks/moe/layer.py`.
        function: qualified name.
        line: number, counted from 1.
        kind: what it does, such as `item` or `host to device`.
    """

    file: str
    function: str
    line: int
    kind: str

    @property
    def place(self) -> str:
        """What stays the same when lines above it come and go."""
        return f"{self.file} {self.function}: {self.kind}"


@contextmanager
def counted() -> Iterator[Counter[Site]]:
    """Counts the waits of all threads until its end. One at a time."""
    from forge_rehearsal_device import listen  # type: ignore[import-not-found]

    found: Counter[Site] = Counter()

    def waits(kind: str) -> None:
        found[_site(sys._getframe().f_back, kind)] += 1

    listen(waits)
    try:
        yield found
    finally:
        listen(None)


def _site(frame: FrameType | None, kind: str) -> Site:
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package.startswith("forge_"):
            code = frame.f_code
            file = package + code.co_filename.rpartition(f"/{package}")[2]
            return Site(file, code.co_qualname, frame.f_lineno, kind)
        frame = frame.f_back
    return Site("torch", "", 0, kind)
