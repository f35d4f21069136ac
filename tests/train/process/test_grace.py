"""A stop with too little time for a save: nothing is begun, it is said, and the run ends as one that can go on."""

import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest

from forge_ckpt.checkpoint.read import newest
from forge_ckpt.store.local import LocalStore
from forge_core.protocols.run import Hook
from forge_train.process.stop import STOPPED
from forge_train.run import saves
from forge_train.run.loop import fit
from forge_train.run.saves import END
from harness.pool import World
from train.runs import TINY, prepared


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


class Asked(Hook):
    """Gets a signal in a step, some seconds ago."""

    def __init__(self, step: int, ago: float = 0.0) -> None:
        self.step, self.ago = step, ago

    def before_step(self, run: Any) -> None:
        if run.state.step + 1 == self.step and not run.stop.signals.asked:
            run.stop.signals.asked, run.stop.signals._when = "SIGUSR1", time.monotonic() - self.ago


def stopped(recipe: Path, folder: Path, settings: list[str], at: int, ago: float = 0.0) -> tuple[str, int, list[str], bool]:
    """Why the run ended, the steps that are saved, what the report warns of, and whether the last step was left out."""
    run, _ = prepared(recipe, [f"--job.dir={folder}", "--checkpoint.every=3", *settings])
    run.hooks[:] = [Asked(at, ago), *run.hooks]
    reason = fit(run)
    run.saves.close()
    found = newest(LocalStore(folder / "checkpoints"), run.saves.checkpoints.world)  # type: ignore[attr-defined]
    return reason, found.step if found else -1, run.health.summary(), run.saves.left_out


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves take a quarter of a second."""
    write = saves.write
    monkeypatch.setattr(saves, "write", lambda *given: (time.sleep(0.25), write(*given))[1])


@pytest.mark.usefixtures("slow")
def test_fault_30_too_short_a_grace_is_said_at_the_first_save_and_kept(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        reason, step, warned, left_out = stopped(recipe, tmp_path / "run", ["--checkpoint.grace=0.1"], at=5)
    assert (reason, step, left_out) == (STOPPED, 3, True)
    first, last = warned
    took = re.match(r"a save takes (\d+\.\d+) s, but checkpoint.grace leaves 0.1 s after a signal", first)
    assert took and float(took[1]) >= 0.25  # or more, on a machine with other work
    assert last.startswith(f"step 5 is not saved: a save takes {took[1]} s")
    assert [record.getMessage() for record in caplog.records][-2:] == warned


@pytest.mark.usefixtures("slow")
def test_fault_30_a_grace_that_is_long_enough_saves(recipe: Path, tmp_path: Path) -> None:
    assert stopped(recipe, tmp_path / "run", ["--checkpoint.grace=60"], at=5) == (STOPPED, 5, [], False)
    reason, step, _, left_out = stopped(recipe, tmp_path / "late", ["--checkpoint.grace=60"], at=5, ago=59.9)
    assert (reason, step, left_out) == (STOPPED, 3, True), "most of it has passed when the step is complete"


@pytest.mark.usefixtures("slow")
def test_fault_30_the_end_that_a_scheduler_gives_counts(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(END, str(int(time.time()) + 3600))
    assert stopped(recipe, tmp_path / "early", [], at=5)[1] == 5
    monkeypatch.setattr("forge_train.run.saves.Grace.left", lambda self: self.end - time.time() - 3599.9)
    assert stopped(recipe, tmp_path / "late", [], at=5)[1] == 3


@pytest.mark.usefixtures("slow")
def test_a_step_that_was_due_by_its_number_is_left_out_too_and_one_that_is_saved_needs_no_time(
    recipe: Path, tmp_path: Path
) -> None:
    assert stopped(recipe, tmp_path / "due", ["--checkpoint.grace=0.1"], at=6)[1:][::2] == (3, True)
    assert stopped(recipe, tmp_path / "none", ["--checkpoint.grace=5"], at=3)[1::2] == (3, False), "none was measured before"


def _one_late(recipe: Path, folder: Path) -> Any:
    """Rank 1 had its signal long before rank 0."""
    run, _ = prepared(recipe, [f"--job.dir={folder}", "--checkpoint.every=3", "--checkpoint.grace=30"])
    run.saves.grace._took.append(5.0)  # type: ignore[attr-defined]
    run.hooks[:] = [Asked(5, ago=28.0 if run.topology.rank == 1 else 0.0), *run.hooks]
    return fit(run), run.state.step, run.saves.left_out, sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def test_fault_30_all_ranks_leave_the_save_out_where_one_has_no_time(world: World, recipe: Path, tmp_path: Path) -> None:
    found = world.run(_one_late, 2, recipe, tmp_path / "run", timeout=60)
    assert [rank[:3] for rank in found] == [(STOPPED, 5, True)] * 2
    assert found[0][3] == ["step-00000003"]
