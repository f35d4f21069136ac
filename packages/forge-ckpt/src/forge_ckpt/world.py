"""Collectives for checkpoints: of one process, or of a process group."""

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

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def broadcast(self, payload: bytes | None) -> bytes:
        if payload is None:
            raise ValueError("rank 0 must give what it broadcasts")
        return payload


class ProcessGroupWorld:
    """The ranks of a `torch.distributed` group. Bytes are sent as uint8 tensors, with two collectives per call.

    `device` is the device of the group's backend: `cpu` for gloo, the rank's own device for NCCL.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None, device: "torch.device | str" = "cpu") -> None:
        import torch.distributed as dist

        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @classmethod
    def apart(cls) -> "ProcessGroupWorld":
        """Collective: returns all ranks in a separate gloo group, for collectives in a thread at any time.

        The timeout is one day, because a slow save of a large checkpoint is not a failure. If a rank dies, the wait ends at once.
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
        sizes = [int(entry.item()) for entry in lengths]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device=self.device)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self.group)
        return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def gather(self, payload: bytes) -> list[bytes]:
        """See `World`. Rank 0 keeps its own payload; each row begins with its length and is padded to the longest one."""
        import torch
        import torch.distributed as dist

        sent = len(payload).to_bytes(8, "little") + payload if self.rank else b""
        longest = torch.tensor([len(sent)], dtype=torch.int64, device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        row = torch.zeros(int(longest.item()), dtype=torch.uint8, device=self.device)
        if sent:
            row[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8).to(self.device)
        rows = [torch.empty_like(row) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(row, rows, group=self.group, group_dst=0)
        if rows is None:
            return []
        received = [row.cpu().numpy().tobytes() for row in rows[1:]]
        return [payload, *(text[8 : 8 + int.from_bytes(text[:8], "little")] for text in received)]

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
    """Collective: runs `compute` on rank 0, and returns its result (JSON) on every rank.

    Raises:
        CheckpointError: on every rank, if `compute` raised an error.
    """
    reply: dict[str, Any] | None = None
    if world.rank == 0:
        try:
            reply = {"value": compute()}
        except Exception as cause:  # noqa: BLE001 (stores are plugins and may raise anything; every rank must learn of it)
            reply = {"error": (describe or describe_error)(cause)}
    received = json.loads(world.broadcast(json.dumps(reply).encode() if reply is not None else None))
    if "error" in received:
        raise CheckpointError(received["error"])
    return received["value"]


def describe_error(cause: Exception) -> str:
    """Returns an error as one line; with its type, except for Forge's own errors."""
    return str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
