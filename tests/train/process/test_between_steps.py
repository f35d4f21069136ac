"""What the loop does between steps besides hooks: it collects garbage at known steps, and waits for other ranks less long."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from forge_core.protocols.run import Hook
from forge_train.run.loop import fit
from train.runs import TINY, prepared


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


class Cycle:
    """An object that only a collection ends."""

    def __init__(self) -> None:
        self.itself = self


class Littering(Hook):
    """Leaves a cycle at each step, and notes at the next one which of them are there, and the patience of the watch."""

    def __init__(self, of_before: Any) -> None:
        self.left: dict[int, Any] = {0: of_before}
        self.alive: dict[int, list[int]] = {}
        self.patience: list[float] = []

    def before_step(self, run: Any) -> None:
        self.patience.append(run.watch.timeout)
        self.alive[run.state.step + 1] = [step for step, cycle in self.left.items() if cycle() is not None]

    def after_step(self, run: Any, result: Any) -> None:
        self.left[run.state.step] = weakref.ref(Cycle())


def _littered(recipe: Path, tmp_path: Path, *settings: str) -> Littering:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=6", *settings])
    hook = Littering(weakref.ref(Cycle()))
    run.hooks[:] = [hook]
    fit(run)
    return hook


@pytest.mark.parametrize("frozen", [False, True])
def test_garbage_is_collected_before_the_first_step_and_then_every_few_ones(recipe: Path, tmp_path: Path, frozen: bool) -> None:
    """And a program that has frozen its own objects finds them frozen afterwards."""
    gc.unfreeze()
    try:
        if frozen:
            gc.freeze()
        before = gc.isenabled(), gc.get_freeze_count() > 100_000
        hook = _littered(recipe, tmp_path, "--train.collect_every=3")
        assert hook.alive == {1: [], 2: [1], 3: [1, 2], 4: [], 5: [4], 6: [4, 5]}
        assert (gc.isenabled(), gc.get_freeze_count() > 100_000) == before == (True, frozen)
    finally:
        gc.freeze()  # as `conftest.py` does


def test_without_a_plan_python_collects_as_it_likes_and_with_one_what_was_there_is_frozen(recipe: Path, tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []

    class Asking(Hook):
        def before_step(self, run: Any) -> None:
            seen.append((gc.isenabled(), gc.get_freeze_count() > 100_000))

    gc.unfreeze()
    try:
        for settings in (["--train.collect_every=none"], ["--job.name=planned"]):
            run, _ = prepared(recipe, [f"--job.dir={tmp_path / str(len(seen))}", "--train.max_steps=3", *settings])
            run.hooks[:] = [Asking()]
            fit(run)
    finally:
        gc.freeze()  # as `conftest.py` does
    assert seen == [(True, False)] * 3 + [(False, True)] * 3


@pytest.mark.parametrize(("settings", "later"), [(["--parallel.step_timeout=7"], 7.0), ([], 600.0)])
def test_after_the_first_step_ranks_wait_as_long_as_for_a_step(
    recipe: Path, tmp_path: Path, settings: list[str], later: float
) -> None:
    assert _littered(recipe, tmp_path, *settings).patience == [600.0, *[later] * 5]
