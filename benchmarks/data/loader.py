"""Loader against plain numpy that makes the same arrays, and start-up and seek in a corpus of 122 million rows.

    python benchmarks/data/loader.py [--length 2048] [--rows 256] [--seconds 20] [--json]

Both sides read the same memory-mapped store in the same order and make the same arrays, which is checked first. They
take turns step by step; printed are medians with their middle half, and the median of the ratio of neighbors.
- "plain": tokens and labels (documents = "ignore"), numpy copying row by row into two arrays that it uses again.
- "masked": also positions and documents; numpy does it row by row in the obvious way, knowing each row's borders.
The numpy sides know nothing of cursors, orders or checks: their list of rows and borders is made beforehand.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from forge_core.batch import IGNORE
from forge_data.components import Tokens, TokenStore
from forge_data.loading.stream import TrainingStream, open_stream
from forge_data.section import Data
from forge_data.sources.store_writer import StoreWriter

MEAN_DOCUMENT = 900


def write_corpus(path: Path, tokens: int) -> None:
    """Random ids in documents of geometric length."""
    rng = np.random.default_rng(0)
    with StoreWriter(path, dtype="uint16") as writer:
        done = 0
        while done < tokens:
            lengths = rng.geometric(1 / MEAN_DOCUMENT, size=2000)
            ends = np.cumsum(lengths)
            ids = rng.integers(1, 32_000, size=int(ends[-1]), dtype=np.uint16)
            ids[ends - 1] = 0
            writer.add(ids, ends)
            done += len(ids)
        writer.commit()


def opened(path: Path, length: int, rows: int, documents: str) -> TrainingStream:
    data = Data(sequence_length=length, sources=[TokenStore(path=str(path))], documents=documents)  # type: ignore[arg-type]
    stream = open_stream(data, workspace=path, seed=1, global_batch=rows, micro_batch=rows, vocab_size=32_000)
    assert isinstance(stream, TrainingStream)
    return stream


def numpy_steps(stream: TrainingStream, path: Path, rows: int, steps: int, masked: bool) -> Iterator[list[np.ndarray]]:
    """The same arrays in plain numpy; what is known beforehand is computed before the first step."""
    length = stream.data.sequence_length
    tokens = np.asarray(np.memmap(path / "shard-00000.bin", dtype="<u2", mode="r"))
    ends = np.load(path / "shard-00000.doc.npy").astype(np.int64)
    starts = (stream.samples.locate(0, rows * steps)[1] * length).reshape(steps, rows).tolist()
    borders = [[ends[slice(*np.searchsorted(ends, (s, s + length), side="right"))] - s for s in step] for step in starts]
    out = [np.empty((rows, length), np.int64) for _ in range(2)] + [np.empty((rows, length), np.int32) for _ in range(2 * masked)]
    count = np.arange(length, dtype=np.int32)
    for step in range(steps):
        for row, start in enumerate(starts[step]):
            out[0][row] = tokens[start : start + length]
            out[1][row] = tokens[start + 1 : start + length + 1]
            own = borders[step][row]
            out[1][row, own - 1] = IGNORE
            if masked:
                out[2][row] = count
                out[3][row] = 0
                for column in own[own < length].tolist():
                    out[2][row, column:] = count[: length - column]
                    out[3][row, column:] += 1
        yield out


def forge_steps(stream: TrainingStream) -> Iterator[list[torch.Tensor]]:
    for (batch,), _ in stream.from_cursor(stream.start()):
        yield [part for part in (batch.tokens, batch.labels, batch.positions, batch.documents) if part is not None]


def compare(path: Path, length: int, rows: int, seconds: float, documents: str) -> dict[str, object]:
    """Tokens per second of both sides, in turns."""
    stream = opened(path, length, rows, documents)
    steps = 400
    sides: dict[str, Callable[[], Iterator[list]]] = {  # type: ignore[type-arg]
        "forge": lambda: forge_steps(stream),
        "numpy": lambda: numpy_steps(stream, path, rows, steps, documents == "mask"),
    }
    for (one, other), _ in zip(zip(sides["forge"](), sides["numpy"](), strict=False), range(5), strict=False):
        assert all(np.array_equal(a.numpy(), b) for a, b in zip(one, other, strict=True)), "the sides differ"
    running = {name: make() for name, make in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until and len(times["forge"]) < steps:
        for name in list(sides) if len(times["forge"]) % 2 else list(reversed(sides)):
            began = time.perf_counter()
            next(running[name])
            times[name].append(time.perf_counter() - began)
    ratios = [plain / ours for plain, ours in zip(times["numpy"][10:], times["forge"][10:], strict=True)]
    found: dict[str, object] = {"steps": len(ratios), "ratio": quartiles(ratios)}
    for name, taken in times.items():
        found[f"{name}_mtokens_per_second"] = quartiles([rows * length / second / 1e6 for second in taken[10:]])
    return found


def seek(folder: Path, length: int = 4096, rows: int = 122_000_000) -> dict[str, float]:
    """Milliseconds to open a sparse file of `rows` rows, to find sample 10^8 and to read it, beside a small file; and megabytes
    of memory that one such stream takes, in this process and without the pages of mapped files.

    The small file (41 M tokens) is scanned for its largest id when it is opened and then lies in the page cache; rows
    of the large one are touched for the first time.
    """
    found = {}
    for name, count in (("small", 10_000), ("large", rows)):
        path = folder / f"{name}.bin"
        with path.open("wb") as file:
            file.truncate(2 * (count * length + 1))
        data = Data(sequence_length=length, sources=[Tokens(path=str(path), dtype="uint16")])
        opening, seeking, reading, taken = [], [], [], []
        for repeat in range(9):
            before, began = own_memory(), time.perf_counter()
            stream = open_stream(data, workspace=folder, seed=repeat, global_batch=8, micro_batch=8)
            between = time.perf_counter()
            assert isinstance(stream, TrainingStream)
            stream.samples.locate(10**8, 8)
            located = time.perf_counter()
            next(stream.from_cursor(dict(stream.start()) | {"sample": 10**8}))
            opening.append(between - began)
            seeking.append(located - between)
            reading.append(time.perf_counter() - located)
            taken.append(own_memory() - before)
        found[f"{name}_open_ms"] = 1e3 * statistics.median(opening)
        found[f"{name}_seek_ms"] = 1e3 * statistics.median(seeking)
        found[f"{name}_first_batch_ms"] = 1e3 * statistics.median(reading)
        found[f"{name}_memory_mb"] = max(taken) / 1e6
        path.unlink()
    return found


def own_memory() -> int:
    """Bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def quartiles(values: list[float]) -> list[float]:
    """[lower quartile, median, upper quartile]."""
    return [round(value, 3) for value in np.quantile(values, [0.25, 0.5, 0.75]).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus", 1 << 25)
        shape = (folder / "corpus", arguments.length, arguments.rows, arguments.seconds)
        found = {"plain": compare(*shape, "ignore"), "masked": compare(*shape, "mask"), "seek": seek(folder)}
    if arguments.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for title, values in found.items():
        sys.stdout.write(f"{title}\n" + "".join(f"  {key}: {value}\n" for key, value in values.items()))


if __name__ == "__main__":
    main()
