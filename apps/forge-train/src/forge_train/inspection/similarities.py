"""Similarities of stored activations: between the layers of one store, of two, or of many to the last one."""

from collections.abc import Iterator, Sequence

import torch

from forge_core.errors import ForgeError
from forge_models.interp.similarity.linear import MEASURES
from forge_models.interp.similarity.moments import Moments
from forge_models.interp.store.read import ActivationStore

ROWS = 4096
"""Rows in memory at a time."""
INDEX = ("input", "position", "token")


def between(left: ActivationStore, right: ActivationStore, measure: str) -> list[list[float]]:
    """Every inner value of the one store against every one of the other.

    Raises:
        ForgeError: they are of different tokens, or something cannot be compared.
    """
    refuse_other_tokens(left, right)
    return [[similarity_of(left, mine, right, other, measure) for other in right.names] for mine in left.names]


def to_the_last(stores: Sequence[ActivationStore], measure: str) -> list[list[float]]:
    """For each inner value, the one in every store against the same one in the last store."""
    last = stores[-1]
    for store in stores:
        refuse_other_tokens(store, last)
        if store.names != last.names:
            raise ForgeError(f"{store.folder} and {last.folder} hold different inner values; capture the same ones")
    return [[similarity_of(store, name, last, name, measure) for store in stores] for name in last.names]


def similarity_of(left: ActivationStore, mine: str, right: ActivationStore, other: str, measure: str) -> float:
    """One pair, in one pass over the rows. Values with heads are compared over all heads together."""
    moments: Moments | None = None
    for start in range(0, left.rows, ROWS):
        stop = min(start + ROWS, left.rows)
        sums = Moments.of(*(store.read(name, start, stop).flatten(1) for store, name in ((left, mine), (right, other))))
        moments = sums if moments is None else moments + sums
    if moments is None:
        raise ForgeError(f"{left.folder} has no rows")
    return float(MEASURES[measure](moments))


def refuse_other_tokens(left: ActivationStore, right: ActivationStore) -> None:
    """Raises `ForgeError` unless both stores have rows of the same tokens."""
    if left is right:
        return
    if left.rows != right.rows or any(not torch.equal(a, b) for a, b in _index(left, right)):
        raise ForgeError(f"{left.folder} and {right.folder} are of different tokens; capture both over the same text")


def _index(left: ActivationStore, right: ActivationStore) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for name in INDEX:
        yield left.read(name), right.read(name)
