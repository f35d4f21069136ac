"""Opens and closes the process groups of a launched process."""

import contextlib
import json
import logging
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from forge_core.errors import ForgeError, LayoutError
from forge_parallel import accelerator
from forge_parallel.launch.environment import Launch, is_agents_store
from forge_parallel.launch.large_store import absent
from forge_parallel.launch.meeting import Wait, meet, opened_by
from forge_parallel.launch.watch import PeerFailure, is_broken_connection
from forge_parallel.torch_private import one_gloo_thread, set_timeouts

_MEETING_SECONDS = 300.0
"""Maximum time that ranks wait for each other at the start; processes of one job start together."""

_TRY_SECONDS = 5.0
"""Time limit of one attempt to reach a store."""

_READ_SECONDS = 5.0
"""How long rank 0 keeps its store open, so that the others can read why no group was opened."""

_CONNECTIONS = 3
"""Connections of each rank to the store: for the meeting and the group, for messages while it is opened, and for the watch."""

_OTHER_FILES = 512
"""Open files that a process may use besides."""

_FEWEST_FILES = 64
"""Open files without which no process starts."""

_SHOWN = 8
"""Maximum number of ranks that a message names."""

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
        _open(where, Wait(where, min(timeout, _MEETING_SECONDS), patience, hurry), device, store, _limit(timeout, device))
    except (dist.DistError, OSError, RuntimeError, ValueError) as cause:
        failure = (
            f"rank {where.rank} of {where.size} (started by {where.launcher}) could not connect to the other ranks at "
            f"{_at(where)}: {cause}"
        )
        if is_broken_connection(cause):
            raise PeerFailure(failure) from cause
        raise LayoutError(f"{failure}; is MASTER_ADDR the host of rank 0, and did every rank start?") from cause
    return device


def _open(where: Launch, wait: Wait, device: torch.device, store: dist.Store, limit: timedelta) -> None:
    """Collective: opens the default group; if one rank cannot connect, all raise the same error.

    A thread connects, because gloo waits as long as a collective may take, handles no signals meanwhile, and does not learn that
    the other side has given up.
    """
    group = store  # gloo waits in it, and a connection answers one call after the other
    store = dist.PrefixStore(f"forge/{group.get('name').decode()}", _connected(where, max(wait.limit, _TRY_SECONDS)))
    store.set(f"at/{where.rank}", f"rank {where.rank} (process {os.getpid()} on {socket.gethostname()}, {_own_address()})")
    own: list[BaseException] = []
    connecting = threading.Thread(target=_connect, args=(where, device, group, limit, own), daemon=True)
    connecting.start()

    def done() -> bool:
        if own:
            raise own[0]
        return store.check(["failed"]) or store.add("opened", 0) == where.size

    try:
        wait.until(done, lambda: _unconnected(where, store, where.rank == 0), _REACH)
    except ForgeError as failure:  # of this wait
        _leave_word(store, str(failure), failure.exit_code)
    except Exception as cause:
        code = PeerFailure.exit_code if is_broken_connection(cause) else LayoutError.exit_code
        if not store.check(["failed"]):
            _leave_word(store, f"{_unconnected(where, store, looks=True)}: {cause}; {_REACH}", code)
        if not isinstance(cause, (OSError, RuntimeError, ValueError)):
            raise
    if not store.check(["failed"]):
        return
    word = json.loads(store.get("failed"))
    store.add("read", 1)
    until = time.monotonic() + _READ_SECONDS
    while where.rank == 0 and not is_agents_store() and store.add("read", 0) < where.size and time.monotonic() < until:
        time.sleep(0.02)
    raise LayoutError(word["why"]) if word["code"] == LayoutError.exit_code else PeerFailure(word["why"], word["code"])


