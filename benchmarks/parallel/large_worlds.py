"""Worlds of 64 to 65,536 ranks from one process: bytes, memory, modeled and planning time, start-up traffic, checkpoint metadata.

    python benchmarks/parallel/large_worlds.py [--only plan rendezvous mesh checkpoint] [--worlds 64,1024] [--draw]

Writes `large_worlds.tsv` beside this file, in which each part replaces its own rows, and with `--draw` the pictures of
docs/concepts/large-worlds.md from that table.

- plan: `forge-train plan` for two layouts of `7b`. The global batch grows with the world (weak scaling): four sequences of 8,192
  tokens for each GPU. Each plan is a process of its own, of which processor time and peak memory are recorded. Without replicas,
  worlds of more than 4,096 ranks are left out: torch makes a tensor for each rank and parameter there, which takes many minutes.
- rendezvous: calls of the store, keys and bytes of rank 0 and of another rank; see `rendezvous.py`.
- mesh: processor time to open the meshes of the layouts on one rank, without connections, and the number of its groups.
- checkpoint: the manifest of 200 tensors that all ranks, or 64 ranks of a replica, hold in equal slices; see `../ckpt/plan.py`.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".tsv")
PICTURES = Path(__file__).parents[2] / "docs" / "concepts" / "large-worlds"
WORLDS = (64, 256, 1024, 4096, 16384, 65536)
PER_GPU = 4

Row = tuple[str, str, int, str, float]
"""Part, what, ranks, quantity, value."""

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "7b, all shards": ("7b", {}),
    "7b, replicas of 64 shards": ("7b", {"parallel.dp_shard": 64, "parallel.dp_replicate": "rest"}),
    "70b, tp 8, replicas of 64 shards": ("70b", {"parallel.tp": 8, "parallel.dp_shard": 64, "parallel.dp_replicate": "rest"}),
}
"""Preset and overrides; "rest" is what the world leaves."""

PLANNED = ("7b, all shards", "7b, replicas of 64 shards")
"""Layouts that are planned; meshes of all are opened."""

CHILD = """
import resource, sys
from forge_train.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def overrides(name: str, world: int) -> list[str] | None:
    """Returns preset and overrides of a layout; None if the world is too small for it."""
    preset, keys = LAYOUTS[name]
    fixed = 1
    for value in keys.values():
        fixed *= value if isinstance(value, int) else 1
    if world % fixed or (world == fixed and "rest" in keys.values() and fixed > 64):
        return None
    sizes = {key: world // fixed if value == "rest" else value for key, value in keys.items()}
    return [preset, *(f"--{key}={value}" for key, value in sizes.items()), f"--train.global_batch={PER_GPU * world}"]


def plan(world: int) -> Iterator[Row]:
    """Plans every layout on an H100."""
    for name in PLANNED:
        arguments = overrides(name, world)
        if arguments is None or (world > 4096 and "replicas" not in name):
            continue
        command = [sys.executable, "-c", CHILD, "plan", *arguments, "--world", str(world), "--hardware", "h100", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        processor, memory = map(float, done.stderr.splitlines()[-1].split())
        document = json.loads(done.stdout)
        rank, modeled = document["ranks"][0], document["modeled"]
        for flow in rank["flows"]:
            yield "plan", name, world, f"bytes sent: {flow['axis']} {flow['kind']}", flow["wire"]
        yield "plan", name, world, "bytes sent", sum(flow["wire"] for flow in rank["flows"])
        yield "plan", name, world, "calls", sum(flow["count"] for flow in rank["flows"])
        yield "plan", name, world, "peak bytes", rank["peak"]["bytes"]
        yield "plan", name, world, "bytes between steps", rank["parameters"] + rank["optimizer"]
        yield "plan", name, world, "modeled tokens/s of a GPU", modeled["tokens_per_second_per_gpu"]
        yield "plan", name, world, "modeled seconds", modeled["step_s"]
        yield "plan", name, world, "processor seconds of plan", processor
        yield "plan", name, world, "MiB of plan", memory / 1024


def rendezvous(world: int) -> Iterator[Row]:
    """Counts calls of the store."""
    from rendezvous import rows

    for name, counts in rows(world):
        for rank, store in counts.items():
            for quantity, value in (("calls", store.total), ("keys", store.keys), ("bytes", store.bytes)):
                yield "rendezvous", name, world, f"{quantity} of {rank}", value


def mesh(world: int) -> Iterator[Row]:
    """Opens the meshes of the layouts on rank 0 in a simulated world."""
    import torch

    from forge_core.layout import Layout
    from forge_parallel.dryrun.fake_world import fake_world
    from forge_parallel.placement.topology import Topology
    from forge_train.plan import groups_of

    for name in LAYOUTS:
        arguments = overrides(name, world)
        if arguments is None:
            continue
        sizes = dict(part.removeprefix("--parallel.").split("=") for part in arguments[1:-1])
        layout = Layout.of({"dp_shard": -1, **{axis: int(size) for axis, size in sizes.items()}}, world)
        with fake_world(world, 0):
            began = time.process_time()
            _ = Topology.of(layout, torch.device("cpu")).dense
            seconds = time.process_time() - began
        groups = [group for group in groups_of(layout, 8) if group.size < world]  # a larger one is the world's
        yield "mesh", name, world, "processor seconds", seconds
        yield "mesh", name, world, "groups of a rank", 1 + len(groups)
        yield "mesh", name, world, "groups in all", 1 + sum(group.groups for group in groups)
        yield "mesh", name, world, "gloo connections of a rank", world - 1 + sum(group.size - 1 for group in groups)


def checkpoint(world: int) -> Iterator[Row]:
    """Builds and reads the manifest of 200 tensors."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "ckpt"))
    from plan import tables

    from forge_ckpt.format.codec import decode, encode
    from forge_ckpt.format.rank_files import join, pack, unpack
    from forge_core.errors import CheckpointError

    for name, holders in (("all ranks hold slices", world), ("64 ranks hold slices", 64)):
        payloads = tables(200, holders)
        empty = pack(_without_pieces(unpack(payloads[:1])[0]), False)
        payloads += [empty] * (world - holders)
        yield "checkpoint", name, world, "bytes of a rank's table", len(payloads[1])
        yield "checkpoint", name, world, "bytes sent to rank 0", sum(map(len, payloads[1:]))
        began = time.process_time()
        try:
            record = encode(join(unpack(payloads), step=1, generation="0" * 32, meta={}))
        except CheckpointError as refusal:
            print(f"{world:,} ranks, {name}: {refusal}")
            continue
        yield "checkpoint", name, world, "processor seconds to build", time.process_time() - began
        yield "checkpoint", name, world, "bytes of the manifest", len(record)
        began = time.process_time()
        manifest = decode(record)
        yield "checkpoint", name, world, "processor seconds to read", time.process_time() - began
        yield "checkpoint", name, world, "files", len(manifest.files)


def _without_pieces(table: Any) -> Any:
    """Returns the table of a rank that holds the same tensors and writes none of them."""
    from dataclasses import replace

    return replace(table, tensor=table.tensor[:0], offset=table.offset[:0], extent=table.extent[:0], checksum=b"")


PARTS = {"rendezvous": rendezvous, "mesh": mesh, "checkpoint": checkpoint, "plan": plan}


def read() -> list[Row]:
    """Reads the table; empty if there is none."""
    if not TABLE.exists():
        return []
    with TABLE.open(newline="") as file:
        rows = [*csv.reader(file, "excel-tab")][1:]
    return [(part, what, int(ranks), name, float(value)) for part, what, ranks, name, value in rows]


def write(rows: list[Row]) -> None:
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file, "excel-tab", lineterminator="\n")
        table.writerow(("part", "what", "ranks", "quantity", "value"))
        for *names, value in sorted(rows):
            table.writerow((*names, f"{value:.6g}" if value % 1 else int(value)))


CHARTS: dict[str, tuple[str, str, tuple[tuple[str, str, str], ...]]] = {
    "traffic": (
        "bytes that a rank sends in a step",
        "bytes",
        tuple(("plan", name, "bytes sent") for name in PLANNED),
    ),
    "memory": (
        "memory of a rank, peak of a step",
        "bytes",
        tuple(("plan", name, "peak bytes") for name in PLANNED),
    ),
    "speed": (
        "modeled tokens/s of a GPU, H100",
        "tokens/s",
        tuple(("plan", name, "modeled tokens/s of a GPU") for name in PLANNED),
    ),
    "planning": (
        "processor time of `forge-train plan`",
        "seconds",
        tuple(("plan", name, "processor seconds of plan") for name in PLANNED),
    ),
    "store": (
        "keys that a rank sets or reads in the store",
        "keys",
        (
            ("rendezvous", "meeting", "keys of rank 0"),
            ("rendezvous", "meeting", "keys of another"),
            ("rendezvous", "phase of the start", "keys of another"),
            ("rendezvous", "look", "keys of another"),
            ("rendezvous", "look, all have waited for 30 s", "keys of rank 0"),
            ("rendezvous", "look, all have waited for 30 s", "keys of another"),
        ),
    ),
    "checkpoint": (
        "bytes of a checkpoint's manifest, 200 tensors",
        "bytes",
        (
            ("checkpoint", "all ranks hold slices", "bytes of the manifest"),
            ("checkpoint", "64 ranks hold slices", "bytes of the manifest"),
            ("checkpoint", "all ranks hold slices", "bytes sent to rank 0"),
            ("checkpoint", "64 ranks hold slices", "bytes sent to rank 0"),
        ),
    ),
}
"""File of a picture -> title, unit, and curves as (part, what, quantity)."""


def draw(rows: list[Row]) -> None:
    """Draws the pictures over logarithmic ranks; what grows with them has a logarithmic axis, too."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    PICTURES.mkdir(exist_ok=True)
    mpl.rcParams |= {"svg.hashsalt": "forge", "svg.fonttype": "none", "font.size": 9}
    for name, (title, unit, curves) in CHARTS.items():
        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        for number, (part, what, quantity) in enumerate(curves):
            points = sorted((ranks, value) for p, w, ranks, q, value in rows if (p, w, q) == (part, what, quantity))
            label = what if part == "plan" else f"{what}: {quantity}"
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, label=label, color=f"C{number}")
        axes.set(title=title, xlabel="ranks", ylabel=unit, xscale="log")
        if curves[0][0] == "plan":
            axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
            axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 4))
        else:
            axes.set_yscale("log")
        axes.set_xticks(WORLDS, [f"{world:,}" for world in WORLDS], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7.5)
        figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--draw", action="store_true", help="draw the pictures of the table, and measure nothing")
    options = parser.parse_args()
    if options.draw:
        draw(read())
        return
    for part in options.only:
        for world in map(int, options.worlds.split(",")):
            rows = list(PARTS[part](world))
            for _, what, _, quantity, value in rows:
                print(f"{world:7,}  {what:34}  {quantity:34}  {value:,.6g}", flush=True)
            measured = {row[:3] for row in rows}
            write([row for row in read() if row[:3] not in measured] + rows)


if __name__ == "__main__":
    main()
