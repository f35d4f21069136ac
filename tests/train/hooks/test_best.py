"""The best checkpoint and early stopping: over a script of results, and in runs that stop and resume."""

import errno
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_ckpt.checkpoint import save
from forge_ckpt.checkpoint.locate import locate
from forge_ckpt.format.names import committed
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError, ForgeError
from forge_core.protocols.checkpoint import Piece
from forge_core.protocols.run import Hook
from forge_core.registry import Registry
from forge_parallel.launch.watch import Watch
from forge_train.hooks.evaluation import Best, EarlyStop, Improvement
from forge_train.hooks.save import Save
from forge_train.process.stop import Stop
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from forge_train.run.training import Clock, Requests
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, prepared

METRIC = "evaluation/held_out/loss"
TAIL = """
[data.evaluation.held_out]
name = "random"
vocab_size = 61
tokens = 600
seed = 1
"""
HOOKS = '[[hooks]]\nname = "evaluate"\nevery = 1\n\n[[hooks]]\nname = "early_stop"\npatience = 2\n\n[[hooks]]\nname = "best"\n\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace("[[hooks]]", HOOKS + "[[hooks]]") + TAIL)
    return path


def verdicts(values: list[float], mode: str = "min", least: float = 0.0) -> list[bool | None]:
    improvement = Improvement("m", mode, least)  # type: ignore[arg-type]
    return [
        improvement.look(SimpleNamespace(results={"m": (step, value)}, state=SimpleNamespace(step=step)))  # type: ignore[arg-type]
        for step, value in enumerate(values, 1)
    ]


def test_better_is_less_or_more_by_enough() -> None:
    assert verdicts([3.0, 2.0, 2.0, 2.5, 1.9]) == [True, True, False, False, True]
    assert verdicts([3.0, 2.0, 3.5], mode="max") == [True, False, True]
    assert verdicts([3.0, 2.9, 2.75, 2.5], least=0.2) == [True, False, True, True]
    assert verdicts([math.nan, math.inf, 2.0, math.nan, 1.0]) == [False, False, True, False, True]


def test_a_result_counts_once_and_only_at_its_step() -> None:
    improvement = Improvement("m")
    run: Any = SimpleNamespace(results={}, state=SimpleNamespace(step=3))
    assert improvement.look(run) is None
    run.results["m"] = (2, 1.0)
    assert improvement.look(run) is None
    run.results["m"] = (3, 1.0)
    assert improvement.look(run) is True and improvement.look(run) is None


def test_a_state_of_another_metric_or_mode_is_not_taken() -> None:
    kept = {"metric": "m", "mode": "min", "best": 1.0, "step": 4, "seen": 6}
    for metric, mode, taken in (("m", "min", True), ("m", "max", False), ("n", "min", False)):
        improvement = Improvement(metric, mode)  # type: ignore[arg-type]
        assert improvement.load_state(kept) == taken
        assert improvement.state() == (kept if taken else {})


class Script(Hook):
    """Takes the place of an evaluation: its results by step."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values = values

    def after_step(self, run: Any, result: Any) -> None:
        if run.state.step in self.values:
            run.results[METRIC] = (run.state.step, self.values[run.state.step])


def scripted(recipe: Path, overrides: list[str], values: dict[int, float]) -> tuple[str, int]:
    """Why a run with the recipe's hooks and such results ended, and after which step."""
    run, _ = prepared(recipe, overrides)
    run.hooks[:] = [Script(values), *run.hooks[1:]]
    return fit(run), run.state.step


def test_the_best_checkpoint_is_spared_and_named(recipe: Path, tmp_path: Path) -> None:
    """Results of steps 1 to 8; retention keeps two besides."""
    kept = tmp_path / "run" / "checkpoints"
    overrides = [f"--job.dir={tmp_path / 'run'}", "--checkpoint.keep=2", "--checkpoint.every=1"]
    values = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.9}
    scripted(recipe, [*overrides, "--train.max_steps=3", "--schedule.name=constant"], values)
    assert (kept / "best").read_text() == "step-00000002\n"
    scripted(recipe, [*overrides, "--train.max_steps=5", "--schedule.name=constant"], values)
    assert (kept / "best").read_text() == "step-00000004\n"
    assert locate(kept / "best").name == "step-00000004" and locate(kept).name == "step-00000005"
    names = [entry.name for entry in committed(path.name for path in kept.iterdir())]
    assert names == ["step-00000005", "step-00000004"], "step 2 was the best one until step 4 was durable"
    scripted(recipe, [*overrides, "--train.max_steps=8", "--schedule.name=constant"], {6: 3.5})
    assert {entry.name for entry in committed(path.name for path in kept.iterdir())} >= {"step-00000004", "step-00000008"}
    assert (kept / "best").read_text() == "step-00000004\n"


