"""The directory of a run, `runs/<name>/`: its files, and how a start probes it, takes it over, or moves earlier files aside.

A start writes nothing to the directory before all checks have passed, except prepared data, whose file names depend on their
content. It then takes over the checkpoint store first, so that an older job in the same directory stops saving and logging
before the new job writes files.
"""

import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from forge_core.errors import ForgeError
from forge_core.protocols.checkpoint import Store
from forge_core.redaction import redacted_text
from forge_core.registry import Entry, content_that_ran

if TYPE_CHECKING:
    from forge_train.recipe.schema import Job

_log = logging.getLogger(__name__)

RECIPE = "config.toml"
"""The resolved recipe; its presence marks a directory as a run's."""

CHECKPOINTS = "checkpoints"

ROUTING = "routing.json"
"""Expert loads at the newest measurement: {"step": ..., "layers": {"blocks.3": [load of each expert / mean load]}}."""

SIMILARITY = "similarity.json"
"""Similarity of layers at the newest measurement of hook `inside`; see `forge_train.report.page`."""

SAMPLES = "samples.json"
"""The newest texts that hook `sample` generated."""

ANSWERS = "answers.json"
"""The newest answers of the model to hook `answers`, with their images."""

MICRO_BATCH = "micro-batch.json"
"""The micro-batch that fits into memory, and that of the recipe, which does not; see `forge_train.run.micro_batch`."""

RESTARTS_FILE = "restarts.json"
"""The number of automatic restarts from the same checkpoint; see `forge_train.process.restarts`."""

PLUGIN_FILES = "plugin-files"
"""Copies of the Python files that the recipe names, as they ran: `NAME-SHA256.py` with the first 12 digits of the sha256."""

STARTS = "starts.jsonl"
"""A line for each start of the run and one for its end; see `forge_train.starts`."""

NO_PROGRESS_FILE = "no-progress.txt"
"""Why the run is not restarted automatically again."""

INSIDE = "inside"
"""Products of activations at earlier measurements, with which hook `inside` compares."""

OWNED = (
    *(CHECKPOINTS, "logs", "metrics.jsonl", "report.html", "report.json", ROUTING, SIMILARITY, SAMPLES, ANSWERS, "tensorboard"),
    *(INSIDE, "profiles", "wandb", "wandb-id", RESTARTS_FILE, STARTS, NO_PROGRESS_FILE, MICRO_BATCH),
    *(PLUGIN_FILES, "mlflow", "mlflow-id"),
)
"""Files that `--fresh` moves aside. Prepared data stays: it depends only on its inputs and is checked against them."""

_PREVIOUS = re.compile(r"previous-[1-9]\d*")


def run_directory(job: "Job") -> Path:
    """Returns `job.dir`, or `runs/<job.name>` in the working directory."""
    return Path(job.job.dir) if job.job.dir else Path("runs") / job.job.name


def claim(directory: Path) -> None:
    """Creates the directory and checks that it is writable.

    Raises:
        ForgeError: the directory cannot be created or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as cause:
        raise ForgeError(
            f"the run's directory {directory} cannot be written: {cause.strerror}; choose another directory with --job.dir=PATH"
        ) from cause


def probe(directory: Path, fresh: bool) -> None:
    """Checks that the directory can be claimed, without leaving a change.

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
    files = _owned_files(directory)
    if fresh and files and not (directory / RECIPE).is_file():
        raise ForgeError(
            f"--fresh: {directory} has {files[0].name} but no {RECIPE}, so it is not a run; nothing was moved. "
            "Choose another directory with --job.dir=PATH"
        )


def move_aside(directory: Path) -> Path | None:
    """Moves the files of a run to a new folder `previous-N` in its directory; the folder is a complete run directory.

    Raises:
        ForgeError: a file cannot be moved; the error names the folder with the files that were moved.
    """
    files = [*_owned_files(directory), *(path for path in [directory / RECIPE] if path.exists())]
    if not files:
        return None
    target = directory / f"previous-{max((_number(path) for path in previous(directory)), default=0) + 1}"
    try:
        target.mkdir()
        for path in files:
            path.rename(target / path.name)
    except OSError as cause:
        raise ForgeError(
            f"--fresh: the files of {directory} cannot be moved to {target}: {cause.strerror}; move the files in {target} back"
        ) from cause
    return target


