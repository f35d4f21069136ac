"""`forge-train report RUN_DIR`: writes the page of a run again."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run, such as runs/demo.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rewrite report.html of a run from its metrics, also while the run goes on."""
    from forge_core.terminal.console import Console
    from forge_train.report.write import rewrite_report

    path = rewrite_report(run_dir)
    console = Console(as_json=as_json)
    if as_json:
        console.document({"report": str(path), "bytes": path.stat().st_size})
    console.text(f"wrote {path}")