def test_a_best_step_is_saved_though_its_number_is_not_due(recipe: Path, tmp_path: Path) -> None:
    overrides = [f"--job.dir={tmp_path / 'run'}", "--checkpoint.every=100", "--train.max_steps=4", "--schedule.name=constant"]
    scripted(recipe, overrides, {1: 5.0, 2: 3.0, 3: 4.0})
    names = [entry.name for entry in committed(path.name for path in (tmp_path / "run/checkpoints").iterdir())]
    assert names == ["step-00000004", "step-00000002", "step-00000001"]


@pytest.mark.slow
def test_a_run_ends_when_patience_is_over_and_goes_on_with_more(recipe: Path, tmp_path: Path) -> None:
    values = {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.5, 5: 1.0, 6: 2.0, 7: 2.0}
    directory = f"--job.dir={tmp_path / 'run'}"
    why = f"{METRIC} did not improve on 3 of step 2 in 2 evaluations"
    assert scripted(recipe, [directory, "--schedule.name=constant"], values) == (why, 4)
    assert (tmp_path / "run/checkpoints/step-00000004").is_dir()
    assert scripted(recipe, [directory, "--schedule.name=constant"], values) == (why, 4), "again, before the first step"
    patient = recipe.with_name("patient.toml")
    patient.write_text(recipe.read_text().replace("patience = 2", "patience = 3"))
    assert scripted(patient, [directory, "--schedule.name=constant"], values) == ("finished", 8)


def test_patience_survives_a_resume(recipe: Path, tmp_path: Path) -> None:
    values = {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.5}
    directory = f"--job.dir={tmp_path / 'run'}"
    assert scripted(recipe, [directory, "--schedule.name=constant", "--train.max_steps=3"], values) == ("finished", 3)
    assert scripted(recipe, [directory, "--schedule.name=constant"], values)[1] == 4


def _ended(recipe: Path, overrides: list[str]) -> tuple[str, int, dict[str, Any]]:
    run, _ = prepared(recipe, overrides)
    return fit(run), run.state.step, dict(run.requests.marks)


def test_all_ranks_decide_alike(world: World, recipe: Path, tmp_path: Path) -> None:
    """A rate that is far too high: evaluations get worse, and both ranks leave after the same step."""
    recipe.write_text(recipe.read_text().replace("lr = 1e-2", "lr = 3.0"))
    first, second = world.run(_ended, 2, recipe, [f"--job.dir={tmp_path / 'run'}"])
    assert first == second
    assert "did not improve on" in first[0] and first[1] < 8
    name = (tmp_path / "run/checkpoints/best").read_text().strip()
    assert name == f"step-{first[2]['best']:08d}" and (tmp_path / "run/checkpoints" / name).is_dir()


def saved(store: LocalStore, step: int, **options: Any) -> str:
    value = torch.ones(3)
    return save.save(store, [Piece("w", (3,), (0,), value, True)], {}, step, SingleProcessWorld(), **options)


def test_marks_of_a_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    saved(store, 1, marks={"best": 1})
    saved(store, 2, keep=1, marks={"best": 1})
    assert (tmp_path / "step-00000001").is_dir() and locate(tmp_path / "best").name == "step-00000001"
    (tmp_path / "best").unlink()  # as if the process had died before
    saved(store, 3, keep=1, marks={"best": 1})
    assert (tmp_path / "best").read_text() == "step-00000001\n"
    saved(store, 4, keep=1, marks={"best": 9})
    assert (tmp_path / "best").read_text() == "step-00000001\n", "there is no step 9"
    assert locate(tmp_path / "best").name == "step-00000001", "what is named stays until another one is"
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="names step-00000001, which does not exist"):
        locate(tmp_path / "best")
    for wrong in ("latest", "owner", "step-00000001", "a/b", ".saving-x"):
        with pytest.raises(CheckpointError, match="cannot be the name of a mark"):
            saved(store, 5, marks={wrong: 5})


