"""Commands that work on one process say so when a launcher started several."""

import os

from forge_core.errors import LayoutError
from forge_parallel.launch.environment import read_launcher


def alone(command: str) -> None:
    """Does nothing for a command that was started once.

    Raises:
        LayoutError: torchrun or srun started several, each of which would do the same work and write the same files.
    """
    where = read_launcher(os.environ)
    if where.size > 1:
        raise LayoutError(
            f"{command} works on one process, and this is rank {where.rank} of {where.size} ({where.launcher}); "
            f"start it without torchrun, under SLURM with srun --ntasks=1"
        )
