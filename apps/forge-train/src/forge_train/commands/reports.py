"""`forge-train report|profile RUN`: shows what a run has recorded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge_core.errors import ForgeError, UnknownComponent
from forge_core.registry import Registry
from forge_core.terminal import Console

if TYPE_CHECKING:
    from forge_train.profiling.summary import Summary


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, or folders of runs: runs/demo runs/other.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="File of the page. Default: report.html in RUN, or here for several runs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write an offline page about a run, finished or not, or a page that compares several runs.

    Comparing runs needs the package forge-lab, which has the command `forge-train compare`.

    The page has curves to zoom into, throughput, memory, data, experts, samples, faults and restarts,
    machine and versions. It is a single file that needs no network.
    """
    from forge_train.report.page import directories_of
    from forge_train.report.page import report as write

    if (several := len(directories_of(runs))) > 1:
        try:
            compare = Registry().load("forge.commands", "compare")
        except UnknownComponent as cause:
            raise ForgeError(f"a page about {several} runs needs the command compare: {cause}") from cause
        compare(runs, out, as_json)
        return
    path = write(runs, out)
    console = Console(as_json=as_json)
    if as_json:
        console.document({"report": str(path), "bytes": path.stat().st_size})
    console.text(f"wrote {path}")


def card(
    run: Annotated[str, typer.Argument(help="A run's directory, or one of its checkpoints.", metavar="RUN")],
    out: Annotated[
        Path | None, typer.Option("--out", help="File of the card. Default: README.md in the run's directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the model card of a run: sizes, data, evaluation, versions and recipe of a checkpoint, the newest by default.

    A card that somebody has edited, or another file of that name, is never replaced. `convert --to hf` writes the same into the
    folder. License, intended use and limits are left to the publisher.
    """
    from forge_ckpt.checkpoint.locate import locate
    from forge_core.registry import Registry
    from forge_train.formats.forge import ForgeWeights
    from forge_train.report.card import card_of_run, write_card

    weights = ForgeWeights(locate(run), Registry())  # of an adapter without its base
    if out is not None:
        path = out
    elif weights.facts.run is not None:
        path = weights.facts.run / "README.md"
    else:
        raise ForgeError(f"{run} is a checkpoint without the directory of its run; name the file of the card with --out")
    write_card(path, card_of_run(weights, run))
    console = Console(as_json=as_json)
    if as_json:
        console.document({"card": str(path), "step": weights.facts.step})
    console.text(f"wrote {path}, of step {weights.facts.step}")


def profile(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Directory of a run, such as runs/demo; or a folder of traces, or one trace.", show_default=False
        ),
    ],
    step: Annotated[int | None, typer.Option("--step", help="First step of a window. Default: the newest window.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Rank whose kernels to list. Default: the first rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, in nanoseconds, with every kernel.")] = False,
) -> None:
    """Show where the time of profiled steps went, with each instant in exactly one class.

    The classes are compute, communication overlapped by compute, exposed communication, memory and idle; they sum to the
    window on each rank. Then follow exposed collectives with the kernels that waited for them, kernels, named ranges, and
    waits of the host.

    Record a profile with [[hooks]] name = "profile" at = [100]; any trace of torch.profiler works, too. On a GPU, kernels
    are analyzed; on a CPU, the operators of its threads. The traces also open in ui.perfetto.dev.
    """
    from forge_train.profiling.summary import spreads, summarize, waited_for_others
    from forge_train.profiling.trace import chosen_traces, traces_of

    paths = chosen_traces(path, step)
    ranks = {number: summarize(trace) for number, trace in traces_of(paths).items()}
    shown = min(ranks) if rank is None else rank
    if shown not in ranks:
        raise ForgeError(f"--rank {shown} has no trace; choose one of the ranks {', '.join(map(str, ranks))}")
    console = Console(as_json=as_json)
    if as_json:
        console.document(
            {
                "ranks": {str(number): one.as_json() for number, one in ranks.items()},
                "over_ranks": [asdict(row) for row in spreads(ranks)],
                "waited_for_others": waited_for_others(ranks),
            }
        )
    draw(ranks, shown, console)


SHOWN = 12
"""Maximum number of rows of a table; `--json` has all rows."""
RANKS = 16
"""Maximum number of ranks in a table."""
_WIDTH = 72

MEANING = (
    "compute: computing without communication; overlapped: both at once; exposed: communication alone; "
    "memory: copies and fills alone; idle: nothing. They sum to the window."
)
_ON_THREADS = "On a CPU, idle is time in Python and in operators that only call other operators."


def draw(ranks: "Mapping[int, Summary]", shown: int, out: Console) -> None:
    """Prints the time classes of all ranks, and the details of rank `shown`."""
    from forge_train.profiling.classes import CLASSES, has_parts
    from forge_train.profiling.summary import waited_for_others

    one = ranks[shown]
    where = "on the device" if one.device else "on the threads of the CPU, by operator"
    steps = one.about.get("steps")
    window = f"{_steps(one)}, " if steps else ""
    out.text(f"{window}{_milliseconds(one.window)} ms on rank {shown}, {where}")
    out.text(MEANING if one.device else f"{MEANING} {_ON_THREADS}")
    if not one.device and one.about.get("device", "cpu") != "cpu":
        out.text(f"The trace has no kernels of the {one.about['device']} device; host times are shown: is its profiler missing?")
    out.text()
    out.table(["rank", "window ms", *(f"{label} ms" for label in CLASSES), *(f"{label} %" for label in CLASSES)], _classes(ranks))
    if len(ranks) > 1:
        out.text()
        columns = ["over ranks", "mean ms", "least ms", "on rank", "most ms", "on rank "]
        out.table(columns, _spread(ranks))
        if waiting := waited_for_others(ranks):
            slowest, most = min(waiting, key=lambda rank: waiting[rank]), max(waiting.values())
            out.text(
                f"the other ranks wait for rank {slowest}: it waited only {_milliseconds(waiting[slowest])} ms in collectives, "
                f"while the longest wait of a rank is {_milliseconds(most)} ms"
            )
    sections: list[tuple[str, list[str], Iterator[Sequence[str]], int]] = [
        ("the time of a step", ["part", "ms of each", "%"], _split(one), len(one.split) if has_parts(one.split) else 0),
        ("exposed communication", ["waited for", "ran next", "times", "ms"], _exposed(one), len(one.exposed)),
        (
            "kernels" if one.device else "operators",
            ["name", "class", "count", "ms", "exposed ms"],
            _kernels(one),
            len(one.kernels),
        ),
        ("ranges", ["name", "count", "host ms", "device ms"], _annotations(one), len(one.annotations)),
        ("waits of the host", ["call", "operator", "inside", "count", "ms"], _waits(one), len(one.waits)),
    ]
    for title, columns, rows, count in sections:
        if count:
            out.text()
            more = f", {SHOWN} of {count}; --json has all" if count > SHOWN else ""
            out.text(f"{title} of rank {shown}{more}")
            out.table(columns, rows)


def _steps(one: "Summary") -> str:
    first, count = one.about.get("step", 1), one.about["steps"]
    return f"step {first}" if count == 1 else f"steps {first} to {first + count - 1}"


def _classes(ranks: "Mapping[int, Summary]") -> Iterator[Sequence[str]]:
    from forge_train.profiling.classes import CLASSES

    for rank, one in list(ranks.items())[:RANKS]:
        times = [one.classes[label] for label in CLASSES]
        shares = (f"{100 * time / one.window:.1f}" for time in times)
        yield [str(rank), _milliseconds(one.window), *map(_milliseconds, times), *shares]


def _spread(ranks: "Mapping[int, Summary]") -> Iterator[Sequence[str]]:
    from forge_train.profiling.summary import spreads

    for row in spreads(ranks):
        mean, least, most = map(_milliseconds, (row.mean, row.least, row.most))
        yield [row.label, mean, least, str(row.least_rank), most, str(row.most_rank)]


def _split(one: "Summary") -> Iterator[Sequence[str]]:
    for part, time in one.split.items():
        yield [part, _milliseconds(time / one.about.get("steps", 1)), f"{100 * time / one.window:.1f}"]


def _exposed(one: "Summary") -> Iterator[Sequence[str]]:
    for row in one.exposed[:SHOWN]:
        yield [_short(row.collective), _short(row.waits), str(row.count), _milliseconds(row.time)]


def _kernels(one: "Summary") -> Iterator[Sequence[str]]:
    for row in one.kernels[:SHOWN]:
        exposed = _milliseconds(row.exposed) if row.kind == "communication" else ""
        yield [_short(row.name), str(row.kind), str(row.count), _milliseconds(row.busy), exposed]


def _annotations(one: "Summary") -> Iterator[Sequence[str]]:
    for row in one.annotations[:SHOWN]:
        yield [_short(row.name), str(row.count), _milliseconds(row.host), _milliseconds(row.device) if row.device else ""]


def _waits(one: "Summary") -> Iterator[Sequence[str]]:
    for row in one.waits[:SHOWN]:
        yield [row.call, _short(row.operator), _short(row.inside), str(row.count), _milliseconds(row.time)]


def _short(name: str) -> str:
    return name if len(name) <= _WIDTH else name[: _WIDTH - 1] + "…"


def _milliseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:,.3f}"
