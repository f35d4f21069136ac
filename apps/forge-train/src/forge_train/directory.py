"""The directory of a run, `runs/<name>/`: its files, and how a start probes it, takes it over, or moves earlier files aside.

A start only reads until it takes the directory over, when nothing is left that could refuse. It then takes the store of
checkpoints first, so that an older job of the same directory saves and logs nothing more, and the files of the two do not mix.
Only prepared data is written earlier: its name depends on its content, and it appears by a rename.
"""

import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.store.objects import is_url
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import ForgeError
from forge_core.protocols.checkpoint import Store
from forge_core.redaction import redacted_text
from forge_train.process.progress import NO_PROGRESS_FILE, RESTARTS_FILE
from forge_train.recipe.schema import Job

_log = logging.getLogger(__name__)

RECIPE = "config.toml"
"""The resolved recipe; its presence marks a directory as a run's."""

CHECKPOINTS = "checkpoints"

ROUTING = "routing.json"
"""Loads at the newest look: {"step": ..., "layers": {"blocks.3": [load of each expert / mean load]}}."""

SIMILARITY = "similarity.json"
"""How alike layers are at the newest look of hook `inside`; see `forge_train.report.page`."""

SAMPLES = "samples.json"
"""The newest texts that hook `sample` generated."""

ANSWERS = "answers.json"
"""The newest answers that hook `answers` was given, with their pictures."""

MICRO_BATCH = "micro-batch.json"
"""The micro-batch that fits, and that of the recipe which did not; see `forge_train.run.micro_batch`."""

INSIDE = "inside"
"""What hook `inside` compares with: products of activations at the first look and at later ones."""

OWNED = (
    *(CHECKPOINTS, "logs", "metrics.jsonl", "report.html", "report.json", ROUTING, SIMILARITY, SAMPLES, ANSWERS, "tensorboard"),
    *(INSIDE, "profiles", "wandb", "wandb-id", RESTARTS_FILE, NO_PROGRESS_FILE, MICRO_BATCH),
)
"""What `--fresh` moves aside. Prepared data stays: it depends on its inputs only and is checked against them."""

_PREVIOUS = re.compile(r"previous-[1-9]\d*")


def run_directory(job: Job) -> Path:
    """`job.dir`, or `runs/<job.name>` below the working directory."""
    return Path(job.job.dir) if job.job.dir else Path("runs") / job.job.name


def claim(directory: Path) -> None:
    """Makes the directory and shows that it can be written.

    Raises:
        ForgeError: it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as cause:
        raise ForgeError(
            f"the run's directory {directory} cannot be written: {cause.strerror}; choose another one with --job.dir=PATH"
        ) from cause


def probe(directory: Path, fresh: bool) -> None:
    """Shows that the directory can be claimed, and leaves nothing behind.

    Raises:
        ForgeError: as `claim`; or `fresh` would move files of a directory that is not a run's.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        claim(directory)
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
    held = _held(directory)
    if fresh and held and not (directory / RECIPE).is_file():
        raise ForgeError(f"--fresh: {directory} has {held[0].name} but no {RECIPE}, so it is not a run; nothing was moved")


def move_aside(directory: Path) -> Path | None:
    """Moves what a run has made to a new `previous-N` inside of its directory, which is a run's directory itself then.

    Raises:
        ForgeError: something cannot be moved; names where the rest is.
    """
    held = [*_held(directory), *(path for path in [directory / RECIPE] if path.exists())]
    if not held:
        return None
    target = directory / f"previous-{max((_number(path) for path in previous(directory)), default=0) + 1}"
    try:
        target.mkdir()
        for path in held:
            path.rename(target / path.name)
    except OSError as cause:
        raise ForgeError(
            f"--fresh: the files of {directory} cannot be moved to {target}: {cause.strerror}; move the files in {target} back"
        ) from cause
    return target


def previous(directory: Path) -> list[Path]:
    """What starts with --fresh moved aside, oldest first."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted((path for path in found if _PREVIOUS.fullmatch(path.name) and path.is_dir()), key=_number)


def forget_previous(directory: Path) -> None:
    """Removes what was moved aside: the new run has saved.

    Raises:
        OSError: it cannot be removed.
    """
    for path in previous(directory):
        shutil.rmtree(path)


def keep_recipe(directory: Path, recipe: str) -> None:
    """Writes the resolved recipe, whole, since it can be run again. Only its owner may read one that holds secrets."""
    path = directory / RECIPE
    private = redacted_text(recipe) != recipe
    path.touch(mode=0o600 if private else 0o666)
    if private:
        path.chmod(0o600)  # it may be of an earlier start
    path.write_text(recipe, encoding="utf-8")


def _held(directory: Path) -> list[Path]:
    return [directory / name for name in OWNED if (directory / name).exists() or (directory / name).is_symlink()]


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


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
