"""Calls with a cache: it holds whole rows on every rank, so each rank attends by itself, with the model's own core."""

from typing import Any, NamedTuple

from torch import Tensor

from forge_core.protocols.model import AttentionCore


class Alone(NamedTuple):
    """What the model's own core prepared for a call that is not split."""

    shared: Any


def prepare_alone(inner: Any, slots: Tensor, extent: int, window: int | None) -> Alone:
    """For queries at `slots` (B, T) of a cache of which `extent` slots are in use.

    Raises:
        ValueError: the model's own core cannot use a cache.
    """
    if not hasattr(inner, "prepare_cached"):
        raise ValueError(f"the attention core {type(inner).__name__} cannot use a cache; generate without it")
    return Alone(inner.prepare_cached(slots, extent, window))


def attend_alone(inner: AttentionCore, q: Tensor, k: Tensor, v: Tensor, alone: Alone, *scaling: float) -> Tensor:
    """As the model without any ranks: q (B, heads, T, head_dim), k and v of all `extent` slots -> (B, heads, T, width)."""
    return inner(q, k, v, alone.shared, *scaling)
