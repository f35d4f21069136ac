"""Checks of the training state: replicas are bitwise equal, and all numbers are finite.

Ranks that hold the same box of a parameter or buffer stay equal because they compute the same. A non-deterministic kernel, a
flipped bit or a wrong collective can change that without an error. So a digest of each tensor, a few bytes, is compared along
every axis that replicates it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from forge_core.protocols.checkpoint import Piece
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.boxes import local_box, replicating_axes
from forge_parallel.placement.collectives import Ranks, all_gather
from forge_parallel.placement.topology import Topology

ODD = -7046029254386353131
"""2^64 / golden ratio as a signed integer: consecutive multiples differ in all bits (Knuth, TAOCP 6.4)."""

INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Drift(NamedTuple):
    """A parameter or buffer whose values on `rank` differ from those on the rank that owns its box."""

    name: str
    rank: int


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a scalar int64 on the tensor's device: the sum modulo 2^64 of each element's bits times an odd number by
    position."""
    bits = tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]).flatten().to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int64)
    return ((bits + 1) * (places * ODD | 1)).sum()


def drifted(model: ParallelModel) -> Drift | None:
    """Collective: returns the first tensor, in the order of the model's names, that differs between replicas, with the lowest
    rank whose copy differs; None if all replicas are equal. The result is the same on every rank."""
    topology = model.topology
    names = list(model.specs.tensors)
    none = (len(names), topology.size)
    replicated = [(name, tensor, replicating_axes(tensor, topology)) for name, tensor in model.tensors()]
    digests = {name: digest(local_box(tensor).local) for name, tensor, _ in replicated}
    drifts = [none]
    if topology.layout.cp > 1 and topology.layout.dp_shard > 1:
        topology.group("dp_shard")  # all ranks must open it, even if only some pipeline stages have tensors that it replicates
    for axis in sorted({axis for *_, axes in replicated for axis in axes}):
        group = topology.group(axis)
        chosen = [name for name, _, axes in replicated if axis in axes]
        every = all_gather(torch.stack([digests[name] for name in chosen])[None].to(topology.device), Ranks.of(group), 0)
        differ = (every != every[0]).nonzero().tolist()
        drifts += [(names.index(chosen[column]), dist.get_global_rank(group, at)) for at, column in differ]
    # The smallest (tensor, rank) of the world, encoded as one number.
    first = torch.tensor(min(index * (topology.size + 1) + rank for index, rank in drifts), device=topology.device)
    if topology.size > 1:
        dist.all_reduce(first, dist.ReduceOp.MIN)
    index, rank = divmod(int(first), topology.size + 1)
    return None if (index, rank) == none else Drift(names[index], rank)


_NAME_BYTES = 1024


class NotFinite(NamedTuple):
    """A tensor with a NaN or infinite value, and the lowest rank that has such a tensor."""

    name: str
    rank: int


def not_finite(pieces: Iterable[Piece], topology: Topology) -> NotFinite | None:
    """Collective: returns the first tensor with a value that is not finite, on the lowest such rank; the same on every rank.

    Reads every element of `pieces` once, synchronizes once, and all-reduces one number; the tensor's name is sent only if there
    is one. Skips integers.
    """
    named = [(piece.name, piece.local) for piece in pieces if piece.local.is_floating_point() and piece.local.numel()]
    name = _first(named)
    if topology.size == 1:
        return None if name is None else NotFinite(name, 0)
    rank = torch.tensor(topology.size if name is None else topology.rank, device=topology.device)
    dist.all_reduce(rank, dist.ReduceOp.MIN)
    at = int(rank)
    if at == topology.size:
        return None
    letters = torch.zeros(_NAME_BYTES, dtype=torch.uint8, device=topology.device)
    if at == topology.rank and name is not None:
        text = name.encode()[:_NAME_BYTES]
        letters[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    dist.broadcast(letters, at)
    return NotFinite(bytes(letters.tolist()).rstrip(b"\0").decode(errors="replace"), at)


@torch.no_grad()
def _first(named: list[tuple[str, torch.Tensor]]) -> str | None:
    """Returns the first name whose largest magnitude is not finite. NaN propagates through a maximum, and nothing overflows."""
    largest: dict[torch.device, list[torch.Tensor]] = {}
    places: dict[torch.device, list[str]] = {}
    for name, tensor in named:
        largest.setdefault(tensor.device, []).append(torch.linalg.vector_norm(_normed(tensor), float("inf")).double())
        places.setdefault(tensor.device, []).append(name)
    for device, norms in largest.items():
        bad = (~torch.isfinite(torch.stack(norms))).nonzero().flatten().tolist()
        if bad:
            return places[device][bad[0]]
    return None


def _normed(tensor: torch.Tensor) -> torch.Tensor:
    """Casts 8-bit formats, for which torch has no norms."""
    return tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()
