"""Step 0 is saved on request, the last step exactly once, and retention goes by rules and by hours of training over restarts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ckpt.checkpoint.read import newest
from forge_ckpt.checkpoint.retention import SECONDS
from forge_ckpt.format.names import committed
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_parallel.model.parallel_model import full
from forge_train.run.loop import fit
from train.runs import TINY, prepared


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def settings(tmp_path: Path, *more: str) -> list[str]:
    return [f"--job.dir={tmp_path / 'run'}", "--schedule.name=constant", *more]


def noted(run: Any, save: Any) -> str:
    """The name of what a run saves."""
    save()
    assert run.health.saves[-1] == run.state.step, "it is durable"
    return f"step-{run.state.step:08d}"


def saves(recipe: Path, given: list[str]) -> list[str]:
    """Names of the checkpoints that one start saved, in order."""
    run, _ = prepared(recipe, given)
    made, save = [], run.save
    run.save = lambda: made.append(noted(run, save))
    fit(run)
    return made


def weights(run: Any) -> dict[str, torch.Tensor]:
    return {name: full(tensor).clone() for name, tensor in run.model.parameters_held()}


@pytest.mark.parametrize("every", [0, 3])
def test_the_last_step_is_saved_exactly_once(recipe: Path, tmp_path: Path, every: int) -> None:
    made = saves(recipe, settings(tmp_path, "--train.max_steps=6", f"--checkpoint.every={every}", "--checkpoint.keep=0"))
    due = [f"step-{step:08d}" for step in range(every, 6, every)] if every else []
    assert made == [*due, "step-00000006"]
    assert saves(recipe, settings(tmp_path, "--train.max_steps=6", f"--checkpoint.every={every}")) == [], "it is complete"


def test_step_0_is_saved_on_request_and_once(recipe: Path, tmp_path: Path) -> None:
    first = settings(tmp_path, "--checkpoint.first=true", "--checkpoint.every=0", "--train.max_steps=2")
    run, _ = prepared(recipe, first)
    initial, save = weights(run), run.save

    def dies() -> None:
        save()
        raise KeyboardInterrupt

    run.save = dies
    with pytest.raises(KeyboardInterrupt):
        fit(run)
    store = LocalStore(tmp_path / "run/checkpoints")
    assert [entry.name for entry in committed(store.list())] == ["step-00000000"]
    again, _ = prepared(recipe, first)
    assert again.resumed and again.state.step == 0
    assert all(torch.equal(tensor, initial[name]) for name, tensor in weights(again).items())
    made, save_again = [], again.save
    again.save = lambda: made.append(noted(again, save_again))
    fit(again)
    assert made == ["step-00000002"], "step 0 is there already"
    other = tmp_path / "other"
    plain, _ = prepared(recipe, [f"--job.dir={other}", *(key for key in first[1:] if "first" not in key)])
    fit(plain)
    assert [entry.step for entry in committed(LocalStore(other / "checkpoints").list())] == [2]
    assert all(torch.equal(tensor, weights(plain)[name]) for name, tensor in weights(again).items())


def test_the_rules_of_a_recipe_are_those_of_its_run(recipe: Path, tmp_path: Path) -> None:
    keys = ["--checkpoint.first=true", "--checkpoint.every=1", "--checkpoint.keep=1", "--checkpoint.keep_every=5"]
    saves(recipe, settings(tmp_path, *keys, "--checkpoint.keep_log_spaced=2", "--train.max_steps=8"))
    left = [entry.step for entry in committed(LocalStore(tmp_path / "run/checkpoints").list())]
    assert left == [8, 6, 5, 4, 3, 2, 0]  # the last; 0 and 5; 2 and 1, 2 and 4 steps after it


def test_seconds_of_training_add_up_over_starts(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of the clock here is an hour; the day between the starts does not count."""
    from forge_train.run import training as runs

    now = [1000.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    given = settings(tmp_path, "--checkpoint.every=1", "--checkpoint.keep=1", "--checkpoint.keep_hours=3")
    store, recorded = LocalStore(tmp_path / "run/checkpoints"), {}
    for steps in (4, 8):
        run, _ = prepared(recipe, [*given, f"--train.max_steps={steps}"])
        run.clock.started, update = now[0], run.update

        def hour(result: Any, update: Any = update) -> None:
            now[0] += 3600.0
            update(result)

        run.update = hour  # type: ignore[method-assign]
        fit(run)
        found = newest(store, SingleProcessWorld())
        assert found is not None
        recorded[found.step] = found.meta[SECONDS]
        now[0] += 86400.0
    assert recorded == {4: 4 * 3600.0, 8: 8 * 3600.0}
    assert [entry.step for entry in committed(store.list())] == [8, 6, 3, 1]
