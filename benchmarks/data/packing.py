"""Documents per second of the best-fit plan, and what it costs to keep.

    python benchmarks/data/packing.py [--documents 2000000] [--length 2048] [--repeats 5] [--json]

Lengths are drawn from a log-normal law (median 400, a long tail), which web text follows roughly. Measured are the plan alone
(`best_fit`, lengths to rows), and the whole of what a run does the first time: read the borders of a token store, cut documents
that are longer than a row, plan, write the plan and flush it. Beside them stands best-fit-decreasing as a textbook writes it (a
sorted list of rooms, one document after the other), on a twentieth of the documents; both take turns. Printed are medians with
their middle half.
"""

import argparse
import bisect
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from forge_data.packing.plan import best_fit, planned
from forge_data.sources.store import StoreSource
from forge_data.sources.store_writer import StoreWriter


def lengths_of(documents: int, longest: int) -> np.ndarray:
    """(documents,) int64."""
    drawn = np.random.default_rng(0).lognormal(np.log(400), 1.2, size=documents).astype(np.int64)
    return drawn.clip(1, longest)


def textbook(lengths: np.ndarray, capacity: int) -> int:
    """Rows that best-fit-decreasing needs."""
    rooms: list[int] = []
    rows = 0
    for length in sorted(lengths.tolist(), reverse=True):
        place = bisect.bisect_left(rooms, length)
        room = capacity
        if place < len(rooms):
            room = rooms.pop(place)
        else:
            rows += 1
        bisect.insort(rooms, room - length)
    return rows


def store(folder: Path, documents: int) -> StoreSource:
    """A token store of so many documents."""
    lengths = lengths_of(documents, 20_000)
    with StoreWriter(folder / "store", dtype="uint16") as writer:
        for start in range(0, documents, 100_000):
            ends = np.cumsum(lengths[start : start + 100_000])
            writer.add(np.ones(int(ends[-1]), dtype=np.uint16), ends)
        writer.commit()
    return StoreSource(folder / "store")


def measure(documents: int, length: int, repeats: int, folder: Path) -> dict[str, object]:
    lengths = lengths_of(documents, length)
    some = lengths[: documents // 20]
    assert textbook(some, length) == best_fit(some, length)[1], "the sides differ"
    source = store(folder, documents)
    rates: dict[str, list[float]] = {"plan": [], "textbook": [], "all": []}
    summary = {}
    for _ in range(repeats):
        began = time.perf_counter()
        best_fit(lengths, length)
        rates["plan"].append(documents / (time.perf_counter() - began))
        began = time.perf_counter()
        textbook(some, length)
        rates["textbook"].append(len(some) / (time.perf_counter() - began))
        shutil.rmtree(folder / "work", ignore_errors=True)
        began = time.perf_counter()
        summary = planned(source, length, "best_fit", folder / "work", "corpus").summary
        rates["all"].append(documents / (time.perf_counter() - began))
    found: dict[str, object] = {
        f"{name}_mdocuments_per_second": [round(v / 1e6, 3) for v in np.quantile(taken, [0.25, 0.5, 0.75]).tolist()]
        for name, taken in rates.items()
    }
    return found | {key: summary[key] for key in ("documents", "rows", "efficiency", "truncated_documents")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(arguments.documents, arguments.length, arguments.repeats, Path(name))
    if arguments.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    sys.stdout.write("".join(f"{key}: {value}\n" for key, value in found.items()))


if __name__ == "__main__":
    main()
