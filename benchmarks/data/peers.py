"""Tokens per second of loaders over the same arrays: Forge, torchdata's StatefulDataLoader, litdata, mosaicml-streaming.

    python benchmarks/data/peers.py [--tokens 33554432] [--length 2048] [--rows 256] [--sources 1,4] [--workers 0,2]
        [--seconds 3] [--rounds 7] [--sides forge,torchdata,litdata,mosaic] [--peers-python PATH] [--json]

Every side runs in a process of its own, keeps its loader and gives out batches while it is its turn; turns alternate, so all
sides see the same machine. Printed per setting are medians with their middle half: tokens per second of wall time, tokens per
second of CPU time over the process and its workers ("per core"), and Forge's ratio to each other side in neighboring turns.

- Corpora are `.npy` arrays of uint16 ids in documents of 900 tokens on average, which Forge and torchdata map into memory.
  litdata and mosaicml-streaming read formats of their own; the same ids are written in them beforehand, which is not timed.
- "plain": tokens and labels, (rows, length) int64, shuffled. "packed": also positions and documents, which stop at document
  borders, labels too. litdata and mosaicml-streaming have no notion of these: their users would compute them from the
  end-of-document token, as is done here, vectorised over the batch.
- torchdata: a map-style dataset that cuts a row out of the mapped array, with its own shuffling and collation.

`--peers-python` is the interpreter of an environment with litdata and mosaicml-streaming, where they are not in this one. A side
whose library is absent is left out and named.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

EOS, VOCABULARY, IGNORE = 0, 32_000, -100
PEERS = {"torchdata": "torchdata", "litdata": "litdata", "mosaic": "streaming"}


def write_arrays(folder: Path, sources: int, tokens: int, length: int) -> None:
    """The corpora, as arrays and in the formats of those that need their own."""
    rng = np.random.default_rng(0)
    for source in range(sources):
        ids = rng.integers(1, VOCABULARY, size=tokens // sources, dtype=np.uint16)
        ends = np.cumsum(rng.geometric(1 / 900, size=2 * len(ids) // 900))
        ids[ends[ends < len(ids)] - 1] = EOS
        ids[-1] = EOS
        np.save(folder / f"{source}.npy", ids)
        np.save(folder / f"{source}.rows.npy", np.lib.stride_tricks.sliding_window_view(ids, length + 1)[::length])


def convert(folder: Path, side: str, sources: int, length: int) -> None:
    """The rows of the arrays in the side's own format; runs in the side's process."""
    for source in range(sources):
        target = folder / f"{side}-{source}"
        if target.exists():
            continue
        rows = np.load(folder / f"{source}.rows.npy", mmap_mode="r")
        if side == "litdata":
            import torch
            from litdata.streaming.writer import BinaryWriter  # what `optimize` writes with, without its pool of processes

            writer = BinaryWriter(str(target), chunk_bytes="64MB")
            for number, row in enumerate(rows):
                writer[number] = torch.from_numpy(row.astype(np.int32))
            writer.done()
            writer.merge()
        if side == "mosaic":
            from streaming import MDSWriter

            with MDSWriter(out=str(target), columns={"tokens": f"ndarray:uint16:{length + 1}"}) as mds:
                for row in rows:
                    mds.write({"tokens": np.ascontiguousarray(row)})


def masked(tokens: Any, labels: Any) -> tuple[Any, Any, Any]:
    """(labels, positions, documents) from the end-of-document token, as a user of a library without documents would."""
    import torch

    ends = tokens == EOS
    labels = labels.masked_fill(ends, IGNORE)
    starts = torch.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    documents = starts.cumsum(1, dtype=torch.int32)
    index = torch.arange(tokens.shape[1], dtype=torch.int32).expand_as(tokens)
    begins = torch.where(starts, index, torch.zeros_like(index)).cummax(1).values
    return labels, index - begins, documents


class Rows:
    """Map-style: row i of all arrays together, as one would write it for torch's DataLoader."""

    def __init__(self, folder: Path, sources: int, length: int, packed: bool) -> None:
        self.arrays = [np.load(folder / f"{source}.npy", mmap_mode="r") for source in range(sources)]
        self.length, self.packed = length, packed
        self.each = (len(self.arrays[0]) - 1) // length

    def __len__(self) -> int:
        return self.each * len(self.arrays)

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        import torch

        source, row = divmod(number, self.each)
        window = self.arrays[source][row * self.length : (row + 1) * self.length + 1].astype(np.int64)
        tokens, labels = window[:-1], window[1:]
        if not self.packed:
            return torch.from_numpy(tokens), torch.from_numpy(labels)
        columns = np.flatnonzero(tokens == EOS) + 1
        labels[columns - 1] = IGNORE
        starts = np.concatenate([[0], columns[columns < self.length]])
        lengths = np.diff(starts, append=self.length)
        documents = np.repeat(np.arange(len(starts), dtype=np.int32), lengths)
        positions = np.arange(self.length, dtype=np.int32) - np.repeat(starts.astype(np.int32), lengths)
        return tuple(torch.from_numpy(part) for part in (tokens, labels, positions, documents))


