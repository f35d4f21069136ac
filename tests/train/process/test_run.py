"""What a run promises around its steps: random numbers, hooks that keep state, a limit on bad steps, one failure for all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook
from forge_train.run.checkpoints import restore_hooks, states_of
from forge_train.run.loop import fit
from harness.pool import World
from train.runs import TINY, prepared


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


class Dice(Hook):
    """Draws from torch's generator in each step, as dropout would."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def before_step(self, run: Any) -> None:
        self.drawn.append(torch.rand(()).item())


def test_random_numbers_of_a_step_do_not_depend_on_where_the_run_was_cut(recipe: Path, tmp_path: Path) -> None:
    def drawn(directory: str, steps: int) -> list[float]:
        settings = [f"--job.dir={tmp_path / directory}", "--schedule.name=constant", f"--train.max_steps={steps}"]
        run, _ = prepared(recipe, settings)
        dice = Dice()
        run.hooks[:] = [*run.hooks, dice]
        torch.manual_seed(steps)  # a process starts with whatever it starts with
        fit(run)
        return dice.drawn

    whole = drawn("whole", 6)
    assert drawn("cut", 4) + drawn("cut", 6) == whole
    assert len(set(whole)) == 6


class Counter(Hook):
    def __init__(self) -> None:
        self.count = 0

    def after_step(self, run: Any, result: Any) -> None:
        self.count += 1

    def state(self) -> Mapping[str, Any]:
        return {"count": self.count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_a_hook_finds_its_state_by_key_and_order() -> None:
    hooks = [Counter(), Dice(), Counter(), Counter()]
    hooks[0].state_key = hooks[3].state_key = "mine:counter"
    saved = [["Gone", {"x": 1}], ["mine:counter", {"count": 5}], ["Silent", {}], ["Counter", {"count": 7}]]
    saved += [["mine:counter", {"count": 9}]]
    assert restore_hooks(hooks, saved) == ["Gone"]
    assert [hook.count for hook in hooks if isinstance(hook, Counter)] == [5, 7, 9]
    assert [key for key, _ in states_of(hooks)] == ["mine:counter", "Dice", "Counter", "mine:counter"]


def test_a_hook_finds_the_state_that_an_earlier_version_saved_under_another_key() -> None:
    hooks = [Counter(), Counter()]
    for hook in hooks:
        hook.state_key, hook.former_keys = "there:counter", ("here:counter", "OldCounter")
    saved = [["OldCounter", {"count": 1}], ["here:counter", {"count": 2}], ["there:counter", {"count": 3}]]
    assert restore_hooks(hooks, saved) == ["OldCounter"]
    assert [hook.count for hook in hooks] == [3, 2], "the key of today comes first, then former ones in their order"
    assert [key for key, _ in states_of(hooks)] == ["there:counter", "there:counter"]


COUNTER = """
from dataclasses import dataclass
from forge_core.component import Component
from forge_core.protocols.run import Hook


class CounterHook(Hook):
    def __init__(self, by):
        self.by, self.count = by, 0

    def after_step(self, run, result):
        self.count += self.by

    def state(self):
        return {"count": self.count}

    def load_state(self, state):
        self.count = state["count"]


@dataclass(frozen=True, kw_only=True)
class Counts(Component):
    by: int = 1

    def build(self):
        return CounterHook(self.by)
"""


@pytest.mark.parametrize("keyed", ["by the registered name", "by the class's name, as before"])
def test_every_hook_gets_its_state_back_and_what_is_dropped_is_said(
    recipe: Path, tmp_path: Path, keyed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(COUNTER)
    name = f"name='{tmp_path}/mine.py:Counts'"
    settings = [f"--job.dir={tmp_path / 'run'}", "--schedule.name=constant"]
    hooks = f"--hooks=[{{{name}}}, {{name='save'}}, {{name='replicas'}}, {{{name}, by=10}}]"
    run, _ = prepared(recipe, [*settings, hooks, "--train.max_steps=4"])
    run.hooks[2].state = lambda: {"left": True}  # type: ignore[method-assign]
    if keyed != "by the registered name":
        by_class = [(f"{type(hook).__name__.removesuffix('Hook')}Hook", hook.state) for hook in run.hooks]
        old = lambda _: [[name, dict(state())] for name, state in by_class]  # noqa: E731
        monkeypatch.setattr("forge_train.run.checkpoints.states_of", old)
    else:
        keys = [key for key, _ in states_of(run.hooks)]
        assert keys == ["mine.py:Counts", "forge-train:save", "forge-train:replicas", "mine.py:Counts", "Recorder"]
    fit(run)
    caplog.set_level("INFO")
    again, _ = prepared(recipe, [*settings, hooks])
    assert [hook.count for hook in (again.hooks[0], again.hooks[3])] == [4, 40]  # type: ignore[attr-defined]
    assert again.hooks[2].state() == {"left": True}
    assert "is dropped" not in caplog.text
    prepared(recipe, [*settings, f"--hooks=[{{{name}}}, {{name='save'}}]"])
    gone = ["mine.py:Counts", "forge-train:replicas"] if keyed == "by the registered name" else ["CounterHook", "ReplicasHook"]
    assert all(f"a state of hook {key!r}" in caplog.text for key in gone)


def test_a_checkpoint_keeps_the_state_of_hooks(recipe: Path, tmp_path: Path) -> None:
    settings = [f"--job.dir={tmp_path / 'run'}", "--schedule.name=constant"]
    run, _ = prepared(recipe, [*settings, "--train.max_steps=4"])
    run.hooks[:] = [Counter(), *run.hooks]
    fit(run)
    found, _ = prepared(recipe, settings)
    from forge_ckpt.checkpoint.read import newest
    from forge_ckpt.world import SingleProcessWorld

    store = found.job.checkpoint.store.build(tmp_path / "run" / "checkpoints")
    kept = newest(store, SingleProcessWorld())
    assert kept is not None
    assert ["Counter", {"count": 4}] in [list(entry) for entry in kept.meta["hooks"]]


def _unprepared(recipe: Path, settings: list[str]) -> str:
    try:
        prepared(recipe, settings)
    except ForgeError as refusal:
        return str(refusal)
    return "no refusal"


def test_data_that_rank_zero_cannot_prepare_is_refused_on_every_rank(world: World, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").write_text("{}")
    settings = [f"--job.dir={tmp_path / 'run'}", f"--data.sources=[{{name='store', path='{tmp_path}/store'}}]"]
    first, second = world.run(_unprepared, 2, recipe, settings, timeout=60)
    assert "manifest.json" in first
    assert second == f"rank 0 failed while preparing the data: {first}"
