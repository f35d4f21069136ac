"""Collectives of a checkpoint: for one process, or for a process group."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class SingleProcessWorld:
    """A world of one process."""

    rank: int = 0
    size: int = 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def broadcast(self, payload: bytes | None) -> bytes:
        if payload is None:
            raise ValueError("rank 0 must give what it broadcasts")
        return payload


class ProcessGroupWorld:
    """The ranks of a `torch.distributed` group; bytes travel as uint8 tensors, two collectives a call.

    `device` is where the group's backend works: `cpu` for gloo, the rank's own device for NCCL.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None, device: "torch.device | str" = "cpu") -> None:
        import torch.distributed as dist

        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @classmethod
    def apart(cls) -> "ProcessGroupWorld":
        """Collective: all ranks in a group of gloo that nothing else uses, for what a thread does at any time.

        It waits a day for a rank: a large checkpoint on slow storage is not a failure. A rank that dies ends the wait at once.
        """
        import torch.distributed as dist

        group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        return cls(group)

    def all_gather(self, payload: bytes) -> list[bytes]:
        import torch
        import torch.distributed as dist

        length = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self.group)
        sizes = [int(found.item()) for found in lengths]
        mine = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device=self.device)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self.group)
        return [row[:size].cpu().numpy().tobytes() for row, size in zip(every, sizes, strict=True)]

    def broadcast(self, payload: bytes | None) -> bytes:
        import torch
        import torch.distributed as dist

        if self.rank == 0 and payload is None:
            raise ValueError("rank 0 must give what it broadcasts")
        length = torch.tensor([len(payload or b"")], dtype=torch.int64, device=self.device)
        dist.broadcast(length, group_src=0, group=self.group)
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=self.device)
        if self.rank == 0 and payload:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        if data.numel():
            dist.broadcast(data, group_src=0, group=self.group)
        return data.cpu().numpy().tobytes()


def from_rank_0(world: World, compute: Callable[[], Any], describe: Callable[[Exception], str] | None = None) -> Any:
    """Collective: what `compute` gives on rank 0 (JSON), on every rank.

    Raises:
        CheckpointError: on every rank, when it raised on rank 0.
    """
    reply: dict[str, Any] | None = None
    if world.rank == 0:
        try:
            reply = {"value": compute()}
        except Exception as cause:  # noqa: BLE001 (stores are plugins and may raise anything; every rank must learn of it)
            reply = {"error": (describe or describe_error)(cause)}
    found = json.loads(world.broadcast(json.dumps(reply).encode() if reply is not None else None))
    if "error" in found:
        raise CheckpointError(found["error"])
    return found["value"]


def describe_error(cause: Exception) -> str:
    """An error as one line for people; Forge's errors need no type name."""
    return str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
