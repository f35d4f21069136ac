"""A hook that only observes never costs a run its training; what acts on training still ends it, with a checkpoint."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook
from forge_train.process.stop import HOOK_FAILED, TrainingError
from forge_train.run import loop
from forge_train.run.checkpoints import states_of
from forge_train.run.loop import fit
from forge_train.run.observers import MOST
from train.runs import TINY, Recorder, digest, prepared

METHODS = ("start", "before_step", "before_update", "after_step", "finish")
RECIPE = TINY.replace('[[hooks]]\nname = "save"', '[[hooks]]\nname = "ema"\n[[hooks]]\nname = "save"')
ROUNDING = ["--precision.compute=bf16", "--precision.state=bf16"]
"""The optimizer then rounds by the generator of torch, so that a number drawn elsewhere shows in the weights."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


class Rude(Hook):
    """Leaves everything that it touches half done, and fails."""

    observes = True

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def _fail(self, run: Any, method: str) -> None:
        if self.where != method:
            return
        self.calls += 1
        torch.rand(3), random.random(), np.random.rand()
        torch.set_grad_enabled(False)
        for part in run.model.parts:
            part.eval()
        with run.weights("ema"), run.model.inference(whole_sequences=True):
            raise ValueError("not today")

    def start(self, run: Any) -> None:
        self._fail(run, "start")

    def before_step(self, run: Any) -> None:
        self._fail(run, "before_step")

    def before_update(self, run: Any, result: Any) -> None:
        self._fail(run, "before_update")

    def after_step(self, run: Any, result: Any) -> None:
        for part in run.model.parts if self.where == "after_step" else ():
            for parameter in part.parameters():
                parameter.grad = torch.ones_like(parameter)
        self._fail(run, "after_step")

    def finish(self, run: Any) -> None:
        self._fail(run, "finish")


class Generators(Hook):
    """Notes what the generators of all libraries give after each step, without moving them."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def after_step(self, run: Any, result: Any) -> None:
        array = np.random.get_state()
        self.found.append((torch.get_rng_state().sum().item(), hash(random.getstate()), array[1].sum().item(), array[2]))


def trained(recipe: Path, folder: Path, hooks: list[Hook]) -> tuple[Any, Recorder, Generators]:
    random.seed(1)
    np.random.seed(1)
    run, recorder = prepared(recipe, [f"--job.dir={folder}", *ROUNDING])
    generators = Generators()
    run.hooks[:] = [*hooks, *run.hooks, generators]
    fit(run)
    return run, recorder, generators


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float], list[Any]]:
    folder = tmp_path_factory.mktemp("without")
    (folder / "tiny.toml").write_text(RECIPE)
    run, recorder, generators = trained(folder / "tiny.toml", folder / "run", [])
    return digest(run), recorder.losses, generators.found


@pytest.mark.parametrize("method", METHODS)
def test_trials_c1_training_after_a_failing_observer_is_bitwise_that_without_it(
    method: str, recipe: Path, tmp_path: Path, without: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hook = Rude(method)
    run, recorder, generators = trained(recipe, tmp_path / "run", [hook])
    assert (digest(run), recorder.losses, generators.found) == without
    assert torch.is_grad_enabled() and all(module.training for part in run.model.parts for module in part.modules())
    several = method not in ("start", "finish")
    assert hook.calls == (MOST if several else 1)
    assert run.calls.failures == {"Rude": hook.calls}
    assert run.calls.exit_code == (0 if method == "start" else HOOK_FAILED)
    said = [message for message in run.health.summary() if "hook 'Rude' failed in" in message]
    assert len(said) == hook.calls and f"failed in {method} at step" in said[0] and "ValueError: not today" in said[0]
    assert ("switched off" in said[-1]) == several and "switched off" not in said[0]
    assert "hook 'Rude' failed" in caplog.text


class Ends(Hook):
    """Acts on training, or passes on what does."""

    def __init__(self, error: Exception, observes: bool = False, method: str = "after_step") -> None:
        self.error, self.observes, self.method = error, observes, method

    def after_step(self, run: Any, result: Any) -> None:
        if self.method == "after_step" and run.state.step == 5:
            raise self.error

    def before_update(self, run: Any, result: Any) -> None:
        if self.method == "before_update" and run.state.step == 4:
            raise self.error


def ended(recipe: Path, folder: Path, hook: Hook) -> int | None:
    """The step of the newest checkpoint after the error of a hook that ended the run."""
    run, _ = prepared(recipe, [f"--job.dir={folder}"])
    run.hooks[:] = [hook, *run.hooks]
    with (
        mock.patch.object(loop, "start_run", lambda *_, **__: run),
        pytest.raises(type(hook.error)),  # type: ignore[attr-defined]
    ):
        loop.train(run.decided.recipe, run.ranks)
    again, _ = prepared(recipe, [f"--job.dir={folder}"])
    assert again.state.step == 0 or again.resumed
    return again.state.step


def test_trials_c1_before_an_error_ends_a_run_a_good_state_is_saved(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saved are steps 3, 6, ...; an acting hook fails after step 5."""
    assert ended(recipe, tmp_path / "a", Ends(ValueError("it acts"))) == 5
    assert "hook 'Ends' failed in after_step at step 5" in caplog.text and "step 5 was saved before the error" in caplog.text
    assert ended(recipe, tmp_path / "b", Ends(ForgeError("it refuses"))) == 5


