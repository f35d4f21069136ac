"""Where the host waited for the device: which call, from which operator, inside which range."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass

from forge_train.profiling.lanes import Enclosing
from forge_train.profiling.trace import WINDOW, Trace

CLOSING = "forge/closing"
"""Annotation around the one wait that the profile itself makes: it is not counted."""

_READS = "aten::_local_scalar_dense"
"""What `.item()`, `bool()` and `float()` of a tensor call."""


@dataclass(frozen=True)
class HostWait:
    """Calls of one kind from one place; nanoseconds.

    Attributes:
        call: such as `cudaStreamSynchronize`; `.item()` where a tensor was read and no such call was recorded, as of a CPU's.
        operator: the innermost one that made it; "" for Python.
        inside: the innermost range that a program named.
    """

    call: str
    operator: str
    inside: str
    count: int
    time: int


def host_waits(trace: Trace, window: tuple[int, int]) -> list[HostWait]:
    """All of them that begin in the window, the longest first."""
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
            continue  # the call inside of it is what waits
        operator = (callers if read else operators).at(event.lane, event.start)
        key = (".item()" if read else event.name, operator, named.at(event.lane, event.start))
        counts[key] += 1
        times[key] += event.end - event.start
    return [HostWait(*key, counts[key], time) for key, time in sorted(times.items(), key=lambda item: (-item[1], item[0]))]
