"""`[model.prediction]`: further tokens that are predicted in training. Without the table only the next one is."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt

from forge_core.component import IDENTITY, Component, Slot


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Modules that predict the tokens behind the next one, each from what the one before it made (DeepSeek-V3, 2024,
    section 2.2).

    They add weight / depth times the sum of their losses to what is minimised, and are left out of evaluation and of folders in
    the Hugging Face format.
    """

    key_class: ClassVar = IDENTITY

    depth: Annotated[int, Gt(0)] = 1
    """Further tokens: module k predicts the token k + 1 places on, with a block of its own, as the layers' would go on."""
    weight: Annotated[float, Gt(0)] = 0.3
    """Weight of the mean of the modules' losses; each is a sum over its labels, divided by the number of labels of the next
    token."""
    schedule: Annotated[Component | None, Slot("forge.schedules")] = None
    """Factor on `weight` over the run, such as { name = "multi_step", at = [0.68], factors = [0.333] }; 1 when absent."""
