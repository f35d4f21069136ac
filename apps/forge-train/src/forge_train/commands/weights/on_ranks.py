"""Runs what a command does on all processes that a launcher started: one of them speaks, and all end with its exit code."""

import os
import sys
from collections.abc import Callable

from forge_core.errors import ForgeError
from forge_core.terminal import Console
from forge_parallel.launch import process_group
from forge_parallel.launch.environment import Launch
from forge_parallel.launch.watch import PeerFailure


def on_ranks(where: Launch, console: Console, body: Callable[[], None]) -> None:
    """Collective: `body`, which opens the process group itself, and what follows. On several processes this never returns.

    Raises:
        ForgeError: what the body refuses, in a world of one; of several processes the first one prints it.
    """
    code = 0
    try:
        body()
        process_group.destroy_process_groups()
    except ForgeError as refusal:
        if where.size == 1:
            raise
        code = refusal.exit_code
        if where.rank == 0 or isinstance(refusal, PeerFailure):  # what another rank is refused alone, only it can say
            code = console.error(refusal)
    sys.stdout.flush()
    sys.stderr.flush()
    if where.size > 1:
        # A worker of a process group may abort while the interpreter shuts down, which would hide the real exit code.
        os._exit(code)
