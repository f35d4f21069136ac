"""Evaluates the loss on held-out sets."""

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

from forge_core.batch import Batch
from forge_core.errors import DataError
from forge_core.protocols.run import Run
from forge_train.hooks.evaluation.results import metrics
from forge_train.hooks.periodic import Periodic

_log = logging.getLogger(__name__)
_SHOWN = 10
"""Missing images that a message names."""


class EvaluateHook(Periodic):
    """Evaluates every set on all ranks and logs `evaluation/NAME/loss` (nats per token) and `.../perplexity`. With the weights of
    another hook, the average for one, `NAME@ema` takes the place of the name.

    Each rank reads its own share of a set; the step sums loss and valid tokens over all ranks before it divides, so
    the result does not depend on how many ranks there are.
    """

    leisurely = True
    observes = True

    def __init__(self, every: int = 500, at_start: bool = False, weights: str = "model") -> None:
        super().__init__(every)
        self.at_start, self.weights = at_start, weights

    def check(self, run: Run) -> None:
        """Refuses sets with images whose files are gone: an evaluation that fails ends no run, which would have no result."""
        for name, held_out in run.evaluations.items():
            source: Any = getattr(held_out, "source", None)
            gone = source.missing() if hasattr(source, "missing") else []
            if gone:
                others = f" and {len(gone) - _SHOWN} others" if len(gone) > _SHOWN else ""
                raise DataError(
                    f"hook 'evaluate': held-out set {name!r} has {len(gone)} images that are missing: {', '.join(gone[:_SHOWN])}"
                    f"{others}; put them back, or remove {getattr(source, 'name', 'its store')}, which is then made again "
                    "without them as far as `skip` allows"
                )

    def start(self, run: Run) -> None:
        """Evaluates the initial weights when asked to."""
        super().start(run)
        if self.at_start and run.state.step == 0:
            self.once(run)

    def act(self, run: Run) -> None:
        """Evaluates every set; a run that is asked to stop meanwhile leaves it, without a result."""
        with nullcontext() if self.weights == "model" else run.weights(self.weights):
            self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        values: dict[str, float] = {}
        for name, held_out in run.evaluations.items():
            batches = held_out.batches(run.topology.data_rank, run.topology.data_size, run.job.train.micro_batch)
            result = run.step.evaluate(self._until_left(run, name, batches))
            if self.left:
                return
            if result.tokens == 0:
                _log.warning("evaluation set %r has no token to predict; it is skipped", name)
                continue
            results = result.loss, perplexity(result.loss)
            values |= dict(zip(metrics(name, self.weights), results, strict=True))
        if not values:
            return
        run.measured.update({metric: (run.state.step, value) for metric, value in values.items()})
        run.log({**values, "tokens": run.state.tokens})
        if run.console is not None:
            run.console.print("  ".join([f"step {run.state.step}", *_described(values)]), highlight=False)

    def _until_left(self, run: Run, name: str, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Every rank brings the same number of batches, so all of them look, and leave, before the same one."""
        for count, batch in enumerate(batches):
            if self.leaves(run, f"the evaluation of {name!r}", count):
                return
            yield batch


def perplexity(loss: float) -> float:
    """exp of a loss in nats per token; inf where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _described(values: dict[str, float]) -> list[str]:
    """`held_out loss 3.2145  perplexity 24.89`"""
    parts = []
    for key, value in values.items():
        name, _, kind = key.removeprefix("evaluation/").rpartition("/")
        parts.append(f"{name} loss {value:.4f}" if kind == "loss" else f"perplexity {value:.2f}")
    return parts
