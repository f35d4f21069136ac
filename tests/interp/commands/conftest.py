"""A small run, for the commands that look inside of it."""

from pathlib import Path

import pytest

from interp.commands.commands import BYTES, TEXT
from train.runs import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, and a text next to it."""
    folder = tmp_path_factory.mktemp("inside")
    (folder / "tiny.toml").write_text(BYTES)
    (folder / "text.txt").write_text(TEXT)
    overrides = ["--train.max_steps=4", "--optimizer.lr=0.1", "--checkpoint.every=2", '--hooks=[{name="save"}]']
    train(folder / "tiny.toml", [f"--job.dir={folder / 'run'}", *overrides])
    return folder
