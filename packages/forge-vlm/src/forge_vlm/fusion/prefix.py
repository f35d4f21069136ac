"""The prefix of a row, which sees all of itself (PaliGemma, Beyer et al., 2024), and labels in it that a model would see."""

import torch
from torch import Tensor

from forge_core.batch import IGNORE


def prefix_of(tokens: Tensor, image_token: int, documents: Tensor | None, given: Tensor | None) -> Tensor:
    """(B, T) bool: what a batch marks as its prefix (`given`); without it all up to the last image of a document."""
    if given is not None:
        return given
    here = tokens == image_token
    return _up_to_last(here if documents is None else here & (documents >= 0), documents)


def seen_labels(labels: Tensor, prefix: Tensor, documents: Tensor | None) -> Tensor:
    """(B, T) bool: labels of tokens that their place sees: of all places of a prefix but its last one."""
    both = prefix[:, :-1] & prefix[:, 1:]
    if documents is not None:
        both = both & (documents[:, :-1] == documents[:, 1:])
    seen = torch.zeros_like(prefix)
    seen[:, :-1] = both & (labels[:, :-1] != IGNORE)
    return seen


def _up_to_last(here: Tensor, documents: Tensor | None) -> Tensor:
    """(B, T) bool: places that have an image token at or behind them in their document."""
    length = here.shape[1]
    places = torch.arange(length, device=here.device).expand_as(here)
    following = places.masked_fill(~here, length).flip(1).cummin(1).values.flip(1)
    found = following < length
    if documents is None:
        return found
    return found & (documents.gather(1, following.clamp(max=length - 1)) == documents)
