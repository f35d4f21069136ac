"""Classifies each instant of a window, divides the window by the parts of a step, and finds waits of the host.

The kind of an event follows from its category and from the beginning of its name. Parts of names elsewhere would mislead:
`record_param_comms` contains "mm" but multiplies no matrices, and kernels that a compiler fused around a collective contain the
collective's name but compute.

One pass over all intervals, on any number of streams, assigns each instant to a class. The classes sum to the window exactly:

    compute      computation without communication
    overlapped   computation during communication
    exposed      communication without computation: the device waits for it
    memory       only copies and fills
    idle         nothing

A second division, by the parts of a step, also sums to the window. On a device, work belongs to the part in which the host
launched it, even if it runs later:

    data, forward, backward, reduce, optimizer, ...   computation and copies of that part
    other                                             computation and copies outside of all parts
    exposed                                           a collective runs and nothing is computed
    host                                              nothing runs
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from itertools import pairwise

from forge_parallel.step.step import PREFIX
from forge_train.profiling.trace import WINDOW, Enclosing, Event, Trace, innermost


class WorkKind(StrEnum):
    """Kind of work on a device, or on the threads of a CPU."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    MEMORY = "memory"


_KERNELS = re.compile(
    r"(void )?(\w+::)*(nccl|rccl|oneccl|nvshmem|multimem_|one_shot_all_reduce|two_shot_all_reduce)", re.IGNORECASE
)
"""Kernels of libraries for collectives, and of torch's symmetric memory."""

_BETWEEN_DEVICES = ("Memcpy PtoP", "CopyPeerToPeer")

_HOST_COLLECTIVES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "record_param_comms", "_dtensor::")
"""Prefixes of operators that start a collective."""

_WORK = re.compile(r"(gloo|mpi|ucc):")
"""Collectives of a CPU: annotations on the threads that run them, for as long as they run."""

_ENGINES = ("autograd::", "profiler::")

_MOVES = frozenset(f"aten::{name}" for name in ("copy_", "fill_", "zero_", "empty", "empty_strided", "resize_", "_pin_memory"))
"""Operators that by themselves only move, fill or allocate memory."""


def class_of_kernel(event: Event) -> WorkKind:
    """Returns the kind of a kernel, copy or fill of a device. A copy between devices is communication."""
    if event.category == "kernel":
        return WorkKind.COMMUNICATION if _KERNELS.match(event.name) else WorkKind.COMPUTE
    return WorkKind.COMMUNICATION if event.name.startswith(_BETWEEN_DEVICES) else WorkKind.MEMORY


def is_collective(name: str) -> bool:
    """Returns True if an annotation has the duration of a collective of a CPU."""
    return _WORK.match(name) is not None


def class_of_operator(name: str) -> WorkKind | None:
    """Returns the kind of an operator's own time, without the operators that it calls.

    None for operators that only call others: autograd's engine, and functions in Python, which may wait for a collective. Of
    names without a namespace, only compiled code computes by itself.
    """
    if name.startswith(_HOST_COLLECTIVES):
        return WorkKind.COMMUNICATION
    if name.startswith(_ENGINES) or ("::" not in name and "Compiled" not in name):
        return None
    return WorkKind.MEMORY if name in _MOVES else WorkKind.COMPUTE


CLASSES = ("compute", "overlapped", "exposed", "memory", "idle")


