"""Errors of checkpoints that callers handle differently."""

from forge_core.errors import CheckpointError


class Damaged(CheckpointError):
    """The files of a checkpoint are damaged; a search continues with the next older checkpoint."""


class NewerFormat(CheckpointError):
    """A later version of Forge wrote the checkpoint. This version cannot read it, and must not skip or rename it."""


class Superseded(CheckpointError):
    """Another job has taken over the directory; this one must not be restarted."""

    exit_code = 4
