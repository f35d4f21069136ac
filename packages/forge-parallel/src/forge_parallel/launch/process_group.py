"""Opens the process group of a launched process, and closes it."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from forge_core.errors import LayoutError
from forge_parallel import accelerator
from forge_parallel.launch.environment import Launch, is_agents_store
from forge_parallel.launch.meeting import Wait, meet, opened_by
from forge_parallel.launch.watch import PeerFailure, is_broken_connection
from forge_parallel.torch_private import one_gloo_thread, set_timeouts

_MEETING_SECONDS = 300.0
"""How long ranks wait for each other at the start, at most: processes of one job start together."""

_TRY_SECONDS = 5.0
"""How long one try to reach a store may take."""

_RECORD = (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000")
"""How many of the newest collectives torch keeps in mind, for what is written when ranks hang."""

_NCCL = (
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3"),  # it ends, and takes nothing down, which could hang
    _RECORD,
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
)
"""Variables by which NCCL is told what to do about a failure, under their names and former ones, and what they are set to."""

_log = logging.getLogger(__name__)


def init_process_groups(
    where: Launch,
    timeout: float,
    patience: float = 30.0,
    hurry: Callable[[], bool] = lambda: False,
    content: Callable[[], Mapping[str, str]] = dict,
    run: str = "",
) -> torch.device:
    """Collective: opens the default process group (none for a world of one) and returns this rank's device.

    Before the first collective all ranks meet in the store of rank 0 and compare what they run (`forge_parallel.launch.meeting`).

    Args:
        timeout: seconds after which a collective that some rank never entered is an error.
        patience: seconds after which a rank that waits for others says so.
        hurry: asked while waiting; once it says yes, the others have three seconds left to come.
        content: asked, where there are several ranks, for what has to be equal on all of them; see `meeting.meet`.
        run: the name of what is started.

    Raises:
        LayoutError: the address cannot be used, or is that of another start; names address, port and rank.
        RanksDiffer: ranks have other content, or devices that do not compute alike; names ranks, hosts and keys.
        PeerFailure: other processes did not come in `timeout` seconds, five minutes at most; names them.
    """
    device = _own(where.device)
    if where.note:
        _log.warning("%s", where.note)
    if where.size == 1:
        return device
    _tell(_NCCL if accelerator.COLLECTIVES.get(device.type) == "nccl" else (_RECORD,))
    try:
        wait = Wait(where, min(timeout, _MEETING_SECONDS), patience, hurry)
        store, remark = _meet(where, wait, device, content(), run)
        if remark:
            _log.log(logging.INFO if where.rank else logging.WARNING, "%s", remark)
        with one_gloo_thread():
            dist.init_process_group(
                accelerator.backend(device), store=store, rank=where.rank, world_size=where.size, timeout=_limit(timeout, device)
            )
    except (dist.DistError, OSError, RuntimeError, ValueError) as cause:
        told = (
            f"rank {where.rank} of {where.size} (started by {where.launcher}) could not meet the others at {_at(where)}: {cause}"
        )
        if is_broken_connection(cause):
            raise PeerFailure(told) from cause
        raise LayoutError(f"{told}; is MASTER_ADDR the host of rank 0, and did every rank start?") from cause
    return device


def _own(number: int) -> torch.device:
    """The accelerator of a process of this node; the CPU where there are none."""
    there = accelerator.count()
    if there and number >= there:
        raise LayoutError(f"local rank {number} has no GPU: this node shows {there}; start one process per GPU")
    return accelerator.use(number) if there else accelerator.CPU


def _meet(where: Launch, wait: Wait, device: torch.device, content: Mapping[str, str], run: str) -> tuple[dist.Store, str]:
    """The store of the group and a remark on devices, once every rank has reached it and all run the same thing."""
    outlives = is_agents_store()
    if where.rank != 0 or outlives:
        tcp = _reached(where, wait)
    else:
        try:
            tcp = dist.TCPStore(
                where.address, where.port, is_master=True, timeout=timedelta(seconds=wait.limit), wait_for_workers=False
            )
        except (dist.DistError, OSError, RuntimeError) as cause:
            if "EADDRINUSE" not in str(cause) and "address already in use" not in str(cause):
                raise
            other = _meeting_at(where)
            do = "give each start its own MASTER_PORT, or wait until the other process has ended"
            raise LayoutError(
                f"rank 0 cannot open its store at {_at(where)}: {other or 'another process'} listens there; {do}"
            ) from cause
    return meet(tcp, where, wait, device, content, run, outlives)


def _reached(where: Launch, wait: Wait) -> dist.Store:
    """A connection to the store of rank 0. A thread tries it, since no signal is heard meanwhile; what listens may be silent."""
    answer = "has not opened its store"
    found: list[dist.Store] = []
    trying: list[threading.Thread] = []

    def connect() -> None:
        nonlocal answer
        try:
            found.append(_connected(where))
        except (dist.DistError, RuntimeError):
            answer = "does not answer as a store"

    def reach() -> bool:
        if not found and not any(thread.is_alive() for thread in trying) and _answers(where):
            trying[:] = [threading.Thread(target=connect, daemon=True)]
            trying[0].start()
            trying[0].join(0.1)
        return bool(found)

    wait.until(reach, lambda: f"rank 0 {answer} at {_at(where)}")
    found[0].set_timeout(timedelta(seconds=max(wait.limit, 1.0)))
    return found[0]


def _connected(where: Launch) -> dist.Store:
    return dist.TCPStore(
        where.address, where.port, is_master=False, timeout=timedelta(seconds=_TRY_SECONDS), wait_for_workers=False
    )


def _meeting_at(where: Launch) -> str:
    """Which start has its meeting at an address; "" where none has."""
    try:
        return opened_by(_connected(where)) if _answers(where) else ""
    except (dist.DistError, OSError, RuntimeError):
        return ""


def _answers(where: Launch) -> bool:
    """Whether a process listens at the address.

    Raises:
        OSError: the address has no host.
    """
    try:
        socket.create_connection((where.address, where.port), timeout=1).close()
    except (ConnectionError, TimeoutError):
        return False
    except socket.gaierror:
        raise
    except OSError:  # no route yet
        return False
    return True


def _at(where: Launch) -> str:
    return f"{where.address}:{where.port}"


def alone(device: torch.device) -> None:
    """Opens a process group of one, for what wants a mesh even there."""
    with one_gloo_thread():
        dist.init_process_group(accelerator.backend(device), store=dist.HashStore(), rank=0, world_size=1)


def limit(timeout: float, device: torch.device) -> None:
    """From here on, a collective that some rank never entered is an error after `timeout` seconds, in every open group."""
    if dist.is_initialized():
        set_timeouts(_limit(timeout, device))


def _limit(timeout: float, device: torch.device) -> timedelta:
    # NCCL ends the process at its limit; the watch, which names who is late, has to come first.
    return timedelta(seconds=timeout + (60 if device.type in accelerator.COLLECTIVES else 0))


def _tell(variables: Iterable[tuple[Sequence[str], str]]) -> None:
    """A failed collective of NCCL ends the process, and a record of the last ones is kept, unless variables say otherwise."""
    for names, value in variables:
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


def destroy_process_groups() -> None:
    """Closes the process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
