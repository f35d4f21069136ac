"""`forge-train report RUN...`: writes the page of a run again, or one page of several runs."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, or folders of runs: runs/demo runs/other.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write the page; by default report.html in the only RUN, else here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write one offline page about a run, or about several on top of each other; also while they go on.

    Curves to zoom into, what differs between the recipes, throughput, memory, data, experts, samples, faults and restarts,
    machine and versions. The page is a single file that needs no network.
    """
    from forge_core.terminal import Console
    from forge_train.report.page import report as write

    path = write(runs, out)
    console = Console(as_json=as_json)
    if as_json:
        console.document({"report": str(path), "bytes": path.stat().st_size})
    console.text(f"wrote {path}")
