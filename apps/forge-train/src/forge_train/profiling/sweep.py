"""Each instant of a window in exactly one class: one pass over the ends of all intervals, on however many streams.

    compute      something is computed, and nothing is communicated
    overlapped   something is computed while something is communicated
    exposed      something is communicated, and nothing is computed: the device waits for it
    memory       only copies and fills
    idle         nothing

So the classes sum to the window, exactly.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from forge_train.profiling.kinds import Kind

CLASSES = ("compute", "overlapped", "exposed", "memory", "idle")


@dataclass(frozen=True, slots=True)
class Span:
    """Work of a part of the step, from `start` to `end` in nanoseconds; `first` of the pieces of an event, which counts once."""

    kind: Kind
    name: str
    start: int
    end: int
    first: bool = True
    part: str = ""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Time in one class.

    Attributes:
        waited: where communication is exposed, its name: of several at once the one that ends last.
        part: of the step that what is computed belongs to, or what is copied where nothing is computed: likewise.
    """

    start: int
    end: int
    label: str
    waited: str = ""
    part: str = ""


def sweep(spans: Iterable[Span], window: tuple[int, int]) -> list[Stretch]:
    """The window, cut where its class changes; what lies outside is cut off. The order of spans does not matter."""
    begin, stop = window
    found = sorted(
        ((max(span.start, begin), min(span.end, stop), span) for span in spans if span.start < stop and span.end > begin),
        key=lambda item: (item[0], item[1], item[2].name),
    )
    found = [item for item in found if item[0] < item[1]]
    points = sorted({begin, stop, *(point for start, end, _ in found for point in (start, end))})
    ends: dict[Kind, list[tuple[int, str, str]]] = {kind: [] for kind in Kind}  # the latest end on top
    stretches: list[Stretch] = []
    place = 0
    for start, end in pairwise(points):
        while place < len(found) and found[place][0] <= start:
            _, last, span = found[place]
            heappush(ends[span.kind], (-last, span.name, span.part))
            place += 1
        for running in ends.values():
            while running and -running[0][0] <= start:
                heappop(running)
        label = _label(bool(ends[Kind.COMPUTE]), bool(ends[Kind.COMMUNICATION]), bool(ends[Kind.MEMORY]))
        waited = ends[Kind.COMMUNICATION][0][1] if label == "exposed" else ""
        working = ends[Kind.COMPUTE] or ends[Kind.MEMORY]
        part = working[0][2] if working and label != "exposed" else ""
        before = stretches[-1] if stretches else None
        if before and (before.label, before.waited, before.part) == (label, waited, part):
            stretches[-1] = Stretch(before.start, end, label, waited, part)
        else:
            stretches.append(Stretch(start, end, label, waited, part))
    return stretches


def _label(compute: bool, communication: bool, memory: bool) -> str:
    if compute:
        return "overlapped" if communication else "compute"
    if communication:
        return "exposed"
    return "memory" if memory else "idle"


def totals(stretches: Sequence[Stretch]) -> dict[str, int]:
    """Nanoseconds of every class."""
    found = Counter[str]()
    for stretch in stretches:
        found[stretch.label] += stretch.end - stretch.start
    return {label: found[label] for label in CLASSES}
