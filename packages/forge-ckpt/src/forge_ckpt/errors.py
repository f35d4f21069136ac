"""Refusals that somebody tells apart from all others."""

from forge_core.errors import CheckpointError


class Damaged(CheckpointError):
    """The files are not what was written: a search takes the next older checkpoint."""


class NewerFormat(CheckpointError):
    """Written by a later version: sound, but not ours to read, skip or move."""


class Superseded(CheckpointError):
    """Another job writes here now; nothing is to be started again."""

    exit_code = 4