def batches(side: str, setting: dict[str, Any], folder: Path) -> Iterator[Any]:
    """An endless loader of one side."""
    sources, length, rows, workers, packed = (setting[key] for key in ("sources", "length", "rows", "workers", "packed"))
    if side == "forge":
        from forge_data.components import Tokens
        from forge_data.loading.stream import open_stream
        from forge_data.section import Data

        data = Data(
            sequence_length=length,
            sources=[Tokens(path=str(folder / f"{source}.npy"), eos=EOS, label=f"s{source}") for source in range(sources)],
            documents="mask" if packed else "ignore",
            loader_workers=workers,
        )
        stream: Any = open_stream(data, workspace=folder, seed=1, global_batch=rows, micro_batch=rows, vocab_size=VOCABULARY)
        for (batch,), _ in stream.from_cursor(stream.start()):
            yield batch.tokens
        return
    loader: Any
    if side == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        dataset: Any = Rows(folder, sources, length, packed)
        loader = StatefulDataLoader(dataset, batch_size=rows, shuffle=True, num_workers=workers, drop_last=True)
        while True:
            for batch in loader:
                yield batch[0]
    convert(folder, side, sources, length)
    paths = [str(folder / f"{side}-{source}") for source in range(sources)]
    if side == "litdata":
        from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

        parts = [StreamingDataset(path, shuffle=True, drop_last=True) for path in paths]
        dataset = parts[0] if sources == 1 else CombinedStreamingDataset(parts, iterate_over_all=True)
        loader = StreamingDataLoader(dataset, batch_size=rows, num_workers=workers)
    else:
        from streaming import Stream, StreamingDataset
        from torch.utils.data import DataLoader

        dataset = StreamingDataset(streams=[Stream(local=path) for path in paths], shuffle=True, batch_size=rows)
        loader = DataLoader(dataset, batch_size=rows, num_workers=workers)
    while True:
        for found in loader:
            window = (found if side == "litdata" else found["tokens"]).long()
            tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()
            if packed:
                masked(tokens, labels)
            yield tokens


def cpu_seconds() -> float:
    """CPU time of this process and all below it so far."""
    ticks, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))  # user and system, with those of children that ended
    mine, found = {os.getpid()}, 0
    while len(mine) > found:
        found = len(mine)
        mine |= {process for process, parent in parents.items() if parent in mine}
    return sum(ticks[process] for process in mine) / os.sysconf("SC_CLK_TCK")


