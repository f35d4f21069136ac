"""Helpers of the checkpoint tests: ranks as threads, boxes of tensors, damage, digests."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forge_core.protocols.checkpoint import Piece


@dataclass
class Meeting:
    """What threads of one world share."""

    size: int
    slots: list[bytes] = field(default_factory=list)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [b""] * self.size
        self.barrier = threading.Barrier(self.size, timeout=30)


@dataclass
class ThreadRank:
    """`World` of one thread among several."""

    rank: int
    size: int
    meeting: Meeting

    def all_gather(self, payload: bytes) -> list[bytes]:
        self.meeting.slots[self.rank] = bytes(payload)
        self.meeting.barrier.wait()
        every = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return every

    def gather(self, payload: bytes) -> list[bytes]:
        every = self.all_gather(payload)
        return every if self.rank == 0 else []

    def broadcast(self, payload: bytes | None) -> bytes:
        return self.all_gather(payload or b"")[0]


def on_ranks(size: int, function: Callable[[ThreadRank], Any]) -> list[Any]:
    """What `function(world)` returned or raised on each rank; a rank that breaks off the protocol fails the test."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadRank(rank, size, meeting))
        except BaseException as cause:
            results[rank] = cause

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(isinstance(result, threading.BrokenBarrierError) for result in results), results
    return results


def whole(state: dict[str, torch.Tensor]) -> list[Piece]:
    """Every tensor as one piece of its own."""
    return [Piece(name, tuple(t.shape), (0,) * t.dim(), t, True) for name, t in state.items()]


def box(name: str, full: torch.Tensor, low: Sequence[int], high: Sequence[int], owned: bool = True) -> Piece:
    """A copy of one box of a global tensor."""
    part = full[tuple(slice(a, b) for a, b in zip(low, high, strict=True))].clone()
    return Piece(name, tuple(full.shape), tuple(low), part, owned)


def shards(name: str, full: torch.Tensor, dim: int, count: int) -> list[Piece]:
    """One shard per rank along a dimension, as FSDP cuts: ceil-sized, the last ones smaller or empty."""
    size = full.shape[dim]
    step = -(-size // count)
    pieces = []
    for rank in range(count):
        low, high = [0] * full.dim(), list(full.shape)
        low[dim], high[dim] = min(rank * step, size), min((rank + 1) * step, size)
        pieces.append(box(name, full, low, high))
    return pieces


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """sha256 of the bytes of tensors: an authority other than the checksum under test."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def sample(seed: int = 0) -> dict[str, torch.Tensor]:
    """A small state of mixed dtypes and shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/embed.weight": torch.randn(40, 12, generator=generator),
        "model/head.weight": torch.randn(12, 40, generator=generator).bfloat16(),
        "optimizer/step": torch.tensor(seed + 17, dtype=torch.int64),
        "optimizer/mask": torch.rand(33, generator=generator) > 0.5,
    }


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