def _connect(where: Launch, device: torch.device, store: dist.Store, limit: timedelta, errors: list[BaseException]) -> None:
    """Opens the default group in a thread of its own."""
    try:
        if device.type != accelerator.CPU.type:
            accelerator.use(device.index)  # a thread begins with the first device
        with one_gloo_thread():
            backend = accelerator.backend(device)
            dist.init_process_group(backend, store=store, rank=where.rank, world_size=where.size, timeout=limit)
        store.set(f"open/{where.rank}", "1")
        store.add("opened", 1)
    except BaseException as error:  # noqa: BLE001 (raised again by the main thread)
        errors.append(error)


_REACH = (
    "set GLOO_SOCKET_IFNAME on each host to the network interface that the other hosts reach (`ip -br address` lists them), and "
    "let its firewall pass TCP from the other hosts on all ports"
)


def _leave_word(store: dist.Store, why: str, code: int) -> None:
    """Tells all ranks why the group cannot be opened. The first reason counts."""
    store.compare_set("failed", "", json.dumps({"why": why, "code": code}))


def _unconnected(where: Launch, store: dist.Store, looks: bool) -> str:
    """Describes which ranks this one may not have reached: those that are not connected to all others.

    Args:
        looks: whether this rank looks them up and publishes them; the others read what was published.
    """
    if looks:
        keys = {f"open/{rank}": rank for rank in range(where.size)}
        first = [keys[key] for key in absent(store, list(keys), _SHOWN + 1)]
        names = [store.get(f"at/{rank}").decode() if store.check([f"at/{rank}"]) else f"rank {rank}" for rank in first]
        text = json.dumps({"ranks": [*zip(first, names, strict=True)], "count": where.size - store.add("opened", 0)})
        store.set("unconnected", text)
    elif store.check(["unconnected"]):
        text = store.get("unconnected").decode()
    else:
        text = '{"ranks": [], "count": 0}'
    published = json.loads(text)
    others = [name for rank, name in published["ranks"] if rank != where.rank]
    count = published["count"] - len(published["ranks"]) + len(others)
    more = f" and {count - _SHOWN} more ranks" if count > _SHOWN else ""
    own = store.get(f"at/{where.rank}").decode()
    return f"{own} is not connected to {', '.join(others[:_SHOWN]) or 'the other ranks'}{more}"


def _own_address() -> str:
    """Returns the address at which gloo lets other ranks connect to this one, and where it comes from."""
    card = os.environ.get("GLOO_SOCKET_IFNAME", "")
    with contextlib.suppress(OSError):
        if not card:
            return f"address {socket.gethostbyname(socket.gethostname())} of its host name"
        if sys.platform.startswith("linux"):
            import fcntl

            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                facts = fcntl.ioctl(asking.fileno(), _ADDRESS_OF, struct.pack("256s", card.encode()[:15]))
            return f"address {socket.inet_ntoa(facts[20:24])} of {card} (GLOO_SOCKET_IFNAME)"
    return f"address of {card} (GLOO_SOCKET_IFNAME) unknown" if card else "address of its host name unknown"


_ADDRESS_OF = 0x8915  # SIOCGIFADDR of linux/sockios.h


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
        _allow_files(where, gloo=accelerator.COLLECTIVES.get(device.type) is None)
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


def _allow_files(where: Launch, gloo: bool) -> None:
    """Lets the process that hosts the store open a file for each connection, if its soft limit is too low.

    Raises:
        LayoutError: the hard limit is too low; beyond it, ranks would wait for an answer until they time out.
    """
    each = _CONNECTIONS + gloo  # gloo connects all ranks with each other
    least = each * where.size + _FEWEST_FILES
    wanted = each * where.size + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < least:
        raise LayoutError(
            f"rank 0 of {where.size:,} has {each} connections to each rank, so it needs {least:,} open files, but its limit "
            f"is {hard:,}; raise the hard limit of open files on its host (`ulimit -Hn`; LimitNOFILE of slurmd or the container)"
        )
    if (allowed := wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)) > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


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


def _connected(where: Launch, seconds: float = _TRY_SECONDS) -> dist.Store:
    return dist.TCPStore(where.address, where.port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)


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
