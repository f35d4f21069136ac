"""A tiny run on one process: four steps of a decoder with experts on random tokens, with a hook or without."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from forge_core.config.tree import plain
from forge_core.protocols.run import Hook, Run
from forge_core.registry import Registry
from forge_train.process.ranks import JobRanks
from forge_train.recipe.load import Recipe, load_recipe
from forge_train.run.loop import fit
from forge_train.run.start import start_run

RECIPE = """
[job]
name = "trial"

[model]
name = "decoder"
dim = 16
layers = 2
heads = 2
ffn_dim = 24
vocab_size = 300
max_length = 128

[model.moe]
experts = 4
first_dense = 1

[data]
sequence_length = 32
packing = "best_fit"

[data.tokenizer]
name = "bytes"

[[data.sources]]
name = "random"
vocab_size = 257
tokens = 4000
document = 23

[data.evaluation.talk]
name = "image_jsonl"
path = "talk.jsonl"
placeholder = 299
per_image = 1
size = 8

[data.evaluation.held_out]
name = "random"
vocab_size = 257
tokens = 200
seed = 1

[train]
max_steps = 4
threads = 1
global_batch = 4
micro_batch = 2

[precision]
compute = "fp32"

[optimizer]
name = "adamw"

[schedule]
name = "constant"

[checkpoint]
every = 2
"""


TALK = '{"messages": [{"role": "", "content": "Hi"}, {"role": "assistant", "content": "!"}]}\n'
"""A held-out conversation, for hooks that let the model answer."""


@dataclass
class Trained:
    """Results of a tiny run.

    Attributes:
        beyond: attributes of the run that the hook used and that `forge_core.protocols.run.Run` does not declare.
        weights: trained parameters by name.
        state: state of the hook after the run.
    """

    beyond: set[str] = field(default_factory=set)
    weights: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Same:
    """A component as the key of a cache, by identity, because components need not be hashable."""

    component: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.component is self.component

    def __hash__(self) -> int:
        return id(self.component)


class _Watched:
    """A proxy of a run that records the use of attributes that the protocol does not declare."""

    def __init__(self, run: Any, beyond: set[str]) -> None:
        object.__setattr__(self, "_run", run)
        object.__setattr__(self, "_beyond", beyond)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Run, name) and name not in Run.__annotations__:
            self._beyond.add(name)
        return getattr(self._run, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Run.__annotations__:
            self._beyond.add(name)
        setattr(self._run, name, value)


class _Passes(Hook):
    """A hook that calls another hook with a watched run."""

    def __init__(self, hook: Hook, beyond: set[str]) -> None:
        self.hook, self.beyond = hook, beyond

    def check(self, run: Any) -> None:
        self.hook.check(self._watched(run))

    def start(self, run: Any) -> None:
        self.hook.start(self._watched(run))

    def before_step(self, run: Any) -> None:
        self.hook.before_step(self._watched(run))

    def before_update(self, run: Any, result: Any) -> None:
        self.hook.before_update(self._watched(run), result)

    def after_step(self, run: Any, result: Any) -> None:
        self.hook.after_step(self._watched(run), result)

    def finish(self, run: Any) -> None:
        self.hook.finish(self._watched(run))

    def state(self) -> Any:
        return self.hook.state()

    def load_state(self, state: Any) -> None:
        self.hook.load_state(state)

    def _watched(self, run: Any) -> Any:
        return _Watched(run, self.beyond)


@dataclass
class _Place:
    """The part of a run that exists before its model."""

    directory: Path
    job: Any
    config: Any


@contextmanager
def unstarted_run() -> "Iterator[Any]":
    """Yields a run without a model, in an empty directory, for trackers. Its `beyond` are the attributes that were used and that
    the protocol does not declare."""
    with TemporaryDirectory(prefix="forge-run-") as folder:
        directory = Path(folder) / "run"
        directory.mkdir()
        recipe = _resolved(Path(folder), Registry())
        beyond: set[str] = set()
        run = _Watched(_Place(directory, recipe.job, plain(recipe.tree)), beyond)
        object.__setattr__(run, "beyond", beyond)
        yield run


def run_with(component: Any) -> Trained:
    """Trains four steps with the hook that a component builds. The result of the last component is cached for other checks."""
    return _run_with(_Same(component))


@lru_cache(maxsize=1)
def _run_with(component: _Same) -> Trained:
    return _run(component.component.build())


@lru_cache(maxsize=1)
def run_alone() -> Trained:
    """Trains the same four steps without a hook; cached."""
    return _run(None)


def _run(hook: Hook | None) -> Trained:
    trained, threads = Trained(), torch.get_num_threads()
    with torch.random.fork_rng(devices=()), TemporaryDirectory(prefix="forge-run-") as folder:
        registry = Registry()
        recipe = _resolved(Path(folder), registry)
        run = start_run(recipe, JobRanks())
        run.hooks[:] = [] if hook is None else [_Passes(hook, trained.beyond)]
        for watched in run.hooks:
            watched.check(run)
        fit(run)
        for tracker in run.trackers:
            tracker.close()
        torch.set_num_threads(threads)  # the run sets the number of its recipe
        trained.state = {} if hook is None else dict(hook.state())
        trained.weights = {item.name: item.tensor.detach().clone() for item in run.model.trainable()}
    return trained


def _resolved(folder: Path, registry: Registry) -> Recipe:
    """Loads the recipe, after writing it and its data to a folder."""
    recipe, talk = folder / "trial.toml", folder / "talk.jsonl"
    recipe.write_text(RECIPE)
    talk.write_text(TALK)
    return load_recipe(str(recipe), [f"--job.dir={folder}/run", f"--data.evaluation.talk.path={talk}"], 1, registry)
