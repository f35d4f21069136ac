"""Starts the ranks of one node as processes, and ends all of them when one fails.

Works for any program that reads torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...). As under torchrun, a process may write
the cause of its end to the file in TORCHELASTIC_ERROR_FILE.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_train.process.stop import FOLLOWS

DEVICE = "FORGE_LOCAL_DEVICE"
"""Environment variable with a rank's device number; it differs from LOCAL_RANK if some devices are not used."""

_LOOK_SECONDS = 0.05
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


@dataclass(frozen=True)
class Ended:
    """How the ranks ended.

    Attributes:
        code: exit code of the first rank that failed, negative for a signal; 0 if no rank failed.
        why: the first failure, with its rank; empty if no rank failed.
        rank: the first rank that failed; -1 if no rank failed.
    """

    code: int
    why: str = ""
    rank: int = -1


def run_local_ranks(
    command: Sequence[str],
    places: Sequence[int],
    environment: Mapping[str, str],
    life: int = 0,
    grace: float = 8.0,
    asked: Callable[[], Sequence[int]] = lambda: (),
) -> Ended:
    """Runs a command on one local rank per place until all ranks have ended.

    Args:
        command: command of every rank.
        places: local device number of each rank: 0, 1, 2, ... if all devices are used. Each rank reads its own from `DEVICE`.
        environment: environment variables, to which those of each rank are added.
        life: number of earlier starts of these ranks.
        grace: seconds between the first failure of a rank and killing the others.
        asked: returns the signals received since its last call, which are passed on to all ranks.
    """
    with tempfile.TemporaryDirectory(prefix="forge-ranks-") as name:
        folder = Path(name)
        size = len(places)
        common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(_free_port()), "TORCHELASTIC_RESTART_COUNT": str(life)}
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, place in enumerate(places):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), DEVICE: str(place)}
                own["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error-{rank}")
                ranks.append(subprocess.Popen(command, env={**environment, **common, **own}, preexec_fn=_dies_with_parent()))
            order = _wait(ranks, grace, asked)
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()
        codes = {rank: ranks[rank].returncode for rank in order}
        bad = [rank for rank, code in codes.items() if code != 0]
        if not bad:
            return Ended(0)
        first = next((rank for rank in bad if codes[rank] != FOLLOWS), bad[0])
        return Ended(codes[first], f"rank {first} {_cause_of_end(codes[first], folder / f'error-{first}')}", first)


def _wait(ranks: "Sequence[subprocess.Popen[bytes]]", grace: float, asked: Callable[[], Sequence[int]]) -> list[int]:
    """Waits for the ranks; returns those that were not killed, in the order in which they ended."""
    order: list[int] = []
    deadline = None
    while len(order) < len(ranks):
        for rank, process in enumerate(ranks):
            if rank not in order and process.poll() is not None:
                order.append(rank)
                if process.returncode != 0 and deadline is None:
                    deadline = time.monotonic() + grace
        for number in asked():
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(_LOOK_SECONDS)
    return order


def _cause_of_end(code: int, path: Path) -> str:
    """Returns the error message that a rank wrote, or a description of its exit code."""
    try:
        return json.loads(path.read_text())["message"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code} without a message"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _dies_with_parent() -> Callable[[], None] | None:
    """Returns a function that makes a new process die with this one, however this one ends; None if not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    library, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def bind() -> None:
        library.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl took effect
            os._exit(FOLLOWS)

    return bind