@dataclass(frozen=True, slots=True)
class WorkSpan:
    """Work in a part of the step, from `start` to `end` in nanoseconds; `first` is True for the first piece of an event."""

    kind: WorkKind
    name: str
    start: int
    end: int
    first: bool = True
    part: str = ""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time interval in one class.

    Attributes:
        waited: the exposed collective, or the one that ends last of several; empty in other classes.
        part: the part of the step of the computation, or of the copy if nothing is computed; of several, the one that ends last.
    """

    start: int
    end: int
    label: str
    waited: str = ""
    part: str = ""


def classify(spans: Iterable[WorkSpan], window: tuple[int, int]) -> list[Stretch]:
    """Divides the window where its class changes; ignores work outside of it. The order of spans does not matter."""
    begin, stop = window
    found = sorted(
        ((max(span.start, begin), min(span.end, stop), span) for span in spans if span.start < stop and span.end > begin),
        key=lambda item: (item[0], item[1], item[2].name),
    )
    found = [item for item in found if item[0] < item[1]]
    points = sorted({begin, stop, *(point for start, end, _ in found for point in (start, end))})
    ends: dict[WorkKind, list[tuple[int, str, str]]] = {kind: [] for kind in WorkKind}  # the latest end on top
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
        label = _label(bool(ends[WorkKind.COMPUTE]), bool(ends[WorkKind.COMMUNICATION]), bool(ends[WorkKind.MEMORY]))
        waited = ends[WorkKind.COMMUNICATION][0][1] if label == "exposed" else ""
        working = ends[WorkKind.COMPUTE] or ends[WorkKind.MEMORY]
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
    """Returns the nanoseconds of every class."""
    found = Counter[str]()
    for stretch in stretches:
        found[stretch.label] += stretch.end - stretch.start
    return {label: found[label] for label in CLASSES}


OTHER, EXPOSED, HOST = "other", "exposed", "host"
_LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime")


class StepParts:
    """Finds the part of a step to which work belongs."""

    def __init__(self, trace: Trace) -> None:
        named = (event for event in trace.of("user_annotation") if event.name.startswith(PREFIX))
        self._pieces = innermost(event for event in named if event.name not in (WINDOW, CLOSING))
        self._starts = [start for start, _, _ in self._pieces]
        self._launched = {event.args["correlation"]: event.start for event in trace.of(*_LAUNCHES) if "correlation" in event.args}
        self._called = {event.args["External id"]: event.start for event in trace.of("cpu_op") if "External id" in event.args}

    def of_launch(self, work: Event) -> str:
        """Returns the part in which the host launched work of a device; `OTHER` if the trace does not record it."""
        launched = self._launched.get(work.args.get("correlation"), self._called.get(work.args.get("External id")))
        return OTHER if launched is None else self.at(launched)

    def at(self, instant: int) -> str:
        """Returns the innermost part that runs on the host at an instant."""
        place = bisect_right(self._starts, instant) - 1
        if place < 0 or self._pieces[place][1] <= instant:
            return OTHER
        return self._pieces[place][2].name.removeprefix(PREFIX)


def split(stretches: Sequence[Stretch]) -> dict[str, int]:
    """Returns the nanoseconds of each part, in order of first appearance, of exposed communication and of the host."""
    waits = {"exposed": EXPOSED, "idle": HOST}
    found = Counter[str](dict.fromkeys(_order(stretches), 0))
    for stretch in stretches:
        found[waits.get(stretch.label, stretch.part)] += stretch.end - stretch.start
    return dict(found)


def has_parts(found: Mapping[str, int]) -> bool:
    """Returns True if the trace names parts of a step, as Forge's traces do."""
    return bool(found.keys() - {OTHER, EXPOSED, HOST})


def _order(stretches: Iterable[Stretch]) -> list[str]:
    parts = dict.fromkeys(stretch.part for stretch in stretches if stretch.part)
    return [*(part for part in parts if part != OTHER), OTHER, EXPOSED, HOST]


CLOSING = "forge/closing"
"""Annotation around the wait of the profiler itself, which is not counted."""

_READS = "aten::_local_scalar_dense"
"""Operator that `.item()`, `bool()` and `float()` of a tensor call."""


@dataclass(frozen=True)
class HostWait:
    """Waits of the host by one kind of call from one place; `time` in nanoseconds.

    Attributes:
        call: such as `cudaStreamSynchronize`; `.item()` if a tensor was read without such a call, as on a CPU.
        operator: the innermost operator that made the call; "" for Python.
        inside: the innermost named range.
    """

    call: str
    operator: str
    inside: str
    count: int
    time: int


def host_waits(trace: Trace, window: tuple[int, int]) -> list[HostWait]:
    """Returns all waits that begin in the window, the longest first."""
    named = Enclosing(
        event
        for event in trace.of("user_annotation")
        if event.name not in (WINDOW, CLOSING) and not event.name.startswith("ProfilerStep#")
    )
    closing = Enclosing(event for event in trace.of("user_annotation") if event.name == CLOSING)
    operators = Enclosing(trace.of("cpu_op"))
    calls = [event for event in trace.of("cuda_runtime", "cuda_driver", "xpu_runtime") if event.name.endswith("Synchronize")]
    reads = [event for event in trace.of("cpu_op") if event.name == _READS]
    begun: dict[tuple[str, str], list[int]] = defaultdict(list)
    for event in sorted(calls, key=lambda event: event.start):
        begun[event.lane].append(event.start)
    callers = Enclosing(event for event in trace.of("cpu_op") if event.name not in (_READS, "aten::item"))
    counts, times = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for event in (*calls, *reads):
        if not window[0] <= event.start < window[1] or closing.at(event.lane, event.start):
            continue
        read, starts = event.name == _READS, begun[event.lane]
        if read and bisect_left(starts, event.start) < bisect_right(starts, event.end):
            continue  # the synchronizing call inside it is counted instead
        operator = (callers if read else operators).at(event.lane, event.start)
        key = (".item()" if read else event.name, operator, named.at(event.lane, event.start))
        counts[key] += 1
        times[key] += event.end - event.start
    return [HostWait(*key, counts[key], time) for key, time in sorted(times.items(), key=lambda item: (-item[1], item[0]))]
