"""Checks of the training state: replicas hold equal bits, and all numbers are finite.

Ranks that hold the same box of a parameter or buffer stay equal because they compute the same. A non-deterministic kernel, a
flipped bit or a wrong collective can end that without an error, so a digest of each tensor is compared along every axis that
replicates it: a few bytes per tensor.
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
"""2^64 / golden ratio as a signed integer: consecutive multiples differ in all their bits (Knuth, 6.4)."""

INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Drift(NamedTuple):
    """A parameter or buffer that `rank` holds otherwise than the rank that owns its box."""

    name: str
    rank: int


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Scalar int64 on the tensor's device: the bits of each element times an odd number of its place, summed modulo 2^64."""
    bits = tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]).flatten().to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int64)
    return ((bits + 1) * (places * ODD | 1)).sum()


def drifted(model: ParallelModel) -> Drift | None:
    """Collective: the first tensor, in the order of the model's names, that differs between replicas, and the lowest rank that
    holds it otherwise; None where all agree. Every rank gets the same answer."""
    topology = model.topology
    names = list(model.specs.tensors)
    none = (len(names), topology.size)
    mine = [(name, tensor, replicating_axes(tensor, topology)) for name, tensor in model.tensors()]
    digests = {name: digest(local_box(tensor).local) for name, tensor, _ in mine}
    found = [none]
    if topology.layout.cp > 1 and topology.layout.dp_shard > 1:
        topology.group("dp_shard")  # all ranks open it, though only those of some stages may hold what it replicates
    for axis in sorted({axis for *_, axes in mine for axis in axes}):
        group = topology.group(axis)
        chosen = [name for name, _, axes in mine if axis in axes]
        every = all_gather(torch.stack([digests[name] for name in chosen])[None].to(topology.device), Ranks.of(group), 0)
        differ = (every != every[0]).nonzero().tolist()
        found += [(names.index(chosen[column]), dist.get_global_rank(group, at)) for at, column in differ]
    # The smallest (tensor, rank) of the world, as one number.
    first = torch.tensor(min(index * (topology.size + 1) + rank for index, rank in found), device=topology.device)
    if topology.size > 1:
        dist.all_reduce(first, dist.ReduceOp.MIN)
    index, rank = divmod(int(first), topology.size + 1)
    return None if (index, rank) == none else Drift(names[index], rank)


_NAME_BYTES = 1024


class NotFinite(NamedTuple):
    """A tensor with a value that is NaN or infinite, and the lowest rank that holds one of those."""

    name: str
    rank: int


def not_finite(pieces: Iterable[Piece], topology: Topology) -> NotFinite | None:
    """Collective: the first of this world's tensors with a value that is not finite, the same answer on every rank.

    Reads every element of `pieces` once, waits for the device once, and makes one all-reduce of a number; only when something is
    found does its name travel. Integers are passed over.
    """
    named = [(piece.name, piece.local) for piece in pieces if piece.local.is_floating_point() and piece.local.numel()]
    found = _first(named)
    if topology.size == 1:
        return None if found is None else NotFinite(found, 0)
    rank = torch.tensor(topology.size if found is None else topology.rank, device=topology.device)
    dist.all_reduce(rank, dist.ReduceOp.MIN)
    at = int(rank)
    if at == topology.size:
        return None
    letters = torch.zeros(_NAME_BYTES, dtype=torch.uint8, device=topology.device)
    if at == topology.rank and found is not None:
        text = found.encode()[:_NAME_BYTES]
        letters[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    dist.broadcast(letters, at)
    return NotFinite(bytes(letters.tolist()).rstrip(b"\0").decode(errors="replace"), at)


@torch.no_grad()
def _first(named: list[tuple[str, torch.Tensor]]) -> str | None:
    """The first name whose largest magnitude is not finite: NaN passes through a maximum, and nothing can overflow."""
    largest: dict[torch.device, list[torch.Tensor]] = {}
    places: dict[torch.device, list[str]] = {}
    for name, tensor in named:
        largest.setdefault(tensor.device, []).append(torch.linalg.vector_norm(_normed(tensor), float("inf")).double())
        places.setdefault(tensor.device, []).append(name)
    for device, found in largest.items():
        bad = (~torch.isfinite(torch.stack(found))).nonzero().flatten().tolist()
        if bad:
            return places[device][bad[0]]
    return None


def _normed(tensor: torch.Tensor) -> torch.Tensor:
    """Formats of eight bits have no norms."""
    return tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()