@pytest.mark.parametrize("rules", [["--checkpoint.keep=1"], ["--checkpoint.keep=1", "--checkpoint.keep_every=3"]])
@pytest.mark.parametrize("mode", fast("min", of=["min", "max"]))
def test_the_best_one_stays_under_every_rule_and_when_a_better_one_could_not_be_saved(
    recipe: Path, tmp_path: Path, mode: str, rules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of steps 1 to 8, NaN and none among them: step 2 is best, then 5, whose save fails for want of room."""
    recipe.write_text(
        recipe.read_text().replace('name = "best"', f'name = "best"\nmode = "{mode}"').replace("patience = 2", "patience = 9")
    )
    sign, kept, write = 1 if mode == "min" else -1, tmp_path / "run" / "checkpoints", LocalStore.write

    def full(store: LocalStore, path: str, chunks: Any, **more: Any) -> Any:
        if "step-00000005" in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(store, path, chunks, **more)

    monkeypatch.setattr(LocalStore, "write", full)
    values = {1: 5.0, 2: 3.0, 3: math.nan, 4: 4.0, 5: 1.0, 7: 2.0, 8: math.nan}
    overrides = [f"--job.dir={tmp_path / 'run'}", "--checkpoint.every=1", "--schedule.name=constant", *rules]
    scripted(recipe, overrides, {step: sign * value for step, value in values.items()})
    held = {entry.step for entry in committed(path.name for path in kept.iterdir())}
    assert held == {2, 8} | ({3, 6} if len(rules) > 1 else set())
    assert locate(kept / "best").name == "step-00000002"


def test_a_step_that_becomes_due_after_it_was_saved_is_saved_again() -> None:
    saves: list[int] = []
    run: Any = SimpleNamespace(
        watch=Watch(),
        state=SimpleNamespace(step=0),
        job=SimpleNamespace(checkpoint=SimpleNamespace(every=2, first=False)),
        results={},
        requests=Requests(),
        clock=Clock(),
        judge=lambda: None,
        topology=SimpleNamespace(device=torch.device("cpu")),
        stop=Stop(10),
        save=lambda: saves.append(run.state.step),
        saves=SimpleNamespace(finish=lambda: None),
    )
    hook, best = Save(), Best(metric=METRIC)
    hook.start(run)
    run.state.step = 2
    hook.after_step(run, None)  # type: ignore[arg-type]
    run.results[METRIC] = (2, 1.0)  # as an evaluation at the end of the run gives it
    for one in (best, hook):
        one.finish(run)
    assert saves == [2, 2] and not run.requests.save and run.requests.marks == {"best": 2}


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        ('name = "best"\n[[hooks]]\nname = "save"', "no earlier hook measures"),
        ('name = "evaluate"\n[[hooks]]\nname = "best"', "'best' needs hook 'save'"),
        ('name = "evaluate"\n[[hooks]]\nname = "save"\n[[hooks]]\nname = "early_stop"', "'early_stop' comes after 'save'"),
        (
            'name = "evaluate"\n[[hooks]]\nname = "best"\nmetric = "evaluation/held_out/los"\n[[hooks]]\nname = "save"',
            "did you mean 'evaluation/held_out/loss'",
        ),
    ],
)
def test_hooks_that_could_never_act_are_refused(tmp_path: Path, hooks: str, says: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(TINY.replace('[[hooks]]\nname = "save"\n', f"[[hooks]]\n{hooks}\n{TAIL}"))
    with pytest.raises(ForgeError) as refused:
        load_recipe(path, [], 1, Registry())
    assert says in str(refused.value)


def test_early_stopping_without_any_finite_result_ends_too() -> None:
    run: Any = SimpleNamespace(results={}, state=SimpleNamespace(step=0), stop=SimpleNamespace(end=lambda why: ends.append(why)))
    ends: list[str] = []
    hook = EarlyStop(metric=METRIC, patience=2)
    for step in (1, 2):
        run.state.step, run.results[METRIC] = step, (step, math.nan)
        hook.after_step(run, None)  # type: ignore[arg-type]
    assert ends == [f"{METRIC} did not improve on no finite result in 2 evaluations"]
    again = EarlyStop(metric=METRIC, patience=2)
    again.load_state(hook.state())
    assert again.state() == hook.state()
