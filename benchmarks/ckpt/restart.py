"""From kill -9 of one of several ranks to the next finished step of the run, started again in its place.

    python benchmarks/ckpt/restart.py [--processes 4] [--rounds 3]

A small model is trained by `forge-train run --processes N --restarts 1`, with a line of metrics every step and a save every
fifth. One rank is killed in the middle. `gone` is the time until the launcher has noticed and ended all ranks, `step` until the
first step after the restart is in the metrics, `ahead` until the run is where it was. The rest of `step` is starting Python and
torch on every rank, meeting, and loading the checkpoint.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from forge_train.trackers import METRICS, json_objects

RECIPE = """
base = "debug"
[job]
name = "killed"
[train]
max_steps = 10000
threads = 1
global_batch = 16
micro_batch = 4
[checkpoint]
every = 5
[[hooks]]
name = "log"
every = 1
[[hooks]]
name = "save"
"""


def lines(folder: Path) -> list[dict[str, object]]:
    return list(json_objects(folder / "runs" / "killed" / METRICS))


def steps(folder: Path) -> list[int]:
    return [int(str(line["step"])) for line in lines(folder) if "step" in line]


def wait(true: Callable[[], bool], process: "subprocess.Popen[bytes]", seconds: float = 300.0) -> float:
    """Seconds since 0 of the monotonic clock at which something became true."""
    end = time.monotonic() + seconds
    while not true():
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit("the run ended, or took too long")
        time.sleep(0.01)
    return time.monotonic()


def once(folder: Path, processes: int, turn: int) -> tuple[float, float, float]:
    (folder / "killed.toml").write_text(RECIPE)
    command = [sys.executable, "-m", "forge_train", "run", "killed.toml", f"--processes={processes}", "--restarts=1"]
    said = folder / "said"
    with said.open("wb") as output:
        run = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait(lambda: len(steps(folder)) >= 12, run)
        ranks = [child for child in psutil.Process(run.pid).children() if "forge_train" in " ".join(child.cmdline())]
        assert len(ranks) == processes, ranks
        victim = ranks[random.Random(turn).randrange(1, processes)]
        victim.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        gone = wait(lambda: b"restart 1 of 1" in said.read_bytes(), run)
        reached = max(steps(folder))
        first = wait(lambda: "rewind" not in lines(folder)[-1] and any("rewind" in line for line in lines(folder)), run)
        ahead = wait(lambda: steps(folder)[-1] > reached, run)
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(60)
    return gone - killed, first - killed, ahead - killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = []
    for turn in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(once(Path(folder), options.processes, turn))
    for name, values in zip(("gone", "step", "ahead"), zip(*found, strict=True), strict=True):
        print(f"{name:<6} {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
