"""Positions and documents of split rows, and attention with a cache. Used by all kinds of attention over ranks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_core.protocols.model import AttentionCore
from forge_parallel.placement.collectives import Ranks, all_gather
from forge_parallel.transforms.context.row_order import SequenceOrder


def held_places(order: SequenceOrder, rank: int, length: int, device: torch.device) -> Tensor:
    """Returns the positions (length / ranks,), int64, of a row of `length` that `rank` holds, in the order in which it holds
    them."""
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in order.spans(rank, length)])


def gathered_places(order: SequenceOrder, length: int, device: torch.device) -> Tensor:
    """Returns the positions (length,), int64, of a row that is gathered in rank order."""
    return torch.cat([held_places(order, rank, length, device) for rank in range(order.ranks)])


def gathered_documents(documents: Tensor | None, ranks: Ranks) -> Tensor | None:
    """Gathers documents (B, T) of each rank into (B, ranks * T), in rank order."""
    return None if documents is None else all_gather(documents.t(), ranks, 0).t()


def held(order: SequenceOrder, rank: int, tensor: Tensor) -> Tensor:
    """Returns the part of rows (B, length) that `rank` holds."""
    spans = order.spans(rank, tensor.shape[1])
    return torch.cat([tensor[:, span.start : span.stop] for span in spans], dim=1)


def options_of(soft_cap: float | None, sinks: Tensor | None) -> dict[str, Any]:
    """Returns the arguments of a call that are used, because a core without them has no such arguments."""
    options = {"soft_cap": soft_cap, "sinks": sinks}
    return {name: value for name, value in options.items() if value is not None}


class Alone(NamedTuple):
    """The result of the model's own core for a call that is not split over ranks."""

    shared: Any


def prepare_alone(inner: Any, slots: Tensor, extent: int, window: int | None) -> Alone:
    """Prepares queries at `slots` (B, T) of a cache with `extent` slots in use.

    Raises:
        ValueError: the model's own core does not support a cache.
    """
    if not hasattr(inner, "prepare_cached"):
        raise ValueError(f"the attention core {type(inner).__name__} does not support a cache; generate without one")
    return Alone(inner.prepare_cached(slots, extent, window))


def attend_alone(inner: AttentionCore, q: Tensor, k: Tensor, v: Tensor, alone: Alone, scale: float, **options: Any) -> Tensor:
    """Computes attention without other ranks: q (B, heads, T, head_dim), k and v of `extent` slots -> (B, heads, T, width)."""
    return inner(q, k, v, alone.shared, scale, **options)
