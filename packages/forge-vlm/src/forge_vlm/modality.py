"""Which modality a token belongs to: a function of its id alone, so that every part of a model can tell without being told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TEXT = "text"
"""The modality of every id that no other one claims."""


@dataclass(frozen=True)
class Modalities:
    """Ranges of ids by modality. Their order means nothing: names are sorted, and text is first.

    Attributes:
        ranges: name -> (first id, one past the last). One id is a placeholder, whose vector comes from an encoder; more are
            discrete tokens, such as those of a quantized image (Chameleon, 2024).
    """

    ranges: Mapping[str, tuple[int, int]]

    @property
    def names(self) -> tuple[str, ...]:
        """Text, then the others by name."""
        return (TEXT, *sorted(self.ranges))

    def fault(self, vocab_size: int) -> str:
        """Why these ranges cannot be those of a model; empty when they can."""
        if TEXT in self.ranges:
            return f"modality {TEXT!r} is every id that others do not claim; remove it"
        end, before = 0, ""
        for name, (first, last) in sorted(self.ranges.items(), key=lambda item: item[1]):
            if not 0 < first < last <= vocab_size:
                return f"modality {name!r} has ids {first} to {last}; give 0 < first < end <= vocab_size {vocab_size}"
            if first < end:
                return f"modalities {before!r} and {name!r} share ids from {first} on"
            end, before = last, name
        return ""

    def of(self, tokens: "Tensor") -> "Tensor":
        """(B, T) ids -> (B, T) int64 places in `names`."""
        found = tokens.new_zeros(tokens.shape)
        for place, name in enumerate(self.names[1:], 1):
            first, end = self.ranges[name]
            found = found.masked_fill((tokens >= first) & (tokens < end), place)
        return found
