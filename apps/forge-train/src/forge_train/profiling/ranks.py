"""What ranks of one window have in common and what not. No clock of one is compared with that of another."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from forge_train.profiling.summary import Summary
from forge_train.profiling.sweep import CLASSES


@dataclass(frozen=True)
class Spread:
    """One class over the ranks, in nanoseconds, with the ranks of the extremes."""

    label: str
    mean: float
    least: int
    least_rank: int
    most: int
    most_rank: int


def spreads(ranks: Mapping[int, Summary]) -> list[Spread]:
    """Of every class, and of the window."""
    found = []
    for label in (*CLASSES, "window"):
        times = {rank: one.window if label == "window" else one.classes[label] for rank, one in sorted(ranks.items())}
        least, most = min(times, key=lambda rank: times[rank]), max(times, key=lambda rank: times[rank])
        found.append(Spread(label, sum(times.values()) / len(times), times[least], least, times[most], most))
    return found


def waited_for_others(ranks: Mapping[int, Summary]) -> dict[int, int]:
    """Nanoseconds that each rank spent in collectives before the last of its group had come; the slowest rank has the least.

    All ranks of a collective leave it together, so what one of them spends in it beyond the shortest stay is waiting. Only groups
    of which every rank's trace has the same number of collectives count; without one, the result is empty.
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
