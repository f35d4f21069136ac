"""What a run promises around its steps: random numbers, hooks that keep state, a limit on bad steps, one failure for all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook
from forge_train.run.checkpoints import restore_hooks
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
        run.hooks = [*run.hooks, dice]
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


def test_a_hook_finds_its_state_by_type_and_order() -> None:
    hooks = [Counter(), Dice(), Counter(), Counter()]
    restore_hooks(hooks, [["Gone", {"x": 1}], ["Counter", {"count": 5}], ["Counter", {"count": 7}]])
    assert [hook.count for hook in hooks if isinstance(hook, Counter)] == [5, 7, 0]


def test_a_checkpoint_keeps_the_state_of_hooks(recipe: Path, tmp_path: Path) -> None:
    settings = [f"--job.dir={tmp_path / 'run'}", "--schedule.name=constant"]
    run, _ = prepared(recipe, [*settings, "--train.max_steps=4"])
    run.hooks = [Counter(), *run.hooks]
    fit(run)
    found, _ = prepared(recipe, settings)
    from forge_ckpt.saving.resume import newest
    from forge_ckpt.saving.world import Alone

    store = found.job.checkpoint.store.build(tmp_path / "run" / "checkpoints")
    kept = newest(store, Alone())
    assert kept is not None
    assert ["Counter", {"count": 4}] in [list(entry) for entry in kept.meta["hooks"]]


def _unprepared(recipe: Path, settings: list[str]) -> str:
    try:
        prepared(recipe, settings)
    except ForgeError as refusal:
        return str(refusal)
    return "no refusal"


def test_data_that_rank_zero_cannot_prepare_is_refused_on_every_rank(world: World, recipe: Path, tmp_path: Path) -> None:
    settings = [f"--job.dir={tmp_path / 'run'}", "--data.sources.0.tokens=9"]
    first, second = world.run(_unprepared, 2, recipe, settings, timeout=60)
    assert "9" in first
    assert second == f"rank 0 failed while preparing the data: {first}"
