"""Places and documents of a row as they lie on ranks."""

import torch
from torch import Tensor

from forge_parallel.context.row_order import SequenceOrder
from forge_parallel.placement.collectives import Ranks, all_gather


def held_places(order: SequenceOrder, rank: int, length: int, device: torch.device) -> Tensor:
    """(length / ranks,) int64: the places of a row of `length` that `rank` holds, in the order in which it holds them."""
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in order.spans(rank, length)])


def gathered_places(order: SequenceOrder, length: int, device: torch.device) -> Tensor:
    """(length,) int64: the places of a row that is gathered in rank order."""
    return torch.cat([held_places(order, rank, length, device) for rank in range(order.ranks)])


def gathered_documents(documents: Tensor | None, ranks: Ranks) -> Tensor | None:
    """(B, T) of each rank -> (B, ranks * T) of all, in rank order."""
    return None if documents is None else all_gather(documents.t(), ranks, 0).t()


def held(order: SequenceOrder, rank: int, tensor: Tensor) -> Tensor:
    """What `rank` holds of rows (B, length)."""
    spans = order.spans(rank, tensor.shape[1])
    return torch.cat([tensor[:, span.start : span.stop] for span in spans], dim=1)
