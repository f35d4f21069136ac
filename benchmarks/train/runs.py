"""How long `forge-train runs` takes over many run directories, and how much of their metrics it reads.

    python benchmarks/train/runs.py [--runs 1000] [--lines 2000] [--rounds 5] [--smoke]

A real tiny run trains once, with a line for each step, is killed, and resumes. Its metrics are made as long as those of a long
run: each start gets `--lines` lines. Copies of its directory (hard links, so the files are in memory) are the runs. The other
side reads some of the same directories whole, as `forge-train report` reads a run: every line of the metrics, the logs and the
recipe. Both sides take turns.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from forge_train.report.record import read_record
from forge_train.runs.overview import overview, run_directories

COMMAND = [sys.executable, "-m", "forge_train"]
KEYS = ["--hooks=[{name='save'}, {name='log', every=1}]", "--checkpoint.every=4", "--job.dir=run"]


def train(folder: Path) -> Path:
    """Trains a tiny run with two starts: one that is killed after step 6, and one that ends after step 12."""
    command = [*COMMAND, "run", "debug", *KEYS, "--schedule.name=constant", "--train.max_steps=12"]
    run, metrics = folder / "run", folder / "run" / "metrics.jsonl"
    first = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    while not (metrics.exists() and b'"step": 6,' in metrics.read_bytes()):
        if first.poll() is not None:
            raise SystemExit("the tiny run ended too soon")
        time.sleep(0.005)
    first.kill()
    first.wait()
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return run


def lengthen(run: Path, lines: int) -> None:
    """Repeats the lines of each start, with increasing steps and times, and moves the starts apart accordingly."""
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    content = (run / "metrics.jsonl").read_bytes()
    borders = [*(entry["metrics"] for entry in starts if "start" in entry), len(content)]
    written, shift = b"", 0
    for number, entry in enumerate(entry for entry in starts if "start" in entry):
        entry["metrics"] = len(written)
        entry["step"] += shift
        for line in filter(None, content[borders[number] : borders[number + 1]].split(b"\n")):
            with suppress(ValueError):  # the kill may have cut a line off
                item = json.loads(line)
            if "rewind" in item:
                written += json.dumps(item | {"rewind": item["rewind"] + shift}).encode() + b"\n"
                continue
            last = item
        for step in range(entry["step"] + 1, entry["step"] + lines + 1):
            written += json.dumps(last | {"step": step}).encode() + b"\n"
        shift += lines - 5
    starts[-1]["step"] = step
    (run / "metrics.jsonl").write_bytes(written)
    (run / "starts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in starts))


def read_ends(folder: Path) -> int:
    return sum(run.goodput is not None for run in (overview(found, time.time()) for found in run_directories(folder)))


def read_whole(folder: Path) -> int:
    return sum(read_record(found).history.step is not None for found in run_directories(folder))


def seconds(side, folder: Path, expected: int) -> float:
    begun = time.perf_counter()
    if side(folder) != expected:
        raise SystemExit(f"{side.__name__} does not find {expected} runs")
    return time.perf_counter() - begun


def bytes_read(folder: Path) -> tuple[int, int]:
    """Bytes that reading the ends of one run's metrics takes, and bytes of the metrics."""
    run = run_directories(folder)[0]
    read, pread = [0], os.pread

    def counted(handle: int, count: int, at: int) -> bytes:
        found = pread(handle, count, at)
        read[0] += len(found)
        return found

    os.pread = counted
    try:
        overview(run, time.time())
    finally:
        os.pread = pread
    return read[0], (run / "metrics.jsonl").stat().st_size


def processor_seconds() -> float:
    """Returns the CPU time of child processes that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--whole", type=int, default=10, help="runs that the other side reads")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    count, rounds, some = (20, 1, 2) if given.smoke else (given.runs, given.rounds, given.whole)
    with tempfile.TemporaryDirectory() as place:
        folder, few = Path(place) / "runs", Path(place) / "few"
        one = train(Path(place))
        lengthen(one, 20 if given.smoke else given.lines)
        shutil.rmtree(one / "data", ignore_errors=True)
        for checkpoint in (one / "checkpoints").glob("step-*"):
            shutil.rmtree(checkpoint)
        for number in range(count):
            shutil.copytree(one, folder / f"{number:05d}", copy_function=os.link)
        for number in range(some):
            (few / f"{number:05d}").parent.mkdir(exist_ok=True)
            (few / f"{number:05d}").symlink_to(folder / f"{number:05d}")
        ends, whole, command, busy = [], [], [], []
        for _ in range(rounds):
            ends.append(seconds(read_ends, folder, count))
            whole.append(seconds(read_whole, few, some) / some)
            begun, used = time.perf_counter(), processor_seconds()
            said = subprocess.run([*COMMAND, "runs", str(folder), "--json"], capture_output=True, text=True, check=True)
            command.append(time.perf_counter() - begun)
            busy.append(processor_seconds() - used)
            if len(json.loads(said.stdout)) != count:
                raise SystemExit("the command does not list all runs")
        read, size = bytes_read(folder)
    ratios = sorted(one * count / other for one, other in zip(whole, ends, strict=True))
    print(f"{count} runs of {size / 1e6:.2f} MB of metrics each, two starts: {read / 1e3:.1f} kB of each are read")
    print(
        f"reading the ends {statistics.median(ends):.3f} s; the whole command {statistics.median(command):.3f} s, "
        f"{statistics.median(busy):.3f} s of CPU time"
    )
    print(f"reading whole files over reading the ends: {statistics.median(ratios):.0f} ({ratios[0]:.0f} to {ratios[-1]:.0f})")


if __name__ == "__main__":
    main()