def test_a_state_that_is_not_whole_or_not_good_is_not_saved(recipe: Path, tmp_path: Path) -> None:
    assert ended(recipe, tmp_path / "a", Ends(ValueError("half a step"), method="before_update")) == 3
    assert ended(recipe, tmp_path / "b", Ends(TrainingError("bad numbers"))) == 3


@pytest.mark.parametrize("error", [TrainingError("bad numbers"), torch.distributed.DistNetworkError("gone")])
def test_what_is_not_the_observers_fault_passes_through_it(error: Exception, recipe: Path, tmp_path: Path) -> None:
    ended(recipe, tmp_path / "run", Ends(error, observes=True))


def test_an_observer_that_cannot_say_its_state_costs_no_checkpoint(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent(Hook):
        def __init__(self, observes: bool) -> None:
            self.observes = observes

        def state(self) -> Any:
            raise KeyError("nothing")

    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}"])
    run.hooks[:] = [Silent(observes=True), *run.hooks]
    fit(run)
    assert "hook 'Silent' has no state in this checkpoint: KeyError" in caplog.text
    with pytest.raises(KeyError):
        states_of([Silent(observes=False)])


FILE = '''
import os
from dataclasses import dataclass

import torch

from forge_core.component import Component
from forge_core.protocols.run import Hook


class FailsHook(Hook):
    observes = True

    def __init__(self, kind):
        self.kind = kind

    def after_step(self, run, result):
        rank = run.topology.rank
        if self.kind == "all":
            run.topology.all_reduce(torch.ones(1))
            raise ValueError("on all ranks")
        if self.kind == "after" and run.state.step in (2, 4, 5, 6):
            run.topology.all_reduce(torch.ones(1))
            if rank == 1:
                raise ValueError("after what is exchanged")
        if self.kind == "before" and run.state.step == 5:
            if rank == 1:
                raise ValueError("before what is exchanged")
            run.topology.all_reduce(torch.ones(1))


@dataclass(frozen=True, kw_only=True)
class Fails(Component):
    """Fails."""

    kind: str = "all"

    def build(self):
        return FailsHook(self.kind)
'''


def on_two_ranks(folder: Path, kinds: tuple[str, ...]) -> tuple[subprocess.CompletedProcess[str], float]:
    (folder / "mine.py").write_text(FILE)
    hooks = "".join(f'\n[[hooks]]\nname = "./mine.py:Fails"\nkind = "{kind}"\n' for kind in kinds)
    (folder / "tiny.toml").write_text(TINY + hooks)
    command = [sys.executable, "-m", "forge_train", "run", "tiny.toml", "--processes=2", "--parallel.dp_shard=2"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--parallel.patience=3"], cwd=folder, capture_output=True, text=True, timeout=200, env={**os.environ}
    )
    return done, time.monotonic() - began


@pytest.mark.slow
def test_ranks_go_on_together_after_a_failure_of_all_or_of_one(tmp_path: Path, recipe: Path) -> None:
    """One rank alone never switches a hook off, since the others call it."""
    done, _ = on_two_ranks(tmp_path, ("all", "after"))
    assert done.returncode == HOOK_FAILED, done.stderr
    said = done.stdout + done.stderr
    assert "finished after step 8" in said
    assert said.count("hook 'Fails' failed in after_step") >= MOST and "on rank 1 alone" in said
    alone, _ = prepared(recipe, [f"--job.dir={tmp_path / 'alone'}"])
    fit(alone)
    both, _ = prepared(tmp_path / "tiny.toml", [f"--job.dir={tmp_path / 'runs' / 'tiny'}", "--hooks=[{name='save'}]"])
    assert both.state.step == 8
    found = dict(both.model.tensors())
    for name, tensor in alone.model.tensors():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_rank_that_others_wait_for_ends_the_run_and_is_named(tmp_path: Path) -> None:
    done, seconds = on_two_ranks(tmp_path, ("before",))
    said = done.stdout + done.stderr
    assert done.returncode not in (0, HOOK_FAILED), said
    assert "hook 'Fails' failed in after_step at step 5: ValueError: before what is exchanged" in said
    assert "other ranks wait for this rank inside the hook" in said
    assert seconds < 120
    again, _ = prepared(tmp_path / "tiny.toml", [f"--job.dir={tmp_path / 'runs' / 'tiny'}", "--hooks=[{name='save'}]"])
    assert again.state.step == 3, "the newest checkpoint of the recipe"
