"""Opens and closes the process groups of a launched process."""

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
"""Maximum time that ranks wait for each other at the start; processes of one job start together."""

_TRY_SECONDS = 5.0
"""Time limit of one attempt to reach a store."""

_RECORD = (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000")
"""Number of newest collectives that torch records, for the report of a hang."""

_NCCL = (
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3"),  # ends the process without cleanup, which could hang
    _RECORD,
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
)
"""Variables that tell NCCL how to handle a failure, under their current and former names -> their values."""

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

    Before the first collective, all ranks meet in the store of rank 0 and compare what they run
    (`forge_parallel.launch.meeting`).

    Args:
        timeout: seconds after which a collective that some rank never entered is an error.
        patience: seconds after which a waiting rank logs which ranks it waits for.
        hurry: called while waiting; after it returns True, the others have three seconds left to come.
        content: called if there are several ranks; returns what must be equal on all of them, see `meeting.meet`.
        run: name of the run.

    Raises:
        LayoutError: the address cannot be used or belongs to another launch; names address, port and rank.
        RanksDiffer: ranks have different content, or devices that compute different numbers; names ranks, hosts and keys.
        PeerFailure: other processes did not come within `timeout` seconds, or five minutes; names them.
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
        failure = (
            f"rank {where.rank} of {where.size} (started by {where.launcher}) could not connect to the other ranks at "
            f"{_at(where)}: {cause}"
        )
        if is_broken_connection(cause):
            raise PeerFailure(failure) from cause
        raise LayoutError(f"{failure}; is MASTER_ADDR the host of rank 0, and did every rank start?") from cause
    return device


def _own(number: int) -> torch.device:
    """Returns this process's accelerator; the CPU if the node has none."""
    count = accelerator.count()
    if count and number >= count:
        raise LayoutError(f"local rank {number} has no GPU, because this node has {count}; start one process per GPU")
    return accelerator.use(number) if count else accelerator.CPU


def _meet(where: Launch, wait: Wait, device: torch.device, content: Mapping[str, str], run: str) -> tuple[dist.Store, str]:
    """Returns the store of the group and a remark on devices, after all ranks have connected and run the same thing."""
    outlives = is_agents_store()
    if where.rank != 0 or outlives:
        tcp = _reached(where, wait)
    else:
        socket.getaddrinfo(where.address, where.port)  # torch would retry for minutes, without a message
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
                f"rank 0 cannot open its store at {_at(where)}: {other or 'another process'} listens at this address; {do}"
            ) from cause
    return meet(tcp, where, wait, device, content, run, outlives)


def _reached(where: Launch, wait: Wait) -> dist.Store:
    """Returns a connection to the store of rank 0. A thread connects, because signals are not handled meanwhile and the process
    that listens at the address may never answer."""
    answer = "has not opened its store"
    stores: list[dist.Store] = []
    trying: list[threading.Thread] = []

    def connect() -> None:
        nonlocal answer
        try:
            stores.append(_connected(where))
        except (dist.DistError, RuntimeError):
            answer = "does not answer as a store"

    def reach() -> bool:
        if not stores and not any(thread.is_alive() for thread in trying) and _answers(where):
            trying[:] = [threading.Thread(target=connect, daemon=True)]
            trying[0].start()
            trying[0].join(0.1)
        return bool(stores)

    wait.until(reach, lambda: f"rank 0 {answer} at {_at(where)}")
    stores[0].set_timeout(timedelta(seconds=max(wait.limit, 1.0)))
    return stores[0]


def _connected(where: Launch) -> dist.Store:
    return dist.TCPStore(
        where.address, where.port, is_master=False, timeout=timedelta(seconds=_TRY_SECONDS), wait_for_workers=False
    )


def _meeting_at(where: Launch) -> str:
    """Returns the rank 0 and the launch whose meeting is at the address; "" if there is none."""
    try:
        return opened_by(_connected(where)) if _answers(where) else ""
    except (dist.DistError, OSError, RuntimeError):
        return ""


def _answers(where: Launch) -> bool:
    """Whether a process listens at the address.

    Raises:
        OSError: the host name cannot be resolved.
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
    """Opens a process group of one process, for code that needs a mesh."""
    with one_gloo_thread():
        dist.init_process_group(accelerator.backend(device), store=dist.HashStore(), rank=0, world_size=1)


def limit(timeout: float, device: torch.device) -> None:
    """Sets the timeout, in seconds, of collectives in all open groups."""
    if dist.is_initialized():
        set_timeouts(_limit(timeout, device))


def _limit(timeout: float, device: torch.device) -> timedelta:
    # NCCL ends the process at its timeout; the watch, which names the late ranks, has to act before.
    return timedelta(seconds=timeout + (60 if device.type in accelerator.COLLECTIVES else 0))


def _tell(variables: Iterable[tuple[Sequence[str], str]]) -> None:
    """Sets environment variables that are not set yet, under any of their names."""
    for names, value in variables:
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


def destroy_process_groups() -> None:
    """Closes the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
