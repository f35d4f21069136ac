"""`forge-train profile RUN`: where the time of some steps went."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def profile(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Directory of a run, such as runs/demo; or a folder of traces, or one trace.", show_default=False
        ),
    ],
    step: Annotated[int | None, typer.Option("--step", help="First step of a window; by default the newest one.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Whose kernels to list; by default the first rank's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, in nanoseconds, with every kernel.")] = False,
) -> None:
    """Show where the time of profiled steps went: each instant in exactly one class.

    compute, communication that is overlapped by compute, communication that is exposed, memory, idle: they sum to the
    window on each rank. Then, what was waited for and what ran next, kernels, named ranges, and waits of the host.

    Make a profile with [[hooks]] name = "profile" at = [100], or any trace of torch.profiler. A GPU is read by its
    kernels, a CPU by the operators of its threads. The traces open in ui.perfetto.dev, too.
    """
    from forge_core.errors import ForgeError
    from forge_core.terminal import Console
    from forge_train.profiling.summary import spreads, summarize, waited_for_others
    from forge_train.profiling.terminal import draw
    from forge_train.profiling.trace import chosen, traces_of

    paths = chosen(path, step)
    ranks = {number: summarize(trace) for number, trace in traces_of(paths).items()}
    shown = min(ranks) if rank is None else rank
    if shown not in ranks:
        raise ForgeError(f"--rank {shown}: there are traces of the ranks {', '.join(map(str, ranks))}")
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
