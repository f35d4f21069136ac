"""The health of a run: skipped steps, the expected band of the loss, and when the run goes back to a checkpoint.

The upper limit of the band is `median + max(6 * 1.4826 * MAD, median / 5, 0.1)` of the last 200 losses inside the band. MAD is
the median absolute deviation; times 1.4826 it estimates the standard deviation of normal noise. The loss has *left* the band
when 3 of 5 steps are above the limit, so a single spike does not count, and it is *back* when 3 of 5 are inside. A loss that is
not finite is outside. Losses outside do not change the band until one episode has 200 of them. Then they become the new level,
for example after the data changed.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from forge_core.protocols.run import StepResult
from forge_train.process.stop import TrainingError

_log = logging.getLogger(__name__)

WINDOW = 200
LOOK, OUTSIDE = 5, 3
DEVIATIONS, RELATIVE, ABSOLUTE = 6 * 1.4826, 0.2, 0.1

Change = Literal["left", "back", "settled"]


@dataclass
class LossBand:
    """The expected band of the loss.

    Attributes:
        left: step of the first loss outside, in the current episode; None while the loss is in the band.
        inside: the newest losses inside the band.
        outside: losses of the current episode.
        newest: number of each of the last steps, and whether its loss was outside.
    """

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
        """Upper limit of the band; infinite before the first loss."""
        if not self.inside:
            return math.inf
        level = self.level
        deviation = median(abs(loss - level) for loss in self.inside)
        return level + max(DEVIATIONS * deviation, RELATIVE * abs(level), ABSOLUTE)

    @property
    def first_outside(self) -> int | None:
        """Step of the first loss outside, of the current episode or of one that may begin; None if there is none."""
        return self.left if self.left is not None else min((step for step, above in self.newest if above), default=None)

    def take(self, step: int, loss: float) -> Change | None:
        """Takes the loss of a step. Returns the change that it caused, or None."""
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
        """Returns what a checkpoint stores, so that a resumed run continues the band: JSON."""
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


SPAN = 100
"""Number of steps in which skipped steps are counted."""

_SAVES = 8
_QUIET_SECONDS = 30.0
"""Seconds between two warnings about skipped steps, after the first three."""


class RollBack(Exception):
    """The run has to go back; raised on all ranks after the same step."""


class TooManySkipped(TrainingError):
    """Too many steps were skipped; raised on all ranks after the same step."""


@dataclass
class Health:
    """Judges every step by numbers that are equal on all ranks, so all ranks end after the same step.

    Attributes:
        most: number of skipped steps among the last `SPAN` that ends the run.
        patience: number of bad steps in a row after which the run goes back; a step is bad if it was skipped or its loss is above
            the band. None: the run never goes back.
        rollbacks: number of rollbacks so far.
        lr_scale: factor on the learning rate since the last rollback.
        warns: whether this rank logs warnings; one rank does.
        skipped: numbers of the skipped steps among the last `SPAN`.
        total: number of skipped steps of the whole run, including earlier starts.
        saves: steps of the newest checkpoints that were saved, or resumed from, while the loss was in its band.
        remarks: warnings so far, for the report.
    """

    most: int = 10
    patience: int | None = None
    rollbacks: int = 0
    lr_scale: float = 1.0
    warns: bool = True
    skipped: list[int] = field(default_factory=list)
    total: int = 0
    saves: list[int] = field(default_factory=list)
    band: LossBand = field(default_factory=LossBand)
    remarks: list[str] = field(default_factory=list)
    _row: int = 0
    _said: int = 0
    _silent: int = 0
    _when: float = -math.inf

    @property
    def good(self) -> int | None:
        """Step of the newest checkpoint whose weights caused no loss outside the band; None if there is none."""
        return max(filter(self.is_before, self.saves), default=None)

    def is_before(self, step: int, just: bool = False) -> bool:
        """Whether a checkpoint of `step` is older than the weights that caused the first loss outside the band.

        Those are the weights of the step before that loss. With `just`, these weights count as well, because the data may have
        been the cause.
        """
        first = self.band.first_outside
        return first is None or step < first - 1 + just

    def after(self, step: int, result: StepResult) -> None:
        """Judges step number `step`, which is complete.

        Raises:
            TooManySkipped: too many of the last steps were skipped.
            RollBack: too many steps in a row were bad.
        """
        numbers = result.numbers()
        self._watch(step, math.inf if numbers["skipped"] else numbers["loss"])
        self._row = self._row + 1 if self.band.is_above else 0
        if self.patience is not None and self._row >= self.patience:
            raise RollBack(f"{self._row} steps in a row were bad (last: step {step}, {_named(numbers)})")
        if not numbers["skipped"]:
            return
        self.total += 1
        self.skipped = [*(at for at in self.skipped if at > step - SPAN), step]
        if len(self.skipped) >= self.most:
            raise TooManySkipped(
                f"{len(self.skipped)} of the last {min(step, SPAN)} steps had a non-finite loss or gradient norm (last: "
                f"step {step}, {_named(numbers)}); these steps did not change the weights. Lower the learning rate or check the "
                "data."
            )
        self._say_skipped(step, numbers)

    def saved(self, step: int, inside: bool) -> None:
        """Records that the checkpoint of a step is durable. `inside`: whether the loss was in its band at that step."""
        if inside and (self.band.left is None or self.is_before(step)):
            self.saves = [*self.saves[-_SAVES:], step]

    def spare(self) -> tuple[int, ...]:
        """Returns the steps that retention must keep: the good one, while losses are outside the band."""
        return () if self.band.first_outside is None or self.good is None else (self.good,)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint stores: JSON. In a checkpoint that a run may go back to, `left` of the band is None."""
        gone_back = {"rollbacks": self.rollbacks, "lr_scale": self.lr_scale}
        return {"skipped": self.total, "saves": self.saves, "band": self.band.state(), **gone_back}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Continues the state of a checkpoint of `step`; warns if the loss had left its band when it was saved."""
        self.total, self.saves = state["skipped"], list(state["saves"])
        self.rollbacks, self.lr_scale = state.get("rollbacks", 0), state.get("lr_scale", 1.0)
        self.band.load(state["band"])
        if self.band.left is None:
            self.saves.append(step)
        else:
            self.warn(
                f"the checkpoint of step {step} was saved after the loss left its expected band{self._since()}{self._back()}"
            )

    def warn(self, message: str) -> None:
        """Says something now, and again in the report."""
        self.remarks.append(message)
        if self.warns:
            _log.warning("%s", message)

    def summary(self) -> list[str]:
        """Warnings for the report."""
        count = f"{self.total} step{'s' if self.total > 1 else ''} had a non-finite loss or gradient norm"
        return [*([f"{count}; they were skipped and did not change the weights"] if self.total else []), *self.remarks]

    def _watch(self, step: int, loss: float) -> None:
        change = self.band.take(step, loss)
        if change == "left":
            self.saves = list(filter(self.is_before, self.saves))
            now = f"it is {loss:.4g} at step {step}" if math.isfinite(loss) else f"step {step} was skipped"
            self.warn(f"the loss left its expected band{self._since()}: {now}{self._back()}")
        elif change == "back":
            self.warn(f"the loss is back in its expected band: {loss:.4g} at step {step}")
        elif change == "settled":
            self.warn(
                f"the loss stayed above its expected band for {WINDOW} steps: {self.band.level:.4g} at step {step} is the "
                "expected level from now on"
            )

    def _since(self) -> str:
        if not self.band.inside:
            return f" at step {self.band.left}"
        return f" at step {self.band.left} (level {self.band.level:.4g}, limit {self.band.limit:.4g})"

    def _back(self) -> str:
        if self.good is None:
            return ". No earlier checkpoint exists; start over with --fresh and a lower learning rate"
        return (
            f". If it does not come back, resume from step {self.good}, the newest earlier checkpoint, with a lower learning "
            f"rate: --checkpoint.resume={self.good}"
        )

    def _say_skipped(self, step: int, numbers: Mapping[str, float]) -> None:
        now = time.monotonic()
        if self._said >= 3 and now - self._when < _QUIET_SECONDS:
            self._silent += 1
            return
        more = f"; {self._silent} more since the last warning" if self._silent else ""
        self._said, self._silent, self._when = self._said + 1, 0, now
        if self.warns:
            _log.warning(
                "step %d was skipped and did not change the weights: %s (%d of the last %d steps; the run ends at %d%s)",
                step, _named(numbers), len(self.skipped), SPAN, self.most, more,
            )  # fmt: skip


def _named(numbers: Mapping[str, float]) -> str:
    return f"loss {numbers['loss']:.4g}, gradient norm {numbers['grad_norm']:.4g}"
