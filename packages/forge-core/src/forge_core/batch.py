"""What a loader hands to a step. Plain data: importing it needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
"""Label of a position without loss, as in torch.nn.functional.cross_entropy."""

PADDING = -1
"""Document of a position that holds no token. Not the same as `IGNORE`: a prompt without loss is read all the same."""


def _none() -> "Mapping[str, Tensor]":
    return MappingProxyType({})


@dataclass(frozen=True)
class Batch:
    """Rows of one micro-batch on one rank.

    Attributes:
        tokens: (B, T) int64.
        labels: (B, T) int64, already shifted: the logits at t are scored against labels[:, t]; `IGNORE` = no loss.
        positions: (B, T) int32 position of each token inside its document, or None when each row is one document.
        documents: (B, T) int32 number of the document inside its row, `PADDING` where there is none; or None when each
            row is one document.
        extras: further inputs that a model declares it needs.
        samples: global sample number of each row, for provenance.
    """

    tokens: "Tensor"
    labels: "Tensor"
    positions: "Tensor | None" = None
    documents: "Tensor | None" = None
    extras: "Mapping[str, Tensor]" = field(default_factory=_none)
    samples: tuple[int, ...] = ()

    def to(self, device: str) -> "Batch":
        """The same batch on `device`; copies are asynchronous where the memory is pinned."""

        def move(tensor: "Tensor") -> "Tensor":
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            tokens=move(self.tokens),
            labels=move(self.labels),
            positions=None if self.positions is None else move(self.positions),
            documents=None if self.documents is None else move(self.documents),
            extras={name: move(tensor) for name, tensor in self.extras.items()},
        )
