"""Experts in a dry run: tokens without values choose none, so an even load is assumed.

Each token's `top_k` of `experts` are taken to be any of them with equal chance. Then a token has at least one among `count` of
them with a chance of

    1 - C(experts - count, top_k) / C(experts, top_k)

and that is the share of tokens that travels to a rank with so many. Every rank and every expert gets the same, rounded to whole
rows. A real router prefers some experts, and ranks with these receive more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import comb
from typing import Any

import torch
from torch import Tensor

from forge_core.protocols.model import ExpertDispatcher
from forge_parallel.experts.dispatchers import AllGatherDispatcher, AllToAllDispatcher, Run
from forge_parallel.experts.route import Route
from forge_parallel.placement.collectives import Ranks


def chance(experts: int, count: int, top_k: int) -> float:
    """That one of `top_k` of `experts` is among `count` certain ones."""
    return 1 - comb(experts - count, top_k) / comb(experts, top_k)


def evenly(dispatcher: ExpertDispatcher, experts: int) -> ExpertDispatcher:
    """The dispatcher of a layer of `experts`, as it works under an even load."""
    return _evenly(dispatcher, experts, experts, experts)


def _evenly(dispatcher: ExpertDispatcher, experts: int, present: int, count: int) -> ExpertDispatcher:
    """Of tokens that each have one of `present` experts, of which the dispatcher has `count`."""
    if isinstance(dispatcher, AllToAllDispatcher):
        share = count // dispatcher.ranks.size
        inner = _evenly(dispatcher.inner, experts, share, share)
        return replace(dispatcher, inner=inner, route=_EvenRoute(experts, present, share))
    if isinstance(dispatcher, AllGatherDispatcher):
        share = count // dispatcher.ranks.size if dispatcher.divided else count
        return _AsMany(replace(dispatcher, inner=_evenly(dispatcher.inner, experts, present, share)))
    return _EvenLoad(experts, present, dispatcher)


def _slots(rows: int, experts: int, present: int, count: int, top_k: int) -> int:
    """Slots of `count` experts, when `rows` tokens are all those with one of `present` experts."""
    return round(rows / chance(experts, present, top_k) * top_k * count / experts)


@dataclass(frozen=True)
class _EvenRoute:
    experts: int
    present: int
    share: int

    def __call__(self, owners: Tensor, ranks: Ranks) -> Route:
        (tokens, top_k), experts = owners.shape, self.experts
        rows = round(tokens * chance(experts, self.share, top_k) / chance(experts, self.present, top_k))
        counts = [[rows] * ranks.size, [_slots(tokens, experts, self.present, self.share, top_k)] * ranks.size]
        return Route.of(owners, ranks, lambda _: (counts, counts))


@dataclass(frozen=True)
class _AsMany:
    """Every rank brings as many tokens and slots as this one: what ranks tell each other cannot be read without memory."""

    everyone: AllGatherDispatcher

    def __call__(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        run: Run,
        count: int,
        slots: int | None = None,
        overlap_with: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """See `ExpertDispatcher`."""
        numbers = [[number] * self.everyone.ranks.size for number in (len(x), -1 if slots is None else slots)]
        return replace(self.everyone, read=lambda _: numbers)(x, experts, weights, run, count, slots, overlap_with)


@dataclass(frozen=True)
class _EvenLoad:
    """The dispatcher of one process; experts are told numbers of tokens that the host can read."""

    experts: int
    present: int
    local: ExpertDispatcher

    def __call__(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        run: Run,
        count: int,
        slots: int | None = None,
        overlap_with: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """See `ExpertDispatcher`."""
        kept = _slots(len(x), self.experts, self.present, count, experts.shape[1]) if slots is None else slots

        def run_evenly(rows: Tensor, _: Any) -> Tensor:
            total = min(kept, len(rows))
            return run(rows, _told([total // count + (expert < total % count) for expert in range(count)], rows.device))

        return self.local(x, experts, weights, run_evenly, count, slots, overlap_with)


def _told(numbers: list[int], device: torch.device) -> Tensor:
    """Numbers of tokens where the experts' products look for them, which the host can read: those without memory as well."""
    counts = torch.tensor(numbers, device=device)
    if device.type != "cpu":
        counts.tolist = lambda: numbers  # type: ignore[method-assign]
    return counts
