"""The one moment at which a start changes something: everything that could refuse it has not.

The store is taken first. From then on an older job of the directory saves and logs nothing more, so that nothing of it is mixed
with what follows.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.store.objects import is_url
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import ForgeError
from forge_core.protocols.checkpoint import Store
from forge_train.recipe.schema import Job
from forge_train.run.directory import claim, forget_previous, move_aside, previous

_log = logging.getLogger(__name__)


def refuse_fresh(job: Job, fresh: bool) -> None:
    """Raises a ForgeError when a start over is asked for and forbidden."""
    if fresh and job.checkpoint.resume == "require":
        raise ForgeError("--fresh conflicts with checkpoint.resume = 'require'; remove one of them")


def prepare_directory(directory: Path, store: Store, fresh: bool, say: Callable[[str], None]) -> None:
    """Makes the directory; with `fresh`, ends an older job and moves what is there aside. On rank 0.

    Raises:
        ForgeError: the directory or the store cannot be written, or `fresh` would leave checkpoints where they are.
    """
    claim(directory)
    if not fresh:
        return
    if store.list():
        if place := elsewhere(store):
            raise ForgeError(
                f"--fresh moves the files of a run's directory aside, and {place} has checkpoints that it cannot move: "
                "give the run another job.name, or remove them"
            )
        Fence.take(store, SingleProcessWorld())
    if moved := move_aside(directory):
        say(
            f"starting over: the previous run was moved to {moved}. It is removed after this run's first checkpoint; "
            f"to keep it, move that directory. To resume it: --job.dir={moved}"
        )


def elsewhere(store: Store) -> str:
    """The URL of a store that is not in the run's directory; empty for one that is there."""
    root = getattr(store, "root", "")
    return str(root) if is_url(root) else ""


def remind(directory: Path, say: Callable[[str], None]) -> None:
    """Says what an earlier `--fresh` moved aside, when no checkpoint has followed since."""
    if moved := previous(directory):
        say(
            f"no checkpoint was saved since the start with --fresh. The previous run is in {moved[0]} and is removed after this "
            f"run's first checkpoint; to resume it, move that directory and pass it as --job.dir"
        )


def forget(directory: Path) -> None:
    """Removes what `--fresh` moved aside, now that the new run has saved; a fault there is a warning."""
    try:
        forget_previous(directory)
    except OSError as cause:
        _log.warning("the previous run that --fresh moved could not be removed: %s", cause)
