"""Opens the process group of a launched process, and closes it."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from forge_core.errors import LayoutError
from forge_parallel import accelerator
from forge_parallel.launch import devices
from forge_parallel.launch.environment import Launch
from forge_parallel.launch.watch import PeerFailure, is_broken_connection
from forge_parallel.torch_private import one_gloo_thread, set_timeouts

_MEETING_SECONDS = 300.0
"""How long ranks wait for each other at the start, at most: processes of one job start together."""

_HURRY_SECONDS = 10.0
"""How long a rank that was asked to stop waits for the others, so that they learn of it."""

_RECORD = (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000")
"""How many of the newest collectives torch keeps in mind, for what is written when ranks hang."""

_NCCL = (
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3"),  # it ends, and takes nothing down, which could hang
    _RECORD,
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
)
"""Variables by which NCCL is told what to do about a failure, under their names and former ones, and what they are set to."""

_log = logging.getLogger(__name__)


def start(where: Launch, timeout: float, patience: float = 30.0, hurry: Callable[[], bool] = lambda: False) -> torch.device:
    """Collective: opens the default process group (none for a world of one) and returns this rank's device.

    A rendezvous store is keyed by the restart count, so that a restarted worker never reads a dead one's address.

    Args:
        timeout: seconds after which a collective that some rank never entered is an error.
        patience: seconds after which a rank that waits for others says so.
        hurry: asked while waiting; once it says yes, the others have ten seconds left to come.

    Raises:
        LayoutError: the address cannot be used; names address, port and rank. Or ranks have devices that do not compute alike.
        PeerFailure: other processes did not come in `timeout` seconds, five minutes at most; names them.
    """
    device = _own(where.device)
    if where.size == 1:
        return device
    _tell(_NCCL if accelerator.COLLECTIVES.get(device.type) == "nccl" else (_RECORD,))
    try:
        wait = _Wait(where, min(timeout, _MEETING_SECONDS), patience, hurry)
        store = _meet(where, wait, device)
        if remark := devices.agree(store, where.rank, where.size, wait.until):
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


class _Wait:
    """The time until all have come: says who is missing, and ends. It waits in Python, where signals are heard."""

    def __init__(self, where: Launch, limit: float, patience: float, hurry: Callable[[], bool]) -> None:
        self.where, self.limit, self.told, self.hurry = where, limit, patience, hurry
        self.began, self.pause = time.monotonic(), 0.01

    def until(self, true: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Returns once `true` does.

        Raises:
            PeerFailure: the time is up.
        """
        while not true():
            passed = time.monotonic() - self.began
            if self.hurry():
                self.limit = min(self.limit, passed + _HURRY_SECONDS)
                self.hurry = lambda: False
            if passed > self.limit:
                raise PeerFailure(
                    f"rank {self.where.rank} of {self.where.size} (started by {self.where.launcher}) waited {passed:.0f} s at "
                    f"the start: {missing()}; is MASTER_ADDR the host of rank 0, and did every rank start?"
                )
            if passed > self.told:
                self.told *= 2
                _log.warning("waiting for %.0f s at the start: %s", passed, missing())
            time.sleep(self.pause)
            self.pause = min(1.5 * self.pause, 0.5)


def _meet(where: Launch, wait: _Wait, device: torch.device) -> dist.Store:
    """The store of the group, once every rank has reached it, and told of its device there."""
    hosts = where.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        wait.until(lambda: _answers(where), lambda: f"rank 0 has not opened its store at {_at(where)}")
    limit = timedelta(seconds=wait.limit)
    tcp = dist.TCPStore(where.address, where.port, is_master=hosts, timeout=limit, wait_for_workers=False)
    store = dist.PrefixStore(f"forge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp)
    host = socket.gethostname()
    devices.tell(store, where.rank, devices.Device.of(host, device))
    store.set(f"here/{where.rank}", host)
    store.add("here", 1)

    def missing() -> str:
        absent = [str(rank) for rank in range(where.size) if not store.check([f"here/{rank}"])]
        more = f" and {len(absent) - 10} more" if len(absent) > 10 else ""
        return f"rank {', '.join(absent[:10])}{more} did not come to {_at(where)}"

    wait.until(lambda: store.add("here", 0) >= where.size, missing)
    return store


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


def stop() -> None:
    """Closes the process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
