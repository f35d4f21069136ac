"""`[model.mtp]`: multi-token prediction (MTP). Without the table only the next token is predicted."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt

from forge_core.component import IDENTITY, Component, Slot


@dataclass(frozen=True, kw_only=True)
class MTP:
    """MTP modules: each predicts one token beyond the next, from the hidden states of the module before it (DeepSeek-V3,
    2024, section 2.2).

    They add weight / depth times the sum of their losses to the minimized loss. Evaluation and folders in the Hugging Face
    format leave them out.
    """

    key_class: ClassVar = IDENTITY

    depth: Annotated[int, Gt(0)] = 1
    """Number of modules: module k predicts the token k + 1 places on, with a block made as that of layer layers + k - 1."""
    weight: Annotated[float, Gt(0)] = 0.3
    """Weight of the mean of the modules' losses; each is a sum over its labels, divided by the number of labels of the next
    token."""
    schedule: Annotated[Component | None, Slot("forge.schedules")] = None
    """Factor on `weight` over the run, such as { name = "multi_step", at = [0.68], factors = [0.333] }; 1 when absent."""
