"""Where the loss of a run is expected: a band learned from its recent steps, and when the loss has left it.

The band ends above at `median + max(6 * 1.4826 * MAD, median / 5, 0.1)` of the last 200 losses that were inside (MAD: median
absolute deviation; 1.4826 makes it the standard deviation of normal noise). The loss has *left* once 3 of 5 steps are above it,
so a single spike says nothing, and it is *back* once 3 of 5 are inside. A loss that is not finite is outside. Those outside do
not move the band, until 200 losses of one episode have been seen: then that is the new level, such as that of other data.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

WINDOW = 200
LOOK, OUTSIDE = 5, 3
DEVIATIONS, RELATIVE, ABSOLUTE = 6 * 1.4826, 0.2, 0.1

Change = Literal["left", "back", "settled"]


@dataclass
class Band:
    """Losses of steps in order; `left` is the step of the first loss outside of the present episode, None while there is none."""

    left: int | None = None
    inside: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    outside: list[float] = field(default_factory=list)
    newest: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=LOOK))

    @property
    def is_above(self) -> bool:
        """Whether the newest loss was outside."""
        return bool(self.newest) and self.newest[-1][1]

    @property
    def level(self) -> float:
        """Median of the losses inside."""
        return median(self.inside)

    @property
    def limit(self) -> float:
        """The upper end; infinite before the first loss."""
        if not self.inside:
            return math.inf
        level = self.level
        deviation = median(abs(loss - level) for loss in self.inside)
        return level + max(DEVIATIONS * deviation, RELATIVE * abs(level), ABSOLUTE)

    @property
    def first_outside(self) -> int | None:
        """The step of the first loss outside, of the present episode or of what may become one."""
        return self.left if self.left is not None else min((step for step, above in self.newest if above), default=None)

    def take(self, step: int, loss: float) -> Change | None:
        """Takes the loss of a step; what changed by it."""
        above = not math.isfinite(loss) or loss > self.limit
        self.newest.append((step, above))
        out = [at for at, outside in self.newest if outside]
        if not above:
            self.inside.append(loss)
        elif math.isfinite(loss):
            self.outside.append(loss)
        if self.left is None:
            if len(out) >= OUTSIDE:
                self.left = out[0]
                return "left"
            self.outside = self.outside[-LOOK:]
        elif len(self.outside) >= WINDOW:
            self.inside = deque(self.outside, maxlen=WINDOW)
            self._calm()
            return "settled"
        elif len(self.newest) - len(out) >= OUTSIDE:
            self._calm()
            return "back"
        return None

    def _calm(self) -> None:
        self.left = None
        self.outside.clear()
        self.newest.clear()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a run that resumes knows what its loss was: JSON."""
        return {
            "left": self.left,
            "inside": [_short(loss) for loss in self.inside],
            "outside": [_short(loss) for loss in self.outside],
            "newest": [[step, above] for step, above in self.newest],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        self.left = state["left"]
        self.inside = deque(state["inside"], maxlen=WINDOW)
        self.outside = list(state["outside"])
        self.newest = deque(((step, above) for step, above in state["newest"]), maxlen=LOOK)


def _short(loss: float) -> float:
    return float(f"{loss:.6g}")
