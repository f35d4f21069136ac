"""Hooks of vision-language models, chosen by `[[hooks]]`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from forge_core.component import FREE, Component

if TYPE_CHECKING:
    from forge_core.protocols.run import Hook


@dataclass(frozen=True, kw_only=True)
class ModalityStatistics(Component):
    """What each modality has of a vision-language model: loss and accuracy on held-out sets, what images are worth there, shares
    of the training tokens, and the gates of cross blocks. Loads of experts by modality are what hook `routing` logs."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 500
    """Steps from one measurement to the next; one more follows the last step."""
    batches: Annotated[int, Ge(0)] = 8
    """Micro-batches of each set of `[data.evaluation]` that a rank evaluates, twice where they have images; 0 = none."""

    def build(self) -> "Hook":
        from forge_vlm.hooks.modalities import ModalitiesHook

        return ModalitiesHook(every=self.every, batches=self.batches)
