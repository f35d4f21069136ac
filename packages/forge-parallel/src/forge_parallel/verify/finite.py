"""Does the state still consist of numbers? A value that is not finite stays once it is in a weight or a moment."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from forge_core.protocols.checkpoint import Piece
from forge_parallel.placement.topology import Topology

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
