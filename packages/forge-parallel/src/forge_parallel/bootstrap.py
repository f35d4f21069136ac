"""Opens the process group of a launched process, and closes it."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from forge_core.errors import LayoutError
from forge_parallel.launcher import Launch


def start(where: Launch, timeout: float) -> torch.device:
    """Opens the default process group (none for a world of one) and returns this rank's device.

    A rendezvous store is keyed by the restart count, so that a restarted worker never reads a dead one's address.

    Raises:
        LayoutError: the other processes cannot be reached in `timeout` seconds; names address, port and rank.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if where.local_rank >= torch.cuda.device_count():
            raise LayoutError(
                f"local rank {where.local_rank} has no GPU of its own: this node shows {torch.cuda.device_count()}; "
                "start one process per GPU"
            )
        device = torch.device("cuda", where.local_rank)
        torch.cuda.set_device(device)
    if where.size == 1:
        return device
    limit = timedelta(seconds=timeout)
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        tcp = dist.TCPStore(where.address, where.port, where.size, is_master=where.rank == 0 and not agent_hosts, timeout=limit)
        store = dist.PrefixStore(f"forge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp)
        dist.init_process_group(_backend(device), store=store, rank=where.rank, world_size=where.size, timeout=limit)
    except (dist.DistError, OSError, RuntimeError, ValueError) as cause:
        raise LayoutError(
            f"rank {where.rank} of {where.size} (started by {where.launcher}) could not meet the others at "
            f"{where.address}:{where.port}: {cause}; is MASTER_ADDR the host of rank 0, and did every rank start?"
        ) from cause
    return device


def alone(device: torch.device) -> None:
    """Opens a process group of one, for what wants a mesh even there."""
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def stop() -> None:
    """Closes the process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
