"""`ckpt prune DIR --last 3 --every 1000`: removes the checkpoints that no rule keeps."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from forge_ckpt.commands.arguments import AsJson, Directory, Foreign, opened, refuse
from forge_core.errors import CheckpointError, ForgeError

if TYPE_CHECKING:
    from forge_ckpt.saving.locate import AnyStore
    from forge_ckpt.store.fence import Owner
    from forge_ckpt.store.policy import RetentionDecision


def prune(
    directory: Directory,
    last: Annotated[int | None, typer.Option(min=1, help="Keep so many of the newest steps. Default: 1.")] = None,
    every: Annotated[int, typer.Option(min=0, help="Keep steps that this number divides.")] = 0,
    log_spaced: Annotated[
        int | None, typer.Option(metavar="START", min=0, help="Keep the first from START, and from 1, 2, 4, ... steps after it.")
    ] = None,
    hours: Annotated[float, typer.Option(min=0.0, help="Keep the first of each so many hours of training.")] = 0.0,
    spare: Annotated[list[int] | None, typer.Option(metavar="STEP", help="Keep this step; may be given several times.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them. Without it, they are only listed.")] = False,
    ended: Annotated[bool, typer.Option("--ended", help="The job that wrote here on another host has ended.")] = False,
    as_json: AsJson = False,
    foreign: Foreign = False,
) -> None:
    """List the checkpoints that no rule keeps, and remove them with --yes. What `best` and other marks name is kept.

    One is removed only if a newer one that stays was read and verified. Refused while a job writes to the directory.
    """
    from forge_ckpt.ranks.world import SingleProcessWorld
    from forge_ckpt.store.marks import marked
    from forge_ckpt.store.policy import RetentionPolicy
    from forge_ckpt.store.retention import judged, retain, sweep

    if last is None and not every and log_spaced is None and not hours:
        refuse(CheckpointError("no rule says what stays; give --last, --every, --log-spaced or --hours"))
    store, only = opened(directory, foreign)
    if only is not None:
        refuse(CheckpointError(f"{directory} is one checkpoint; give the directory that holds it, {store.root}"))
    policy = RetentionPolicy(last or 1, every, log_spaced, hours)
    try:
        steps = {name: mark for mark, name in marked(store).items()}
        verdicts = judged(store, policy)
        named = {verdict.entry.step: f"mark {steps[verdict.entry.name]}" for verdict in verdicts if verdict.entry.name in steps}
        spared = dict.fromkeys(spare or (), "spared") | named
        verdicts = judged(store, policy, spared)
        removed: list[str] = []
        if yes:
            may = _guard(store, ended)
            sweep(store)
            removed = retain(store, SingleProcessWorld(), policy, spared, may)
    except ForgeError as cause:
        refuse(cause)
    except OSError as cause:
        refuse(CheckpointError(f"{store.root} cannot be read: {cause}"))
    left = [verdict.entry.name for verdict in verdicts if not verdict.kept_by and verdict.entry.name not in removed]
    if as_json:
        typer.echo(json.dumps([_row(verdict, removed) for verdict in verdicts], indent=2))
    else:
        _say(store, verdicts, removed, yes)
    if yes and left:
        raise typer.Exit(1)


def _guard(store: "AnyStore", ended: bool) -> Callable[[], None]:
    """What is asked before each removal, and once now.

    Raises:
        CheckpointError: a job may be writing to the store, or has begun to since.
    """
    from forge_ckpt.store.fence import Owner

    owner = Owner.of(store)
    if owner is not None and not _gone(owner, ended):
        raise CheckpointError(
            f"process {owner.process} on {owner.host} writes to {store.root}; it removes old checkpoints itself, as "
            "[checkpoint] says. Stop it first"
            + ("" if owner.has_ended() is not None else f", or pass --ended once that job on {owner.host} has ended")
        )

    def may() -> None:
        if Owner.of(store) != owner:
            raise CheckpointError(f"a job has started in {store.root}; nothing more is removed")

    return may


def _gone(owner: "Owner", ended: bool) -> bool:
    gone = owner.has_ended()
    return ended if gone is None else gone


def _row(verdict: "RetentionDecision", removed: list[str]) -> dict[str, object]:
    return {
        "name": verdict.entry.name,
        "step": verdict.entry.step,
        "kept_by": list(verdict.kept_by),
        "reason": None if verdict.kept_by else verdict.why,
        "removed": verdict.entry.name in removed,
    }


def _say(store: "AnyStore", verdicts: "list[RetentionDecision]", removed: list[str], yes: bool) -> None:
    if not verdicts:
        typer.echo(f"no checkpoints in {store.root}")
    for verdict in verdicts:
        going = "removed" if verdict.entry.name in removed else "stays" if yes else "goes"
        if verdict.kept_by:
            typer.echo(f"{verdict.entry.name:<24} stays    {', '.join(verdict.kept_by)}")
        else:
            held = "; but no newer one that stays could be verified" if going == "stays" else ""
            typer.echo(f"{verdict.entry.name:<24} {going:<8} {verdict.why}{held}")
    if not yes and not all(verdict.kept_by for verdict in verdicts):
        typer.echo("nothing was removed; pass --yes to remove what goes")
