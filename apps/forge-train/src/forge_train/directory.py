"""Where a run lives: `runs/<name>/` with its recipe, numbers, logs, prepared data, checkpoints and report."""

import shutil
import tempfile
from pathlib import Path

from forge_core.errors import ForgeError
from forge_core.redact import redacted_text
from forge_train.job import Job

RECIPE = "config.toml"
"""The resolved recipe; its presence marks a directory as a run's."""

OWNED = ("checkpoints", "logs", "metrics.jsonl", "report.html", "report.json", "samples.json", "tensorboard", "wandb", "wandb-id")
"""What `--fresh` removes. Prepared data stays: it depends on its inputs only and is checked against them."""


def run_directory(job: Job) -> Path:
    """`job.dir`, or `runs/<job.name>` below the working directory."""
    return Path(job.job.dir) if job.job.dir else Path("runs") / job.job.name


def claim(directory: Path, fresh: bool) -> None:
    """Makes the directory and shows that it can be written, before anything expensive starts.

    Raises:
        ForgeError: it cannot be made or written, or `fresh` would empty a directory that is not a run's.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as cause:
        raise ForgeError(
            f"the run's directory {directory} cannot be written: {cause.strerror}; choose another with --job.dir=PATH"
        ) from cause
    if fresh:
        _empty(directory)


def keep_recipe(directory: Path, recipe: str) -> None:
    """Writes the resolved recipe, whole, since it can be run again. Only its owner may read one that holds secrets."""
    path = directory / RECIPE
    private = redacted_text(recipe) != recipe
    path.touch(mode=0o600 if private else 0o666)
    if private:
        path.chmod(0o600)  # it may be of an earlier start
    path.write_text(recipe, encoding="utf-8")


def _empty(directory: Path) -> None:
    present = [directory / name for name in OWNED if (directory / name).exists()]
    if present and not (directory / RECIPE).is_file():
        raise ForgeError(
            f"--fresh: {directory} holds {present[0].name} but no {RECIPE}, so it is not a run's; nothing was removed"
        )
    for path in present:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
