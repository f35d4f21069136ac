"""Results of evaluations: their names, and whether the newest is better than all before. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forge_core.protocols.run import Run

Mode = Literal["min", "max"]


def metrics(name: str, weights: str) -> tuple[str, str]:
    """Under which names loss and perplexity of a set are logged: `evaluation/NAME/loss`, for others than the model's own weights
    `evaluation/NAME@WEIGHTS/loss`."""
    at = name if weights == "model" else f"{name}@{weights}"
    return f"evaluation/{at}/loss", f"evaluation/{at}/perplexity"


@dataclass
class Improvement:
    """Follows one result of evaluations. All ranks have the same numbers, so all of them come to the same verdict.

    Attributes:
        metric: name under which it is logged, such as `evaluation/held_out/loss`.
        mode: whether less or more is better.
        least: by how much a result has to be better than the best one to count.
        best: of all results so far; None before the first. One that is not finite is none.
        step: of the best one.
        seen: step of the newest result; -1 before the first.
    """

    metric: str
    mode: Mode = "min"
    least: float = 0.0
    best: float | None = None
    step: int = 0
    seen: int = -1

    def look(self, run: Run) -> bool | None:
        """Whether the result of this step is the best; None without a result that was not looked at yet."""
        step, value = run.measured.get(self.metric, (-1, math.nan))
        if step != run.state.step or step == self.seen:
            return None
        self.seen = step
        gain = math.inf if self.best is None else (self.best - value) * (1 if self.mode == "min" else -1)
        if not math.isfinite(value) or not gain > self.least:
            return False
        self.best, self.step = value, step
        return True

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps."""
        if self.seen < 0:
            return {}
        return {"metric": self.metric, "mode": self.mode, "best": self.best, "step": self.step, "seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> bool:
        """Takes what `state` gave, and says whether it did: of another metric or mode, the best is not known."""
        if (state.get("metric"), state.get("mode")) != (self.metric, self.mode):
            return False
        self.best, self.step, self.seen = state["best"], state["step"], state["seen"]
        return True


def bits_per_byte(loss: float, tokens: int, text_bytes: float) -> float:
    """Bits that a model needs for a byte of text.

    Args:
        loss: nats per predicted token, the mean.
        tokens: that are predicted.
        text_bytes: of the text that these tokens say, and no other: see `EvaluationSet.predicted`.
    """
    return loss * tokens / math.log(2) / text_bytes
