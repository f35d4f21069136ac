"""What each hook of a run costs, and a whole run over the bare steps in it; in one process, in turns.

    python benchmarks/train/hooks.py [--rounds 15] [--steps 10] [--threads 1] [--smoke]

One run is assembled as `forge-train run` does it, and its loop is run for a few steps at a time: without hooks, with one of them,
with the two that every preset has. A figure is the time with over the time without, in the same round; `bare` is step and update
alone, on the same batches. Nothing is saved or evaluated: those take as long as they take, when they are due.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from forge_core.registry import Registry
from forge_parallel.step.reduce import clip_grad_norm
from forge_train.process.ranks import JobRanks
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from forge_train.run.run import Run
from forge_train.run.start import start_run

RECIPE = """
[model]
name = "decoder"
dim = {dim}
layers = {layers}
heads = 4
vocab_size = 4096
max_length = 256

[data]
sequence_length = {length}
sources = [{{ name = "random", vocab_size = 4096, tokens = 400000, document = 300 }}]

[train]
max_steps = 1000000
global_batch = 4
micro_batch = 4
threads = {threads}
collect_every = "none"

[precision]
compute = "fp32"

[schedule]
name = "constant"
"""
HOOKS = {
    "log, a line in 10 steps": {"name": "log"},
    "log, a line in each": {"name": "log", "every": 1},
    "progress": {"name": "progress"},
    "norms, in each step": {"name": "norms", "every": 1},
    "ema": {"name": "ema"},
    "replicas, in 10 steps": {"name": "replicas", "every": 10},
}
DEFAULTS = ("log, a line in 10 steps", "progress")


def assembled(directory: Path, smoke: bool, threads: int) -> tuple[Run, dict[str, Any]]:
    """The run without hooks, and every hook of `HOOKS`, built for it."""
    sizes = {"dim": 64, "layers": 2, "length": 32} if smoke else {"dim": 256, "layers": 6, "length": 256}
    recipe = directory / "recipe.toml"
    recipe.write_text(RECIPE.format(**sizes, threads=threads))
    registry = Registry()
    resolved = load_recipe(recipe, [f"--job.dir={directory / 'run'}"], 1, registry)
    run = start_run(resolved, JobRanks())
    hooks = {}
    for name, table in HOOKS.items():
        settings = {key: value for key, value in table.items() if key != "name"}
        hooks[name] = registry.load("forge.hooks", str(table["name"]))(**settings).build()
        hooks[name].check(run)
        hooks[name].start(run)
    return run, hooks


def looped(run: Run, hooks: Sequence[Any], steps: int) -> float:
    """Seconds of some steps of the loop; hooks do not start or finish in them."""
    quiet = [_Running(hook) for hook in hooks]
    run.hooks[:], run.stop.max_steps = quiet, run.state.step + steps  # type: ignore[assignment]
    began = time.perf_counter()
    fit(run)
    return time.perf_counter() - began


class _Running:
    """A hook in the middle of a run."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def start(self, run: Run) -> None:
        """Did before."""

    def finish(self, run: Run) -> None:
        """Does later."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)


def bare(run: Run, steps: int) -> float:
    """Seconds of step and update alone."""
    drawn = run.data.from_cursor(run.state.cursor)
    began = time.perf_counter()
    for _ in range(steps):
        batches, _ = next(drawn)
        result = run.step(batches)
        clip_grad_norm(run.model, result.norm, 1.0)
        run.optimizer.step(result.skip)
        run.optimizer.zero_grad()
        result.numbers()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    rounds, steps = (2, 2) if arguments.smoke else (arguments.rounds, arguments.steps)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {arguments.threads} threads, {rounds} x {steps} steps")
    with tempfile.TemporaryDirectory() as directory:
        run, hooks = assembled(Path(directory), arguments.smoke, arguments.threads)
        sides: dict[str, Callable[[], float]] = {
            name: lambda hook=hook: looped(run, [hook], steps) for name, hook in hooks.items()
        }
        sides["default hooks"] = lambda: looped(run, [hooks[name] for name in DEFAULTS], steps)
        sides["bare"] = lambda: bare(run, steps)
        for side in sides.values():
            side()
        ratios: dict[str, list[float]] = {name: [] for name in sides}
        alone = []
        for index in range(rounds):
            order = [*sides.items()]
            order = order[index % len(order) :] + order[: index % len(order)]
            alone.append(looped(run, [], steps))
            for name, side in order:
                ratios[name].append(side() / alone[-1])
    print(f"a step without hooks: {1000 * statistics.median(alone) / steps:.1f} ms; with over without, quartiles:")
    for name, found in ratios.items():
        low, middle, high = (sorted(found)[int(part * (len(found) - 1))] for part in (0.25, 0.5, 0.75))
        print(f"{name:26} {middle:.3f}  {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
