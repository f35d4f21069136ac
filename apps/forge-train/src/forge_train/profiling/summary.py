"""Summaries of a profiled window: of one rank, and of the differences between ranks."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forge_train.profiling.classes import (
    CLASSES,
    CLOSING,
    HostWait,
    StepParts,
    Stretch,
    WorkKind,
    WorkSpan,
    class_of_kernel,
    class_of_operator,
    classify,
    host_waits,
    is_collective,
    split,
    totals,
)
from forge_train.profiling.trace import DEVICE, WINDOW, Enclosing, Event, Trace

UNTIL_THE_END = "the end of the window"


@dataclass(frozen=True)
class Kernel:
    """All events of one name: kernels, copies and fills of a device, or operators of a CPU without those that they call.

    Attributes:
        busy: sum of the events' durations in nanoseconds; concurrent events count twice.
        exposed: nanoseconds of exposed communication of these events.
    """

    name: str
    kind: WorkKind
    count: int
    busy: int
    exposed: int


@dataclass(frozen=True)
class Exposed:
    """Communication without concurrent computation: the collective, and the work that ran next."""

    collective: str
    waits: str
    count: int
    time: int


@dataclass(frozen=True)
class Annotation:
    """A named range: nanoseconds on the host, and on the device from its first to its last kernel."""

    name: str
    count: int
    host: int
    device: int


@dataclass(frozen=True)
class Summary:
    """The summary of one rank; times in nanoseconds.

    Attributes:
        about: origin of the trace; see `Trace`.
        device: True if the trace has work of a device; otherwise the operators of CPU threads are analyzed.
        classes: time of each class; they sum to the window exactly.
        split: time by parts of the step, see `forge_train.profiling.classes`; sums to the window, too.
        groups: durations of the collectives of each group of ranks, in order, if the trace names the ranks.
    """

    about: Mapping[str, Any]
    device: bool
    window: int
    classes: Mapping[str, int]
    split: Mapping[str, int]
    kernels: Sequence[Kernel]
    exposed: Sequence[Exposed]
    annotations: Sequence[Annotation]
    waits: Sequence[HostWait]
    groups: Mapping[str, Sequence[int]]

    def as_json(self) -> dict[str, Any]:
        """Returns the summary as plain values."""
        return asdict(self)


def summarize(trace: Trace) -> Summary:
    """Returns the summary of one trace; the order of its events does not matter.

    Raises:
        ForgeError: the trace has no event with a duration.
    """
    window = trace.window
    work = _distinct(trace.of(*DEVICE))
    device, parts = bool(work), StepParts(trace)
    spans = list(_on_device(work, parts) if device else _on_threads(trace, parts))
    stretches = classify(spans, window)
    return Summary(
        about=trace.about,
        device=device,
        window=window[1] - window[0],
        classes=totals(stretches),
        split=split(stretches),
        kernels=_kernels(spans, stretches, window),
        exposed=_exposed(spans, stretches, _operators(trace, work)),
        annotations=_annotations(trace, window),
        waits=host_waits(trace, window),
        groups=_groups(work or trace.of("cpu_op"), window),
    )


def _distinct(events: Iterable[Event]) -> list[Event]:
    """Removes duplicates, which tools that merge traces may leave."""
    return list({(event.name, event.lane, event.start, event.end): event for event in events}.values())


def _on_device(work: Iterable[Event], parts: StepParts) -> Iterator[WorkSpan]:
    for event in work:
        yield WorkSpan(class_of_kernel(event), event.name, event.start, event.end, part=parts.of_launch(event))


def _on_threads(trace: Trace, parts: StepParts) -> Iterator[WorkSpan]:
    """Yields the work of CPU threads: self times of operators, and collectives for as long as they run."""
    for event in _distinct(trace.of("user_annotation")):
        if is_collective(event.name):
            yield WorkSpan(WorkKind.COMMUNICATION, event.name, event.start, event.end)
    for pieces in Enclosing(trace.of("cpu_op")).lanes():
        seen: set[int] = set()
        for start, end, event in pieces:
            if (kind := class_of_operator(event.name)) is not None:
                yield WorkSpan(kind, event.name, start, end, first=id(event) not in seen, part=parts.at(event.start))
                seen.add(id(event))


def _kernels(spans: Sequence[WorkSpan], stretches: Sequence[Stretch], window: tuple[int, int]) -> list[Kernel]:
    begin, stop = window
    busy, counts, exposed = Counter[tuple[str, WorkKind]](), Counter[tuple[str, WorkKind]](), Counter[str]()
    for span in spans:
        if span.start <= stop and span.end >= begin:
            counts[span.name, span.kind] += span.first
            busy[span.name, span.kind] += max(0, min(span.end, stop) - max(span.start, begin))
    for stretch in stretches:
        if stretch.waited:
            exposed[stretch.waited] += stretch.end - stretch.start
    found = [
        Kernel(name, kind, count, busy[name, kind], exposed[name] if kind is WorkKind.COMMUNICATION else 0)
        for (name, kind), count in counts.items()
    ]
    return sorted(found, key=lambda kernel: (-kernel.busy, kernel.name, kernel.kind))


def _operators(trace: Trace, work: Iterable[Event]) -> Mapping[tuple[str, int], str]:
    """Returns (kernel, start) -> the operator that launched it, if the trace records it."""
    names = {event.args["External id"]: event.name for event in trace.of("cpu_op") if "External id" in event.args}
    found = ((event, names.get(event.args.get("External id"))) for event in work)
    return {(event.name, event.start): name for event, name in found if name}


def _exposed(spans: Sequence[WorkSpan], stretches: Sequence[Stretch], operators: Mapping[tuple[str, int], str]) -> list[Exposed]:
    computing = sorted((span.start, span.name) for span in spans if span.kind is WorkKind.COMPUTE and span.end > span.start)
    times, counts = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for stretch in stretches:
        if not stretch.waited:
            continue
        place = bisect_left(computing, (stretch.end, ""))
        start, name = computing[place] if place < len(computing) else (0, UNTIL_THE_END)
        key = (stretch.waited, operators.get((name, start), name))
        times[key] += stretch.end - stretch.start
        counts[key] += 1
    return [Exposed(*key, counts[key], time) for key, time in sorted(times.items(), key=lambda item: (-item[1], item[0]))]


def _annotations(trace: Trace, window: tuple[int, int]) -> list[Annotation]:
    """Returns the union of each name's ranges within the window; nested ranges of the same name count once."""
    ranges: dict[str, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for event in _distinct(trace.of("user_annotation", "gpu_user_annotation")):
        start, end = max(event.start, window[0]), min(event.end, window[1])
        if start < end and not _own(event.name):
            ranges[event.name][event.category].append((start, end))
    found = [
        Annotation(name, len(of["user_annotation"] or of["gpu_user_annotation"]), *(
            _union(of[category]) for category in ("user_annotation", "gpu_user_annotation")
        ))
        for name, of in ranges.items()
    ]  # fmt: skip
    return sorted(found, key=lambda annotation: (-annotation.host, -annotation.device, annotation.name))


def _own(name: str) -> bool:
    """Whether an annotation is the profiler's own or a collective, and not a range of the program."""
    return name in (WINDOW, CLOSING) or name.startswith("ProfilerStep#") or is_collective(name)


def _union(ranges: list[tuple[int, int]]) -> int:
    total = reached = 0
    for start, end in sorted(ranges):
        since = max(start, reached) if total else start
        total, reached = total + max(0, end - since), max(reached, end) if total else end
    return total


def _groups(events: Iterable[Event], window: tuple[int, int]) -> dict[str, list[int]]:
    """Returns the durations of collectives of each group of ranks, from the arguments of NCCL kernels."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        ranks, name = event.args.get("Process Group Ranks"), event.args.get("Collective name")
        if ranks and name and event.category == "kernel" and window[0] <= event.start < window[1]:
            found[f"{name} {ranks}"].append((event.start, event.end - event.start))
    return {group: [duration for _, duration in sorted(each)] for group, each in sorted(found.items())}


@dataclass(frozen=True)
class Spread:
    """Times of one class over the ranks, in nanoseconds, with the ranks of the extremes."""

    label: str
    mean: float
    least: int
    least_rank: int
    most: int
    most_rank: int


def spreads(ranks: Mapping[int, Summary]) -> list[Spread]:
    """Returns the spread of every class, and of the window."""
    found = []
    for label in (*CLASSES, "window"):
        times = {rank: one.window if label == "window" else one.classes[label] for rank, one in sorted(ranks.items())}
        least, most = min(times, key=lambda rank: times[rank]), max(times, key=lambda rank: times[rank])
        found.append(Spread(label, sum(times.values()) / len(times), times[least], least, times[most], most))
    return found


def waited_for_others(ranks: Mapping[int, Summary]) -> dict[int, int]:
    """Returns the nanoseconds that each rank waited in collectives for the last rank of its group; the slowest rank waits least.

    All ranks leave a collective together, so the time of a rank beyond the shortest one is waiting. Only groups whose traces all
    have the same number of collectives count; without such a group, the result is empty.
    """
    groups: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for rank, one in ranks.items():
        for group, durations in one.groups.items():
            groups[group][rank] = tuple(durations)
    waited: dict[int, int] = {}
    for members in groups.values():
        if len(members) < 2 or len({len(durations) for durations in members.values()}) > 1:
            continue
        for stays in zip(*members.values(), strict=True):
            shortest = min(stays)
            for rank, stay in zip(members, stays, strict=True):
                waited[rank] = waited.get(rank, 0) + stay - shortest
    return dict(sorted(waited.items()))
