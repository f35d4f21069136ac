"""A copy of a module for each modality: tokens are sorted by modality, each copy runs on its own, all return to their places."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from forge_models.blocks.moe.losses import Rows
from forge_models.inner_values import inside
from forge_vlm.idle import no_tokens_of, with_zero_gradient
from forge_vlm.modality import TEXT


def is_real(x: Tensor) -> bool:
    """Whether a tensor has values: one on the meta device, or of a dry run, has none."""
    return not x.is_meta and type(x) is Tensor


def even(total: int, count: int) -> list[int]:
    """Sizes of `count` parts that are as equal as can be: what is taken of tokens whose values are not known."""
    return [total // count + (place < total % count) for place in range(count)]


class Groups(NamedTuple):
    """The places of each modality's tokens.

    Attributes:
        at: by modality, (n,) int64 places in the flattened (B * T) tokens, ascending.
        back: (B * T,) int64: where in all of `at`, one after the other, each token is.
        rows: B.
        whole: number of the modality that has all tokens, so that none has to move; None where several have some.
    """

    at: tuple[Tensor, ...]
    back: Tensor
    rows: int
    whole: int | None = None

    @classmethod
    def of(cls, modality: Tensor, count: int) -> "Groups":
        """Of (B, T) numbers of modalities below `count`. The host waits for their sizes: once for a whole forward."""
        flat = modality.flatten()
        sizes = torch.bincount(flat, minlength=count).tolist() if is_real(flat) else even(len(flat), count)
        if max(sizes) == len(flat):
            every, whole = torch.arange(len(flat), device=flat.device), sizes.index(len(flat))
            return cls(tuple(every if place == whole else every[:0] for place in range(count)), every, len(modality), whole)
        order = flat.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return cls(tuple(order.split(sizes)), back, len(modality))

    def rows_of(self, place: int) -> Rows:
        """The rows of the tokens of modality number `place`, which `apart` makes one."""
        return Rows(self.at[place] // (len(self.back) // self.rows), self.rows)

    def apart(self, x: Tensor) -> list[Tensor]:
        """(B, T, ...) -> by modality (1, n, ...)."""
        flat = x.flatten(0, 1)
        if self.whole is not None:
            none = no_tokens_of(x)
            return [flat.unsqueeze(0) if place == self.whole else none for place in range(len(self.at))]
        return [flat.index_select(0, at).unsqueeze(0) for at in self.at]

    def together(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """By modality (1, n, width) -> (B, T, width) with B and T of `like`."""
        if self.whole is not None:
            rest = [part for place, part in enumerate(parts) if place != self.whole]
            return with_zero_gradient(parts[self.whole].squeeze(0).unflatten(0, like.shape[:2]), *rest)
        joined = torch.cat([part.squeeze(0) for part in parts])
        return joined.index_select(0, self.back).unflatten(0, like.shape[:2])


class ByModality(nn.ModuleDict):
    """A module of (1, n, width) tokens for each modality. One without tokens runs all the same, so that ranks never differ in
    what they exchange, and its gradient is zero, not absent."""

    def __init__(self, copies: Mapping[str, nn.Module]) -> None:
        super().__init__(copies)

    @property
    def added(self) -> tuple[str, ...]:
        """Modules in it that a text model does not have."""
        return tuple(name for name in self if name != TEXT)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """(B, T, width) -> (B, T, what the copies make)."""
        parts = zip(self.items(), groups.apart(x), strict=True)
        return groups.together([inside(f"{name}.", copy, part) for (name, copy), part in parts], x)
