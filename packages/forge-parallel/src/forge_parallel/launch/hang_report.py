"""What is written down when ranks hang: who, where, every stack, and the collectives that ranks have entered."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forge_parallel.torch_private import flight_record

_NEWEST = 200
_RECORDS_SHOWN = 5


class Entered(NamedTuple):
    """A collective that a rank has entered: of which group, its number there, what it is and of which shapes."""

    group: str
    number: int
    what: str


def collectives() -> list[Entered]:
    """The newest collectives of this process, oldest first; none where torch keeps no record (`TORCH_FR_BUFFER_SIZE`)."""
    found = []
    for entry in flight_record()[-_NEWEST:]:
        if not entry.get("is_p2p"):
            what = f"{entry['profiling_name']} {entry['input_sizes']}"
            found.append(Entered(" ".join(map(str, entry["process_group"])), entry["collective_seq_id"], what))
    return found


def parting(records: Mapping[int, Sequence[Entered]]) -> str:
    """Where ranks part: the first collective of a group that some of them entered as another one, or not at all; else empty.

    Only numbers count that every record of the group reaches back to. A group is that of the ranks that have it in their record.
    """
    groups: defaultdict[str, dict[int, dict[int, str]]] = defaultdict(dict)
    for rank, entries in records.items():
        for group, number, what in entries:
            groups[group].setdefault(rank, {})[number] = what
    for group, by_rank in groups.items():
        first = max(min(numbers) for numbers in by_rank.values())
        last = max(max(numbers) for numbers in by_rank.values())
        for number in range(first, last + 1):
            who: defaultdict[str, list[int]] = defaultdict(list)
            for rank, numbers in sorted(by_rank.items()):
                who[numbers.get(number, "nothing")].append(rank)
            if len(who) > 1:
                sides = "; ".join(f"rank {', '.join(map(str, ranks))}: {what}" for what, ranks in who.items())
                return f"ranks part at collective {number} of group {group}: {sides}"
    return ""


def text(cause: str, ranks: Mapping[int, str], records: Mapping[int, Sequence[Entered]]) -> str:
    """The report.

    Args:
        cause: who hangs, and where.
        ranks: what each rank says, or what was last heard of it.
        records: its newest collectives.
    """
    parts = [cause, parting(records)]
    for rank, said in sorted(ranks.items()):
        newest = "\n".join(f"  {entry.group} #{entry.number} {entry.what}" for entry in records.get(rank, ())[-_RECORDS_SHOWN:])
        parts += [f"--- rank {rank} ---", said.rstrip(), f"newest collectives:\n{newest}" if newest else ""]
    return "\n".join(filter(None, parts)) + "\n"


def answer(store: Any, rank: int, said: str) -> None:
    """Puts into the store what a rank adds to the report."""
    store.set(f"stacks/{rank}", json.dumps([said, collectives()]))


def answers(store: Any, others: Mapping[int, str], seconds: float) -> tuple[dict[int, str], dict[int, Sequence[Entered]]]:
    """What other ranks add, and their collectives. One that does not answer in time is known by what is given for it."""
    told, records, keys = dict(others), dict[int, Sequence[Entered]](), {rank: f"stacks/{rank}" for rank in others}
    until = time.monotonic() + seconds
    while keys and not store.check(list(keys.values())) and time.monotonic() < until:
        time.sleep(seconds / 20)
    for rank, key in keys.items():
        if store.check([key]):
            told[rank], entries = json.loads(store.get(key))
            records[rank] = [Entered(*entry) for entry in entries]
    return told, records


def append(path: Path, moment: str, report: str) -> None:
    """Adds a report to a file of them.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(f"=== {moment} ===\n{report}\n")
