"""The ranks of one node as processes: started together, and gone together when one of them ends.

For any program that reads torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...). A process that ends may say why in the file
that TORCHELASTIC_ERROR_FILE names, as under torchrun.
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
"""Variable with the number of the device that a rank takes, which is not its LOCAL_RANK where devices are left out."""

_LOOK_SECONDS = 0.05
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


@dataclass(frozen=True)
class Ended:
    """How the ranks ended.

    Attributes:
        code: 0 where all of them were well; else that of the first cause, negative for a signal.
        why: the first cause, with its rank; empty where all were well.
        rank: that of the first cause; -1 where all were well.
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
    """Runs a command on a local rank at each place until all have ended.

    Args:
        command: of every rank.
        places: number of the local device of each rank: 0, 1, 2, ... where none is left out. Each finds its own in `DEVICE`.
        environment: to which the variables of each rank are added.
        life: how often they have been started before.
        grace: seconds after the end of a first rank that was not well, after which the others are killed.
        asked: signals to pass on to all ranks since it was asked last.
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
    """Ranks in the order in which they ended by themselves."""
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
    """What a rank left, or what its code means."""
    try:
        return json.loads(path.read_text())["message"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code} without a word"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _dies_with_parent() -> Callable[[], None] | None:
    """What a new process does first, so that it does not outlive this one, however that ends. Linux has a call for it."""
    if not sys.platform.startswith("linux"):
        return None
    library, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def bind() -> None:
        library.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended meanwhile
            os._exit(FOLLOWS)

    return bind