def serve(side: str, setting: dict[str, Any], folder: Path) -> None:
    """One side: a turn of some seconds for every line of input."""
    import torch

    torch.set_num_threads(1)
    loader = batches(side, setting, folder)
    for _ in range(3):
        assert next(loader).shape == (setting["rows"], setting["length"])
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, tokens = float(line), 0
        used, began = cpu_seconds(), time.perf_counter()
        while time.perf_counter() - began < seconds:
            tokens += next(loader).numel()
        wall = time.perf_counter() - began
        print(json.dumps([tokens / wall, tokens / max(cpu_seconds() - used, 1e-9)]), flush=True)


def available(side: str, python: str) -> bool:
    if side == "forge":
        return True
    return subprocess.run([python, "-c", f"import {PEERS[side]}"], capture_output=True, check=False).returncode == 0


def compare(setting: dict[str, Any], sides: dict[str, str], folder: Path, seconds: float, rounds: int) -> dict[str, Any]:
    """Rates of all sides in one setting."""
    children = {}
    for side, python in sides.items():
        command = [python, __file__, "--serve", side, "--setting", json.dumps(setting), "--folder", str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        children[side] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )

    def answer(side: str) -> str:
        child = children[side]
        assert child.stdout is not None
        while line := child.stdout.readline():
            if line.startswith(("ready", "[")):  # libraries may print something else
                return line
        raise RuntimeError(f"{side} ended with code {child.wait()}")

    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    try:
        for side in sides:
            answer(side)
        for turn in range(rounds):
            for side in list(sides) if turn % 2 else list(reversed(sides)):
                stdin = children[side].stdin
                assert stdin is not None
                stdin.write(f"{seconds}\n")
                stdin.flush()
                wall, cpu = json.loads(answer(side))
                found[side].append((wall, cpu))
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    result: dict[str, Any] = {}
    for side, taken in found.items():
        result[side] = {
            "mtokens_per_second": quartiles([wall / 1e6 for wall, _ in taken]),
            "mtokens_per_second_and_core": quartiles([cpu / 1e6 for _, cpu in taken]),
        }
        if side != "forge" and "forge" in found:
            ratios = [ours[1] / theirs[1] for ours, theirs in zip(found["forge"], taken, strict=True)]
            result[side]["forge_is_faster_per_core_by"] = quartiles(ratios)
    return result


def quartiles(values: list[float]) -> list[float]:
    """[lower quartile, median, upper quartile]."""
    if len(values) < 2:
        return [round(statistics.median(values), 3)] * 3
    return [round(value, 3) for value in np.quantile(values, [0.25, 0.5, 0.75]).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 25)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--sources", default="1,4")
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sides", default="forge,torchdata,litdata,mosaic")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, json.loads(arguments.setting), Path(arguments.folder))
        return
    pythons = {
        side: arguments.peers_python if side in ("litdata", "mosaic") else sys.executable for side in arguments.sides.split(",")
    }
    sides = {side: python for side, python in pythons.items() if available(side, python)}
    found: dict[str, Any] = {"absent": sorted(pythons.keys() - sides.keys())}
    for sources in map(int, arguments.sources.split(",")):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_arrays(folder, sources, arguments.tokens, arguments.length)
            for workers in map(int, arguments.workers.split(",")):
                for packed in (False, True):
                    setting = {
                        "sources": sources,
                        "workers": workers,
                        "packed": packed,
                        "length": arguments.length,
                        "rows": arguments.rows,
                    }
                    title = f"{'packed' if packed else 'plain'}, {sources} sources, {workers} workers"
                    found[title] = compare(setting, sides, folder, arguments.seconds, arguments.rounds)
                    if not arguments.json:
                        sys.stdout.write(f"{title}\n")
                        for side, values in found[title].items():
                            sys.stdout.write(f"  {side}: {json.dumps(values)}\n")
                        sys.stdout.flush()
    if arguments.json:
        sys.stdout.write(json.dumps(found) + "\n")
    elif found["absent"]:
        sys.stdout.write(f"absent: {', '.join(found['absent'])}\n")


if __name__ == "__main__":
    main()
