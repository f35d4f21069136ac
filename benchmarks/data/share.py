"""The loader's share of a training step: how long the loop waits for its batches, beside the whole of the step.

    python benchmarks/data/share.py [--recipe demo] [--steps 60] [--json] [-- --section.key=value ...]

Runs the recipe as `forge-train run` does, on this process, in a directory of its own. Of every step but the first five the time
inside the stream is taken and that from batch to batch, without logging, evaluation and saving, which are left out of the recipe.
Printed are medians with their middle half, and the share of all waiting in all steps.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge_core.registry import Registry
from forge_train.directory import claim, run_directory
from forge_train.process.ranks import JobRanks
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from forge_train.run.start import start_run

WARM = 5


class Timed:
    """A stream that notes when the loop asks for batches and when it gets them."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.waits: list[float] = []
        self.asked: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def from_cursor(self, cursor: Any) -> Iterator[Any]:
        """As the stream's."""
        steps = iter(self._stream.from_cursor(cursor))
        while True:
            began = time.perf_counter()
            found = next(steps, None)
            self.waits.append(time.perf_counter() - began)
            self.asked.append(began)
            if found is None:
                return
            yield found


def measure(recipe: str, steps: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    registry = Registry()
    chosen = [f"--job.dir={folder}", f"--train.max_steps={steps}", "--hooks=[]", *overrides]
    resolved = load_recipe(recipe, chosen, 1, registry)
    directory = run_directory(resolved.job)
    claim(directory)
    run = start_run(resolved, JobRanks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    timed = Timed(run.data)
    run.training.data = timed  # type: ignore[assignment]
    fit(run)
    waits, whole = np.array(timed.waits[WARM:-1]), np.diff(timed.asked)[WARM:]
    return {
        "steps": len(whole),
        "tokens_per_step": run.tokens_per_step,
        "wait_ms": [round(1e3 * value, 3) for value in np.quantile(waits, [0.25, 0.5, 0.75]).tolist()],
        "step_ms": [round(1e3 * value, 3) for value in np.quantile(whole, [0.25, 0.5, 0.75]).tolist()],
        "share_percent": round(100 * float(waits.sum() / whole.sum()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(arguments.recipe, arguments.steps, arguments.overrides, Path(name))
    sys.stdout.write(json.dumps(found) + "\n" if arguments.json else "".join(f"{key}: {value}\n" for key, value in found.items()))


if __name__ == "__main__":
    main()
