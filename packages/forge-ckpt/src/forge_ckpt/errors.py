"""Errors that callers handle in different ways."""

from forge_core.errors import CheckpointError


class Damaged(CheckpointError):
    """The files are not what was written: a search takes the next older checkpoint."""


class NewerFormat(CheckpointError):
    """Written by a later version: it is sound, but this version cannot read it and must not skip or move it."""


class Superseded(CheckpointError):
    """Another job has taken over the directory; this one must not be restarted."""

    exit_code = 4
