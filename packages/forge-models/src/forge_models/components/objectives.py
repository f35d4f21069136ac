"""The loss to minimize, chosen by `[objective]`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Lt

from forge_core.component import IDENTITY, Component
from forge_core.features import Feature

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_core.protocols.model import Objective


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Component):
    """Negative log-likelihood of the next token, summed over valid positions."""

    key_class: ClassVar = IDENTITY

    z_loss: Annotated[float, Ge(0)] = 0.0
    """Weight of the squared log partition function, which keeps logits from drifting (Chowdhery et al., 2022)."""

    label_smoothing: Annotated[float, Ge(0), Lt(1), Feature("label_smoothing", unless=0.0, plane="model")] = 0.0
    """Share of the target that all words have evenly (Szegedy et al., 2016). Reported losses stay those of the labels."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[CrossEntropy]":
        """With and without further terms."""
        return (cls(), cls(z_loss=0.1), cls(z_loss=0.1, label_smoothing=0.2))

    def build(self) -> "Objective":
        from forge_models import objectives

        return objectives.CrossEntropy(z_loss=self.z_loss, label_smoothing=self.label_smoothing)
