"""Runs a recipe inside this process (or this rank) and reports what happened, number by number."""

import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from forge_core.protocols.run import Hook
from forge_core.registry import Registry
from forge_parallel.launch.environment import Launch, read_launcher
from forge_parallel.model.parallel_model import full
from forge_train.process.ranks import JobRanks
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from forge_train.run.run import Run
from forge_train.run.start import start_run

TINY = """
[job]
name = "tiny"
seed = 3

[model]
name = "decoder"
dim = 16
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 24
vocab_size = 61
max_length = 32

[data]
sequence_length = 16

[[data.sources]]
name = "random"
vocab_size = 61
tokens = 4000
document = 23

[train]
max_steps = 8
threads = 1
global_batch = 8
micro_batch = 2

[precision]
compute = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[schedule]
name = "cosine"
warmup = 2

[checkpoint]
every = 3

[[hooks]]
name = "save"
"""

EXERCISES = """
[job]
name = "tiny"
seed = 3

[model]
name = "decoder"
dim = 16
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 24
vocab_size = 257
max_length = 64

[data]
sequence_length = 48
packing = "best_fit"
tokenizer = { name = "bytes" }

[[data.sources]]
name = "exercises"
count = 60
letters = 3
held_out = 0.3

[data.evaluation.held_out]
name = "exercises"
count = 60
letters = 3
split = "held_out"
held_out = 0.3

[train]
max_steps = 4
threads = 1
global_batch = 4
micro_batch = 2

[precision]
compute = "fp64"
state = "fp64"

[optimizer]
name = "adamw"
lr = 3e-3

[schedule]
name = "constant"

[checkpoint]
every = 2

[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "evaluate"
every = 2

[[hooks]]
name = "save"
"""
"""A tiny model of bytes on generated exercises, with a held-out set, in fp64."""


class Recorder(Hook):
    """Losses of every step, and its samples by content."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.samples: list[list[str]] = []

    def after_step(self, run: Any, result: Any) -> None:
        self.losses.append(result.numbers()["loss"])


class Recording:
    """A step that notes the rows it is given."""

    def __init__(self, step: Any, samples: list[list[str]]) -> None:
        self.step, self.samples = step, samples

    def __call__(self, batches: Any, stop: bool = False, trace: bool = False) -> Any:
        self.samples.append([row.tobytes().hex() for batch in batches for row in batch.tokens.numpy()])
        return self.step(batches, stop, trace)

    def evaluate(self, batches: Any, *more: Any, **named: Any) -> Any:
        return self.step.evaluate(batches, *more, **named)


CPU = torch.device("cpu")


def prepared(recipe: Path, overrides: list[str], device: torch.device = CPU) -> tuple[Run, Recorder]:
    """The assembled run of this rank, recording."""
    registry = Registry()
    where = read_launcher(os.environ) if torch.distributed.is_initialized() else Launch()
    resolved = load_recipe(recipe, overrides, where.size, registry)
    run = start_run(resolved, JobRanks(where, device))
    recorder = Recorder()
    run.hooks.append(recorder)
    run.training.step = Recording(run.step, recorder.samples)  # type: ignore[assignment]
    return run, recorder


def train(recipe: Path, overrides: list[str], device: torch.device = CPU) -> dict[str, Any]:
    """Trains to the end; what every rank saw."""
    run, recorder = prepared(recipe, overrides, device)
    reason = fit(run)
    return {
        "reason": reason,
        "step": run.state.step,
        "cursor": dict(run.state.cursor),
        "losses": recorder.losses,
        "samples": recorder.samples,
        "weights": digest(run),
    }


def digest(run: Run) -> str:
    """Of every parameter and every tensor of optimizer state, whole, bit by bit."""
    hashed = sha256()
    for name, tensor in sorted(run.model.tensors()):
        hashed.update(name.encode() + _bytes(tensor))
    for state, tensors in sorted(run.optimizer.state().items()):
        for name, tensor in sorted(tensors.items()):
            hashed.update(f"{state}/{name}".encode() + _bytes(tensor))
    return hashed.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    """Of the whole tensor; numpy has no bf16."""
    return full(tensor).reshape(-1).view(torch.uint8).numpy().tobytes()
