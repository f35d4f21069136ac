"""Our own format as one side of a conversion."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_core.component import Component

if TYPE_CHECKING:
    from forge_train.inference.forge_weights import ForgeConverter


@dataclass(frozen=True, kw_only=True)
class Forge(Component):
    """Forge's checkpoints: a run's directory, a directory of checkpoints, or one checkpoint, of any layout."""

    weights: str = "model"
    """Which weights are read: `model`, or what a hook kept next to them, such as `ema`, their average."""

    def build(self) -> "ForgeConverter":
        from forge_train.inference.forge_weights import ForgeConverter

        return ForgeConverter(self.weights)
