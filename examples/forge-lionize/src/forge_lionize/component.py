"""What a recipe says about Lion. Importing this needs no torch, so `forge-train check` stays quick."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from forge_core import FREE, Component


@dataclass(frozen=True, kw_only=True)
class LionConfig(Component):
    """Sign of an interpolated momentum, with decoupled weight decay (Chen et al., 2023)."""

    key_class: ClassVar = FREE

    lr: Annotated[float, Gt(0)] = 1e-4
    """Peak learning rate: what every weight moves by in one step; the schedule multiplies it."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.99)
    """Weight of the momentum in the update, and its own decay."""
    weight_decay: Annotated[float, Ge(0)] = 0.3
    """Decoupled decay of matrices and of an untied output head; embeddings, norms and biases are never decayed."""
    shards: ClassVar[str] = "elementwise"

    implementation: ClassVar[str] = "forge_lionize.lion:Lion"
