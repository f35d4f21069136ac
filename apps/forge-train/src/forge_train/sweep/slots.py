"""What each of several runs at a time is given of this machine: its accelerators and its share of the cores."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from forge_core.errors import ForgeError
from forge_core.machine import usable_cores

DEVICES = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Slot:
    """Place of one run.

    Attributes:
        number: from 0.
        environment: what is set for the run.
        says: a word about it, for the line that says that a run began.
    """

    number: int
    environment: Mapping[str, str]
    says: str


def slots(jobs: int, processes: int, accelerators: int, given: Mapping[str, str] = os.environ) -> list[Slot]:
    """`jobs` places on this machine.

    Accelerators are dealt out evenly, those that `CUDA_VISIBLE_DEVICES` names or all; more runs than accelerators share them in
    turn. Each process has an even part of the cores as OMP_NUM_THREADS, unless that is set.

    Args:
        jobs: runs at a time.
        processes: of each run.
        accelerators: that this process can use.

    Raises:
        ForgeError: a run has more processes than accelerators are left for it.
    """
    named = [item.strip() for item in given.get(DEVICES, "").split(",") if item.strip()]
    devices = (named or [str(index) for index in range(accelerators)])[:accelerators]
    share = max(1, len(devices) // jobs)
    if devices and processes > share:
        raise ForgeError(
            f"--jobs {jobs}: {len(devices)} accelerators leave {share} for each run, which has {processes} processes; "
            f"lower --jobs to {len(devices) // processes}"
            if len(devices) >= processes
            else f"processes = {processes}: this machine has {len(devices)} accelerators; lower it"
        )
    threads = {} if THREADS in given else {THREADS: str(max(1, usable_cores() // (jobs * processes)))}
    found = []
    for number in range(jobs):
        own = [devices[(number * share + index) % len(devices)] for index in range(share)] if devices else []
        placed = {DEVICES: ",".join(own)} if own else {}
        found.append(Slot(number, {**threads, **placed}, f"accelerator {','.join(own)}" if own and jobs > 1 else ""))
    return found
