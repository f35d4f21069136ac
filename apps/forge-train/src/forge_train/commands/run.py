"""`forge-train run RECIPE`: train, or go on training."""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from forge_train.completion import Recipe

if TYPE_CHECKING:
    import torch

    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_parallel.launcher import Launch
    from forge_train.agreement import Agreement
    from forge_train.logs import RunLog
    from forge_train.recipe import Resolved
    from forge_train.run import Run

REQUEUE = 75
"""Exit code of a run that was asked to stop and saved: EX_TEMPFAIL, "try again later"."""


def run(
    context: typer.Context,
    recipe: Recipe,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; the run before is moved aside until this one has saved.")
    ] = False,
) -> None:
    """Train a recipe; started again, it resumes. Any key can be set: --optimizer.lr=1e-3

    Alone, under torchrun or under srun. The run lives in runs/<job.name> (or --job.dir=PATH): resolved recipe, numbers,
    logs of every rank, checkpoints and report.html. A start that is refused changes nothing there.
    """
    from forge_parallel.launcher import launch
    from forge_train.logs import logging_of

    where = launch(os.environ)
    with logging_of(where.rank, where.size) as log:
        code = start(recipe, context.args, fresh, where, log)
    sys.stdout.flush()
    sys.stderr.flush()
    if where.size > 1:
        # A worker of a process group may abort while the interpreter shuts down, which would hide the real exit code.
        os._exit(code)
    raise typer.Exit(code)


def start(recipe: str, overrides: Sequence[str], fresh: bool, where: "Launch", log: "RunLog") -> int:
    """Resolves a recipe and trains it; the exit code of this rank. What ranks refuse before they train, rank 0 says."""
    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_train.agreement import Agreement, Refused
    from forge_train.recipe import load

    registry, ranks = Registry(), Agreement()
    resolved, unread = None, None
    try:
        try:
            resolved = load(recipe, overrides, where.size, registry, here=True)
        except Exception as cause:
            if where.size == 1:  # no other rank has to learn of it, and torch need not be imported
                raise
            unread = cause
        from forge_parallel import bootstrap
        from forge_parallel.components.sections import Parallel

        timeout = (resolved.job.parallel if resolved else Parallel()).timeout
        device = bootstrap.start(where, timeout)
        if where.size > 1:
            ranks = Agreement.of_group(timeout)
        with ranks.together("the recipe"):
            if unread is not None:
                raise unread
        assert resolved is not None, "a recipe that is not refused is resolved"
        return _train(resolved, fresh, where, device, registry, ranks, log)
    except Refused as refusal:
        if where.rank == 0:
            _say(refusal, log)
        ranks.said()
        return refusal.exit_code
    except ForgeError as refusal:
        _say(refusal, log)
        return refusal.exit_code
    except Exception:  # noqa: BLE001 (the last stop before the process ends: the cause must be on paper)
        log.logger.critical("%s", traceback.format_exc())
        return 1


def _train(
    resolved: "Resolved",
    fresh: bool,
    where: "Launch",
    device: "torch.device",
    registry: "Registry",
    ranks: "Agreement",
    log: "RunLog",
) -> int:
    """Exit code of the run on this rank."""
    from rich.console import Console

    from forge_parallel import bootstrap
    from forge_train.assemble import assemble
    from forge_train.directory import run_directory
    from forge_train.loop import fit
    from forge_train.stop import STOPPED

    console, directory = Console() if where.rank == 0 else None, run_directory(resolved.job)
    run = assemble(
        resolved, directory, where, device, registry, console, fresh=fresh, ranks=ranks, begin=lambda: log.open(directory)
    )
    try:
        with run.stop.listening():
            reason = fit(run)
    finally:
        for tracker in run.trackers:
            tracker.close()  # also after a failure: what was written last says most about it
    if console is not None:
        _conclude(run, resolved, reason)
    bootstrap.stop()
    return REQUEUE if reason == STOPPED else 0


def _say(refusal: "ForgeError", log: "RunLog") -> None:
    """Into the log once there is one; before, a run has only the terminal."""
    from forge_core.console import Console

    if log.is_open:
        log.logger.error("%s", refusal)
    else:
        Console().error(refusal)


def _conclude(run: "Run", resolved: "Resolved", reason: str) -> None:
    """Writes the report."""
    from forge_train.summary import write

    report = write(run, resolved, reason, list(resolved.warnings))
    assert run.console is not None
    run.console.print(f"{reason} after step {run.state.step}; report: {report}", highlight=False, soft_wrap=True)
