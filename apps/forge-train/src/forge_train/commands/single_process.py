"""Refuses to run a single-process command on several processes."""

import os

from forge_core.errors import LayoutError
from forge_parallel.launch.environment import read_launcher


def require_single_process(command: str) -> None:
    """Does nothing for a command that was started once.

    Raises:
        LayoutError: torchrun or srun started several processes, which would all write the same files.
    """
    where = read_launcher(os.environ)
    if where.size > 1:
        raise LayoutError(
            f"{command} runs in one process, but this is rank {where.rank} of {where.size} ({where.launcher}); "
            f"start it without torchrun, or under SLURM with srun --ntasks=1"
        )
