"""`forge-train run RECIPE`: trains, or resumes training."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge_train.commands.options import RecipePath

if TYPE_CHECKING:
    from forge_parallel.launch.environment import Launch
    from forge_train.process.logs import RunLog
    from forge_train.process.ranks import JobRanks
    from forge_train.process.stop import Signals
    from forge_train.recipe.load import Recipe
    from forge_train.run.run import Run


def run(
    context: typer.Context,
    recipe: RecipePath,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; the earlier run is kept until the new run saves a checkpoint.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine, without another launcher.")] = 1,
    restarts: Annotated[int, typer.Option(min=0, help="How often to restart failed ranks, from the newest checkpoint.")] = 0,
    min_processes: Annotated[
        int | None,
        typer.Option(min=1, help="After failures of one device, continue with fewer ranks, but at least this many."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document about the run when it ends, and all else on standard error.")
    ] = False,
) -> None:
    """Train a recipe; started again, it resumes. Any key can be set: --optimizer.lr=1e-3

    Runs as one process, under torchrun or under srun. The directory runs/<job.name> (or --job.dir=PATH) has the resolved
    recipe, metrics, logs of every rank, checkpoints and report.html. A start that is refused does not change it.
    """
    from forge_parallel.launch.environment import read_launcher

    where, supervises = read_launcher(os.environ), processes > 1 or restarts > 0 or min_processes is not None

    def start(say: "Say | None") -> int:
        if not supervises:
            return _run_rank(recipe, context.args, fresh, where)
        from forge_train.process.restarts import supervised

        return supervised(recipe, context.args, fresh, processes, restarts, min_processes, say=say)

    world = processes if supervises else where.size
    code = run_as_document(recipe, context.args, world, start, where) if as_json else start(None)
    sys.stdout.flush()
    sys.stderr.flush()
    if where.size > 1:
        # A worker of a process group may abort while the interpreter shuts down, which would hide the real exit code.
        os._exit(code)
    raise typer.Exit(code)


Say = Callable[[str], object]
"""Prints a line for people."""


def run_as_document(recipe: str, overrides: Sequence[str], world: int, start: Callable[[Say], int], where: "Launch") -> int:
    """Starts a run with all output on standard error, prints one JSON document on standard output, and returns the exit code.

    The document is the run as `runs --json` shows it, with its exit code, the message of a failure, and its report. Rank 0 prints
    it.

    Args:
        recipe: recipe of the run.
        overrides: keys of the command line.
        world: number of ranks.
        start: starts the run and returns its exit code; gets a function that reports failures and restarts.
        where: this process among the ranks of another launcher.

    Raises:
        ForgeError: the recipe is refused, and no other rank waits for this one.
    """
    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_core.terminal import Console, failure, kept_for_document
    from forge_train.directory import run_directory
    from forge_train.process.restarts import ERROR_FILE, cause_of_end
    from forge_train.recipe.load import load_recipe
    from forge_train.report.page import REPORT
    from forge_train.runs.overview import overview

    directory, refused = Path(), None
    try:
        directory = run_directory(load_recipe(recipe, overrides, world, Registry(), here=True).job)
    except ForgeError as refusal:
        if where.size == 1:
            raise
        refused = failure(refusal)  # the other ranks wait for this one, and all are refused together
    messages: list[str] = []

    def say(line: str) -> None:
        messages.append(line)
        print(line, file=sys.stderr)

    with kept_for_document(), tempfile.TemporaryDirectory(prefix="forge-run-") as folder:
        file = os.environ.setdefault(ERROR_FILE, f"{folder}/error")
        code = start(say)
        messages += filter(None, [cause_of_end(Path(file))])
    if where.rank == 0:
        report = directory / REPORT
        ended = {"exit_code": code, "message": messages[-1] if code and messages else None}
        ended["report"] = str(report) if report.is_file() else None
        Console(as_json=True).document(refused or overview(directory, time.time()).as_json() | ended)
    return code


def _run_rank(recipe: str, overrides: Sequence[str], fresh: bool, where: "Launch") -> int:
    from forge_train.process.logs import logging_of
    from forge_train.process.stop import Signals

    signals = Signals()
    with signals.listening(), logging_of(where.rank, where.size) as log:
        return run_recipe(recipe, overrides, fresh, where, log, signals)


def run_recipe(
    recipe: str, overrides: Sequence[str], fresh: bool, where: "Launch", log: "RunLog", signals: "Signals | None" = None
) -> int:
    """Reads a recipe, trains it, and returns the exit code of this rank. Rank 0 prints refusals of any rank before training."""
    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_train.process.stop import Signals
    from forge_train.recipe.load import load_recipe

    registry, signals = Registry(), signals or Signals()
    resolved, unread = None, None
    try:
        resolved = load_recipe(recipe, overrides, where.size, registry, here=True)
    except Exception as cause:  # noqa: BLE001 (the other ranks must be informed of any error)
        if where.size == 1 and isinstance(cause, ForgeError):  # no other ranks, so torch is not needed
            log.say(cause)
            return cause.exit_code
        unread = cause

    from forge_parallel.launch import process_group
    from forge_parallel.launch.meeting import RanksDiffer
    from forge_parallel.launch.watch import Watch
    from forge_parallel.sections import Parallel
    from forge_train.directory import run_directory
    from forge_train.process.ranks import JobRanks, Refused, StartAgreement, conclude, content_of, tell_launcher

    ranks = JobRanks(where, signals=signals, log=log)
    try:
        parallel = resolved.job.parallel if resolved else Parallel()
        ranks.device = process_group.init_process_groups(
            where,
            parallel.timeout,
            parallel.patience,
            hurry=lambda: bool(signals.asked),
            content=lambda: content_of(resolved, registry) if resolved else {},
            run=run_directory(resolved.job).name if resolved else "",
        )
        ranks.watch = Watch.open(where, parallel.patience, parallel.timeout)
        if where.size > 1:
            ranks.agreement = StartAgreement.of_group(parallel.timeout)
        with ranks.together("the recipe"):
            if unread is not None:
                raise unread
        assert resolved is not None, "a recipe that is not refused is resolved"
        return _train(resolved, ranks, fresh)
    except (Refused, RanksDiffer) as refusal:
        if where.rank == 0:
            log.say(refusal)
        ranks.watch.stop()  # all ranks end now, so the end of this rank is not a failure
        ranks.agreement.said()
        tell_launcher(str(refusal), refusal.exit_code, follows=where.rank > 0)
        return refusal.exit_code
    except BaseException as error:  # noqa: BLE001 (last chance to record the cause before the process ends)
        return conclude(error, ranks.watch, log.say)


def _train(recipe: "Recipe", ranks: "JobRanks", fresh: bool) -> int:
    """Trains a recipe and returns the exit code of this rank."""
    from rich.console import Console

    from forge_parallel.launch import process_group
    from forge_train.process.ranks import tell_launcher
    from forge_train.process.stop import REQUEUE, STOPPED
    from forge_train.run.loop import train

    if ranks.launch.rank == 0:
        ranks.console = Console()
    run, reason = train(recipe, ranks, fresh=fresh)
    run.saves.close()
    ranks.watch.stop()
    if ranks.console is not None:
        _conclude(run, recipe, reason)
    process_group.destroy_process_groups()
    if reason != STOPPED:
        if code := run.calls.exit_code:
            failed = ", ".join(sorted({*run.calls.off, *run.calls.failed_last}))
            tell_launcher(f"{reason} after step {run.state.step}; these hooks failed: {failed}", code)
        return code
    saved = "without enough time to save a checkpoint" if run.saves.left_out else "and saved a checkpoint"
    tell_launcher(f"{reason} after step {run.state.step}, {saved}; start the same command again to resume", REQUEUE)
    return REQUEUE


def _conclude(run: "Run", recipe: "Recipe", reason: str) -> None:
    """Writes the report and prints its path."""
    from forge_train.report.page import write_run_report

    report = write_run_report(run, recipe, reason, list(recipe.warnings))
    assert run.console is not None
    run.console.print(f"{reason} after step {run.state.step}; report: {report}", highlight=False, soft_wrap=True)