def previous(directory: Path) -> list[Path]:
    """Returns the folders that starts with --fresh moved aside, oldest first."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted((path for path in paths if _PREVIOUS.fullmatch(path.name) and path.is_dir()), key=_number)


def forget_previous(directory: Path) -> None:
    """Removes the folders that were moved aside, after the first checkpoint of the new run.

    Raises:
        OSError: a folder cannot be removed.
    """
    for path in previous(directory):
        shutil.rmtree(path)


def keep_recipe(directory: Path, recipe: str) -> None:
    """Writes the resolved recipe, including secrets, so that it can be run again; with secrets, only the owner can read it."""
    path = directory / RECIPE
    private = redacted_text(recipe) != recipe
    path.touch(mode=0o600 if private else 0o666)
    if private:
        path.chmod(0o600)  # the file may exist from an earlier start
    path.write_text(recipe, encoding="utf-8")


def keep_plugin_files(directory: Path, entries: Iterable[Entry]) -> None:
    """Copies the plugin files of components, so that a run can go on with the code that it had; only the owner can read them."""
    for entry in entries:
        if (content := content_that_ran(entry)) is not None:
            (directory / PLUGIN_FILES).mkdir(exist_ok=True)
            stem = Path(entry.distribution).stem
            path = directory / PLUGIN_FILES / f"{stem}-{entry.version.removeprefix('sha256:')}.py"
            path.touch(mode=0o600)  # like a recipe, the code may contain a secret
            path.write_bytes(content)


def _owned_files(directory: Path) -> list[Path]:
    return [directory / name for name in OWNED if (directory / name).exists() or (directory / name).is_symlink()]


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def refuse_fresh(job: "Job", fresh: bool) -> None:
    """Raises a ForgeError if both --fresh and `checkpoint.resume = 'require'` are set."""
    if fresh and job.checkpoint.resume == "require":
        raise ForgeError("--fresh conflicts with checkpoint.resume = 'require'; remove one of them")


def prepare_directory(directory: Path, store: Store, fresh: bool, say: Callable[[str], None]) -> None:
    """Creates the directory; with `fresh`, takes over from an older job and moves its files aside. Rank 0 only.

    Raises:
        ForgeError: the directory or the store cannot be written, or `fresh` cannot move the checkpoints.
    """
    claim(directory)
    if not fresh:
        return
    if store.list():
        if place := elsewhere(store):
            raise ForgeError(
                f"--fresh moves the files of a run's directory aside, but it cannot move the checkpoints in {place}: "
                "set another job.name, or remove the checkpoints"
            )
        from forge_ckpt.checkpoint.fence import Fence
        from forge_ckpt.world import SingleProcessWorld

        Fence.take(store, SingleProcessWorld())
    if moved := move_aside(directory):
        say(
            f"starting over: the previous run was moved to {moved}. It is removed after this run's first checkpoint; "
            f"to keep it, move that directory. To resume it: --job.dir={moved}"
        )


def elsewhere(store: Store) -> str:
    """Returns the URL of a remote store; empty if the store is in the run's directory."""
    from forge_ckpt.store.objects import is_url  # on use: hooks import this module for names of files

    root = getattr(store, "root", "")
    return str(root) if is_url(root) else ""


def remind(directory: Path, say: Callable[[str], None]) -> None:
    """Reports the run that an earlier `--fresh` moved aside, if no checkpoint was saved since."""
    if moved := previous(directory):
        say(
            f"no checkpoint was saved since the start with --fresh. The previous run is in {moved[0]} and is removed after this "
            f"run's first checkpoint; to resume it, move that directory and pass it as --job.dir"
        )


def forget(directory: Path) -> None:
    """Removes the run that `--fresh` moved aside, after the new run has saved; failures are only warnings."""
    try:
        forget_previous(directory)
    except OSError as cause:
        _log.warning("the previous run that --fresh moved could not be removed: %s", cause)
