"""Saving and loading against the disk itself, `torch.save` and DCP, alternating in one run.

    python benchmarks/ckpt/save_load.py [--mib 256] [--rounds 7] [--directory DIR] [--json]

Every round does each task once, in a new order. Figures are medians, with the quartiles; ratios are of medians. Loads come
from the page cache on a machine with enough memory: they measure our work, not the disk. `plan` is the check of a manifest
of 2,000 tensors over 1,024 ranks.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format.manifest import TensorInfo
from forge_ckpt.format.rank_files import RankTable, join, pack, unpack
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.protocols.checkpoint import Piece

BASELINE = {
    "save": "raw write + fsync",
    "save, keep 1 (reads back)": "raw write + fsync",
    "torch.save + fsync": "raw write + fsync",
    "DCP save": "raw write + fsync",
    "verified load": "torch.load mmap + copy",
    "DCP load (unverified)": "torch.load mmap + copy",
    "newest + verified load": "torch.load mmap + copy",
    "torch.load + copy": "torch.load mmap + copy",
}


def state_of(mebibytes: int) -> dict[str, torch.Tensor]:
    """A decoder's state in shape: matrices of a few MiB, many small vectors."""
    state, blocks = {}, max(1, mebibytes // 8)
    for block in range(blocks):
        state[f"blocks.{block}.up"] = torch.randn(1024, 1024)
        state[f"blocks.{block}.down"] = torch.randn(2048, 512)
        for norm in range(4):
            state[f"blocks.{block}.norm{norm}"] = torch.randn(1024)
    return state


def raw_write(path: Path, state: dict[str, torch.Tensor]) -> None:
    """The least that any durable save must do."""
    with path.open("wb", buffering=0) as file:
        for tensor in state.values():
            file.write(tensor.numpy().data)
        os.fsync(file.fileno())


def torch_save(path: Path, state: dict[str, torch.Tensor]) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(path: Path, live: dict[str, torch.Tensor], mmap: bool) -> None:
    found = torch.load(path, mmap=mmap, weights_only=True)
    for name, tensor in live.items():
        tensor.copy_(found[name])


def tasks(root: Path, state: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    pieces = [Piece(name, tuple(t.shape), (0,) * t.dim(), t, True) for name, t in state.items()]
    filled = [Piece(name, tuple(t.shape), (0,) * t.dim(), t, True) for name, t in live.items()]
    keeping, pruning, fixed = LocalStore(root / "keeping"), LocalStore(root / "pruning"), LocalStore(root / "fixed")
    save(fixed, pieces, {}, 1, SingleProcessWorld())
    torch_save(root / "fixed.pt", state)
    dcp.save(dict(state), checkpoint_id=root / "fixed-dcp", no_dist=True)
    step = iter(range(1, 1_000_000))

    def save_dcp() -> None:
        dcp.save(dict(state), checkpoint_id=root / f"dcp-{next(step)}", no_dist=True)

    return {
        "raw write + fsync": lambda: raw_write(root / f"raw-{next(step)}", state),
        "save": lambda: save(keeping, pieces, {}, next(step), SingleProcessWorld()),
        "save, keep 1 (reads back)": lambda: save(pruning, pieces, {}, next(step), SingleProcessWorld(), keep=1),
        "torch.save + fsync": lambda: torch_save(root / f"torch-{next(step)}", state),
        "DCP save": save_dcp,
        "verified load": lambda: load(fixed, 1, filled, SingleProcessWorld()),
        "newest + verified load": lambda: load(fixed, newest(fixed, SingleProcessWorld()) or 1, filled, SingleProcessWorld()),
        "torch.load mmap + copy": lambda: torch_load(root / "fixed.pt", live, True),
        "torch.load + copy": lambda: torch_load(root / "fixed.pt", live, False),
        "DCP load (unverified)": lambda: dcp.load(live, checkpoint_id=root / "fixed-dcp", no_dist=True),
    }


def tidy(root: Path) -> None:
    """Between measurements: what a task left would fill the disk and its write-back would disturb the next one."""
    for path in root.iterdir():
        if path.name.startswith(("raw-", "torch-")):
            path.unlink()
        elif path.name.startswith("dcp-"):
            shutil.rmtree(path)
    for path in (root / "keeping").glob("step-*"):
        shutil.rmtree(path)
    os.sync()


def measure(root: Path, mebibytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per task and round; the first round warms up and does not count."""
    jobs = tasks(root, state_of(mebibytes))
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    order = list(jobs)
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)
        for name in order:
            tidy(root)
            start = time.perf_counter()
            jobs[name]()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def plan_seconds(tensors: int = 2000, ranks: int = 1024) -> float:
    """Joining the tables of all ranks and proving that they cover every tensor, each cut over all ranks."""
    infos = tuple(TensorInfo(f"model/blocks.{i}.weight", "bfloat16", (8 * ranks, 4096)) for i in range(tensors))
    offset, extent = np.zeros((tensors, 2), dtype=np.int64), np.full((tensors, 2), 4096, dtype=np.int64)
    extent[:, 0] = 8
    payloads = []
    head = RankTable(infos, np.arange(tensors), offset, extent, os.urandom(16 * tensors))
    lead, plain = pack(head, True), pack(head, False)
    start = len(plain) - len(head.checksum) - extent.nbytes - offset.nbytes
    for rank in range(ranks):
        offset[:, 0] = 8 * rank
        moved = plain[:start] + offset.tobytes() + plain[start + offset.nbytes :]
        payloads.append(lead if rank == 0 else moved)
    began = time.perf_counter()
    join(unpack(payloads), step=1, generation="0" * 32, meta={})
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; the system's temporary directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # DCP announces that it runs without a process group
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        seconds = measure(Path(directory), options.mib, options.rounds)
    report = {}
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4)
        base = statistics.median(seconds[BASELINE.get(name, name)])
        report[name] = {
            "median_s": middle,
            "quartiles_s": [low, high],
            "baseline": BASELINE.get(name),
            "times_baseline": middle / base,
        }
    report["plan of 2,000 tensors over 1,024 ranks"] = {"median_s": statistics.median(plan_seconds() for _ in range(3))}
    if options.json:
        json.dump(
            {"mib": options.mib, "rounds": options.rounds, "torch": torch.__version__, "tasks": report}, sys.stdout, indent=2
        )
        return
    for name, row in report.items():
        spread = "({:.3f}-{:.3f})".format(*row["quartiles_s"]) if "quartiles_s" in row else ""
        ratio = f"{row['times_baseline']:.2f} x {row['baseline']}" if row.get("baseline") else ""
        print(f"{name:<40} {row['median_s']:.3f} s {spread:<16} {ratio}")


if __name__ == "__main__":
    main()
