"""The triangular learning rate as a plugin of Forge."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from forge_core import Component


@dataclass(frozen=True, kw_only=True)
class Triangular(Component):
    """The factor rises and falls in straight lines, again and again (Smith, 2017). Peaks may shrink."""

    half: Annotated[int, Gt(0)] = 200
    """Optimizer steps from the lowest factor to the next peak, and from a peak back to the lowest factor."""
    low: Annotated[float, Ge(0), Lt(1)] = 0.1
    """The lowest factor; the first peak is 1."""
    shrink: Annotated[float, Gt(0)] = 1.0
    """Factor on the height of each peak above `low`, compared with the one before; 0.5 is "triangular2" of the paper."""

    def build(self, steps: int) -> Callable[[int], float]:
        def factor(step: int) -> float:
            cycle, within = divmod(step, 2 * self.half)
            height = 1 - abs(within / self.half - 1)
            return self.low + (1 - self.low) * height * self.shrink**cycle

        return factor
