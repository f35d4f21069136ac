"""Which keys a query sees: those before it, inside its window and its document."""

from typing import Any

import torch
from torch import Tensor

from forge_core.protocols.model import PositionedTokens


def visible(distance: Tensor, window: int | None) -> Tensor:
    """True where a key that lies `distance` places before a query is seen."""
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def mask(documents: Tensor | None, length: int, window: int | None, device: Any) -> Tensor:
    """(B or 1, 1, T, T) bool of whole rows, True = visible."""
    row = PositionedTokens(torch.arange(length, device=device), documents)
    return placed_mask(row, row, window)


def placed_mask(queries: PositionedTokens, keys: PositionedTokens, window: int | None) -> Tensor:
    """(B or 1, 1, T, S) bool where T queries and S keys lie in any order."""
    seen = visible(queries.places[:, None] - keys.places[None, :], window)
    if queries.documents is None or keys.documents is None:
        return seen[None, None]
    return (seen & (queries.documents[:, :, None] == keys.documents[:, None, :])).unsqueeze(1)
