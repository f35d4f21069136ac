"""`forge-train run RECIPE`: train, or go on training."""

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge_train.completion import Recipe

if TYPE_CHECKING:
    from forge_core.registry import Registry
    from forge_parallel.launcher import Launch
    from forge_train.recipe import Resolved
    from forge_train.run import Run

REQUEUE = 75
"""Exit code of a run that was asked to stop and saved: EX_TEMPFAIL, "try again later"."""


def run(
    context: typer.Context,
    recipe: Recipe,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: remove this run's checkpoints and numbers first.")] = False,
) -> None:
    """Train a recipe; started again, it resumes. Any key can be set: --optimizer.lr=1e-3

    Alone, under torchrun or under srun. The run lives in runs/<job.name> (or --job.dir=PATH): resolved recipe, numbers,
    logs of every rank, checkpoints and report.html.
    """
    from forge_core.registry import Registry
    from forge_parallel.launcher import launch
    from forge_train.directory import claim, keep_recipe, run_directory
    from forge_train.recipe import load

    registry = Registry()
    where = launch(os.environ)
    resolved = load(recipe, context.args, where.size, registry)
    directory = run_directory(resolved.job)
    if where.rank == 0:
        claim(directory, fresh)
        keep_recipe(directory, resolved.as_toml())
    code = _train(resolved, directory, where, registry)
    sys.stdout.flush()
    sys.stderr.flush()
    if where.size > 1:
        # A worker of a process group may abort while the interpreter shuts down, which would hide the real exit code.
        os._exit(code)
    raise typer.Exit(code)


def _train(resolved: "Resolved", directory: Path, where: "Launch", registry: "Registry") -> int:
    """Exit code of the run on this rank."""
    from rich.console import Console

    from forge_core.errors import ForgeError
    from forge_parallel import bootstrap
    from forge_train.assemble import assemble
    from forge_train.logs import logging_to
    from forge_train.loop import fit
    from forge_train.stop import STOPPED

    console = Console() if where.rank == 0 else None
    with logging_to(directory, where.rank, where.size) as log:
        try:
            device = bootstrap.start(where, resolved.job.parallel.timeout)
            run = assemble(resolved, directory, where, device, registry, console)
            try:
                with run.stop.listening():
                    reason = fit(run)
            finally:
                for tracker in run.trackers:
                    tracker.close()  # also after a failure: what was written last says most about it
            if console is not None:
                _conclude(run, resolved, reason)
            bootstrap.stop()
        except ForgeError as refusal:
            log.error("%s", refusal)
            return refusal.exit_code
        except Exception:  # noqa: BLE001 (the last stop before the process ends: the cause must be on paper)
            log.critical("%s", traceback.format_exc())
            return 1
    return REQUEUE if reason == STOPPED else 0


def _conclude(run: "Run", resolved: "Resolved", reason: str) -> None:
    """Writes the report."""
    from forge_train.summary import write

    report = write(run, resolved, reason, list(resolved.warnings))
    assert run.console is not None
    run.console.print(f"{reason} after step {run.state.step}; report: {report}", highlight=False, soft_wrap=True)
