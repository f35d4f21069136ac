"""Saves in the background: how long training waits, what it loses meanwhile, and what that takes in memory.

    python benchmarks/ckpt/background.py [--mib 512] [--rounds 7] [--directory DIR]

Every round does each task once, in a new order. `waits` is the time until the caller goes on, `durable` until the save is over;
ratios are to a save that waits, medians with quartiles. DCP's asynchronous saves are those of a thread and of a process.
The rate of steps is that of a loop of products on one thread, over the same loop without a save, while saves follow each other.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from save_load import state_of
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from forge_ckpt.background import BackgroundSaves
from forge_ckpt.checkpoint.save import save
from forge_ckpt.checkpoint.write import SaveRequest
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.protocols.checkpoint import Piece

ALONE = SingleProcessWorld()
Times = tuple[float, float]


def timed(begin: Callable[[], Callable[[], object]]) -> Times:
    """Seconds until `begin` returned, and until what it returned did."""
    start = time.perf_counter()
    end = begin()
    waited = time.perf_counter() - start
    end()
    return waited, time.perf_counter() - start


def tasks(
    root: Path, state: dict[str, torch.Tensor], made: list[BackgroundSaves]
) -> dict[str, Callable[[], Callable[[], object]]]:
    pieces = [Piece(name, tuple(t.shape), (0,) * t.dim(), t, True) for name, t in state.items()]
    store, step = LocalStore(root / "keeping"), iter(range(1, 1_000_000))

    def waiting() -> Callable[[], object]:
        save(store, pieces, {}, next(step), ALONE)
        return lambda: None

    def behind(background: BackgroundSaves) -> Callable[[], object]:
        background.save(pieces, SaveRequest(next(step), {}))

        def end() -> None:
            (outcome,) = background.settled(wait=True)
            assert outcome.error is None, outcome.error

        return end

    def dcp_behind(kind: AsyncCheckpointerType) -> Callable[[], object]:
        future = dcp.async_save(dict(state), checkpoint_id=root / f"dcp-{next(step)}", async_checkpointer_type=kind)
        return future.result  # type: ignore[union-attr]

    for by in ("process", "thread"):
        made.append(BackgroundSaves(store, ALONE, ALONE, by=by))  # type: ignore[arg-type]
        made[-1].reserve(pieces)
    process, thread = made
    return {
        "save": waiting,
        "background, process": lambda: behind(process),
        "background, thread": lambda: behind(thread),
        "DCP async, thread": lambda: dcp_behind(AsyncCheckpointerType.THREAD),
        "DCP async, process": lambda: dcp_behind(AsyncCheckpointerType.PROCESS),
    }


def tidy(root: Path) -> None:
    """Between measurements: what a task left would fill the disk, and its write-back would disturb the next one."""
    for path in (*root.glob("dcp-*"), *(root / "keeping").glob("step-*")):
        shutil.rmtree(path)
    os.sync()


def rate(seconds: float) -> float:
    """Steps a second of a loop on one thread."""
    matrix, done, start = torch.randn(256, 256), 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        matrix = torch.tanh(matrix @ matrix.T / 16)
        done += 1
    return done / (time.perf_counter() - start)


def rates(root: Path, background: BackgroundSaves, pieces: list[Piece], seconds: float) -> tuple[float, float]:
    """Of a loop alone, and of one during which a save is always being written."""
    tidy(root)
    alone = rate(seconds)
    begun = 0
    done, spent = 0.0, 0.0
    while spent < seconds:
        begun += 1
        background.save(pieces, SaveRequest(10**6 + begun, {}, keep=1))
        start = time.perf_counter()
        while not background.settled():
            done += rate(0.02) * 0.02
        spent += time.perf_counter() - start
    return alone, done / spent


def resident(pid: int | str) -> float:
    """MiB that a process alone holds, without what it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each loop whose rate is measured")
    parser.add_argument("--directory", type=Path, default=None, help="where to write; the system's temporary directory")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made: list[BackgroundSaves] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        root, state = Path(directory), state_of(options.mib)
        dist.init_process_group("gloo", init_method=f"file://{root / 'meeting'}", rank=0, world_size=1)
        jobs = tasks(root, state, made)
        times: dict[str, list[Times]] = {name: [] for name in jobs}
        for turn in range(options.rounds + 1):
            for name in random.Random(turn).sample(list(jobs), len(jobs)):
                tidy(root)
                found = timed(jobs[name])
                if turn:
                    times[name].append(found)
        base = statistics.median(waited for waited, _ in times["save"])
        for name, found in times.items():
            for what, values in zip(("waits", "durable"), zip(*found, strict=True), strict=True):
                low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
                spread = f"({low / base:.3f} to {high / base:.3f})"
                print(f"{name:<22} {what:<8} {middle:.3f} s, {middle / base:.3f} {spread} of a save that waits")
        pieces = [Piece(name, tuple(t.shape), (0,) * t.dim(), t, True) for name, t in state.items()]
        found = [rates(root, made[0], pieces, options.seconds) for _ in range(max(1, options.rounds // 2))]
        ratios = [during / alone for alone, during in found]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"steps while a process saves, over steps alone: {statistics.median(ratios):.3f} ({spread})")
        process = made[0]._process
        assert process is not None and process.process is not None
        held, size = made[0]._memories[0].size, sum(t.numel() * t.element_size() for t in state.values())
        print(f"memory: {held / 2**20:.0f} MiB for a state of {size / 2**20:.0f}, saver {resident(process.process.pid):.0f} MiB")
        for background in made:
            background.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
