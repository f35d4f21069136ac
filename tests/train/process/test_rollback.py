"""After bad steps a run goes back to a good checkpoint and on without the data since: bit for bit the run that never saw them."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from forge_core.errors import ConfigError
from forge_core.protocols.run import Hook
from forge_parallel.launch.environment import Launch, read_launcher
from forge_parallel.launch.watch import Watch
from forge_train.commands.run import run_recipe
from forge_train.process.logs import logging_of
from forge_train.process.ranks import JobRanks
from forge_train.process.stop import RolledBackTooOften, TrainingError
from forge_train.recipe.load import Recipe, load_recipe
from forge_train.run.loop import fit, train
from forge_train.run.run import Run
from forge_train.run.start import Back, start_run
from forge_train.trackers import METRICS, read_metrics
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, digest

POLICY = ["--train.rollback_after=2"]


class Crash(BaseException):
    """A process that ends, as when it is killed: no handler of exceptions saves anything."""


class Crashes(Hook):
    def __init__(self, after: int) -> None:
        self.after = after

    def after_step(self, run: Any, result: Any) -> None:
        if run.state.step == self.after:
            raise Crash


class Poisoned:
    """A step whose loss is multiplied wherever it is given certain data."""

    def __init__(self, run: Run, factor: float, bad: frozenset[int]) -> None:
        self.run, self.inner, self.factor, self.bad = run, run.step, factor, bad

    def __call__(self, batches: Any, stop: bool = False, trace: bool = False) -> Any:
        if self.run.drawn[-1] not in self.bad:  # type: ignore[attr-defined]
            return self.inner(batches, stop, trace)

        def worse(*given: Any) -> Any:
            terms = self.inner.objective(*given)
            return terms._replace(sum=terms.sum * self.factor)

        return replace(self.inner, objective=worse)(batches, stop, trace)


class Noted:
    """A stream that notes which step's data it gave, counted from the beginning of the data; without some of them."""

    def __init__(self, stream: Any, drawn: list[int], without: frozenset[int]) -> None:
        self.stream, self.drawn, self.without = stream, drawn, without

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def from_cursor(self, cursor: Any) -> Iterator[Any]:
        for batches, after in self.stream.from_cursor(cursor):
            number = after["sample"] // 8  # of the global batch
            if number not in self.without:
                self.drawn.append(number)
                yield batches, after


def read(folder: Path, settings: list[str]) -> tuple[Recipe, JobRanks]:
    """The recipe, and this process among its ranks."""
    recipe = folder / f"tiny-{os.environ.get('RANK', '0')}.toml"
    recipe.write_text(TINY)
    where = read_launcher(os.environ) if torch.distributed.is_initialized() else Launch()
    return load_recipe(recipe, [f"--job.dir={folder}/run", *settings], where.size), JobRanks(where)


def spoiled(run: Run, factor: float = 1.0, **data: list[int]) -> Run:
    """The run, whose steps are bad on `bad` data, or that never sees data `without`."""
    run.drawn = []  # type: ignore[attr-defined]
    run.training.data = Noted(run.data, run.drawn, frozenset(data.get("without", ())))  # type: ignore[attr-defined,assignment]
    run.training.step = Poisoned(run, factor, frozenset(data.get("bad", ())))  # type: ignore[assignment]
    return run


def build(folder: Path, settings: list[str], factor: float = 1.0, **data: list[int]) -> Run:
    """A run that is spoiled."""
    return spoiled(start_run(*read(folder, settings)), factor, **data)


def trained(folder: Path, settings: list[str], spoil: Callable[[Run, Back | None], Run]) -> tuple[Run, str]:
    """Trains with rollbacks; `spoil` changes the run of each start."""

    def started(recipe: Recipe, ranks: JobRanks, *, fresh: bool, back: Back | None) -> Run:
        return spoil(start_run(recipe, ranks, fresh=fresh, back=back), back)

    with mock.patch("forge_train.run.loop.start_run", started):
        return train(*read(folder, settings))


def _went_back(folder: str, settings: list[str], factor: float, bad: list[int]) -> tuple[str, list[list[int]], int]:
    """(weights and states, data of each life of the run, rollbacks)."""
    lives: list[list[int]] = []

    def spoil(run: Run, back: Back | None) -> Run:
        spoiled(run, factor, bad=bad)
        lives.append(run.drawn)  # type: ignore[attr-defined]
        return run

    run, reason = trained(Path(folder), settings, spoil)
    assert reason == "finished"
    return digest(run), lives, run.health.rollbacks


def _never_saw(folder: str, settings: list[str], without: list[int]) -> str:
    run = build(Path(folder), settings, without=without)
    fit(run)
    return digest(run)


KINDS = [("infinite", "dp1"), ("a spike", "dp1"), ("infinite", "dp2"), ("a spike", "tp2"), ("infinite", "pp2")]
LAYOUTS = {"dp1": [], "dp2": [], "tp2": ["--parallel.tp=2"], "pp2": ["--parallel.pp=2"]}


@pytest.mark.parametrize(("kind", "layout"), fast(("a spike", "dp1"), ("infinite", "dp2"), of=KINDS))
def test_fault_37_a_run_that_went_back_is_the_run_that_never_saw_the_data(
    world: World, tmp_path: Path, kind: str, layout: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    given = [*POLICY, *LAYOUTS[layout]]
    factor, size = {"infinite": torch.inf, "a spike": 100.0}[kind], int(layout[-1])
    if size == 1:
        found, clean = (
            [_went_back(str(tmp_path / "a"), given, factor, [5, 6])],
            [_never_saw(str(tmp_path / "b"), given, [4, 5, 6])],
        )
    else:
        found = world.run(_went_back, size, str(tmp_path / "a"), given, factor, [5, 6])
        clean = world.run(_never_saw, size, str(tmp_path / "b"), given, [4, 5, 6])
    for (weights, lives, rollbacks), expected in zip(found, clean, strict=True):
        assert [numbers[:6] for numbers in lives] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
        assert rollbacks == 1
        assert weights == expected


@pytest.mark.slow
def test_fault_37_a_run_that_ends_after_it_went_back_does_not_see_the_data_either(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()

    def spoil(run: Run, back: Back | None) -> Run:
        if back:
            run.hooks.append(Crashes(after=4))
        return spoiled(run, torch.inf, bad=[5, 6])

    with suppress(Crash):
        trained(tmp_path, POLICY, spoil)
    run = build(tmp_path, POLICY)
    assert (run.state.step, run.state.cursor["sample"], run.health.rollbacks) == (3, 48, 1)
    fit(run)
    assert digest(run) == _never_saw(str(tmp_path / "b"), POLICY, [4, 5, 6])


def test_fault_38_one_spike_is_no_reason_and_two_in_a_row_are(tmp_path: Path) -> None:
    run = build(tmp_path, POLICY, factor=100.0, bad=[4, 6])
    fit(run)
    assert run.drawn[:8] == [1, 2, 3, 4, 5, 6, 7, 8]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_start_after_a_rollback_has_the_time_of_a_start(tmp_path: Path) -> None:
    """It reads a checkpoint, compiles and connects, which may take longer than a step."""
    recipe, ranks = read(tmp_path, [*POLICY, "--parallel.timeout=77", "--parallel.step_timeout=33"])
    timeouts: list[float] = []

    def started(recipe: Recipe, ranks: JobRanks, *, fresh: bool, back: Back | None) -> Run:
        timeouts.append(ranks.watch.timeout)
        return spoiled(start_run(recipe, ranks, fresh=fresh, back=back), torch.inf, bad=[5, 6])

    with mock.patch("forge_train.run.loop.start_run", started):
        run, _ = train(recipe, ranks)
    assert run.health.rollbacks == 1 and run.watch.timeout == 33
    assert timeouts == [77, 77]


@pytest.mark.slow
def test_fault_37_the_rate_is_lowered_for_the_rest_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    slower = [*POLICY, "--train.rollback_lr=0.5"]
    weights, _, _ = _went_back(str(tmp_path), slower, torch.inf, [5, 6])
    run = build(tmp_path / "b", POLICY, without=[4, 5, 6])
    whole = run.training.factor
    run.training.factor = lambda step: whole(step) * (0.5 if step >= 3 else 1)
    fit(run)
    assert weights == digest(run)
    again = build(tmp_path, slower)
    assert again.health.lr_scale == 0.5, "it is kept in checkpoints"


@pytest.mark.slow
def test_fault_37_a_run_that_went_back_too_often_ends_with_its_own_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = [*POLICY, "--train.max_rollbacks=2"]
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RolledBackTooOften, match=r"2 steps in a row were bad .* after 2 roll") as error,
    ):
        _went_back(str(tmp_path), settings, torch.inf, list(range(5, 40)))
    assert error.value.exit_code == 7
    said = [record.getMessage() for record in caplog.records if "going back" in record.getMessage()]
    assert [line.rpartition(": ")[2] for line in said] == [
        "going back to step 3, and on without the data of steps 4 to 6 (rollback 1 of 2)",
        "going back to step 3, and on without the data of steps 4 to 5 (rollback 2 of 2)",
    ]


def test_fault_37_without_a_checkpoint_there_is_no_way_back(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="without a checkpoint to go back to"):
        _went_back(str(tmp_path), POLICY, torch.inf, [2, 3])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--checkpoint.every=0"], "saves no checkpoint to roll back to"),
        (["--hooks=[{name='log'}]"], "saves no checkpoint to roll back to"),
        (["--data.phases=[{start=4, sequence_length=8}]"], r"data\.phases\.0\.sequence_length would begin at a different step"),
        (["--data.phases=[{start=4, lr_scale=0.5}]"], r"data\.phases\.0\.lr_scale would begin at a different step"),
    ],
)
def test_what_does_not_fit_a_run_that_goes_back_is_refused(tmp_path: Path, settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(tmp_path, [*POLICY, *settings])


POISON = '''
from dataclasses import dataclass, replace

from forge_core.component import Component
from forge_core.protocols.run import Hook


class Poisoning(Hook):
    def start(self, run):
        inner = run.step

        class Step:
            def __call__(self, batches, stop=False, trace=False):
                worse = lambda *given: (lambda terms: terms._replace(sum=terms.sum * float("inf")))(inner.objective(*given))
                bad = run.state.cursor["sample"] // 8 + 1 in (5, 6)
                return (replace(inner, objective=worse) if bad else inner)(batches, stop, trace)

        run.training.step = Step()


@dataclass(frozen=True, kw_only=True)
class Poison(Component):
    """Makes the loss infinite on the data of steps 5 and 6."""

    def build(self):
        return Poisoning()
'''


def test_fault_37_the_command_goes_back_with_its_panel_its_log_and_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("forge_parallel.launch.watch.Watch.open", lambda *_: Watch())
    (tmp_path / "mine.py").write_text(POISON)
    hooks = '[[hooks]]\nname = "./mine.py:Poison"\n\n[[hooks]]\nname = "log"\nevery = 1\n\n[[hooks]]\nname = "progress"\n\n'
    (tmp_path / "tiny.toml").write_text(TINY.replace('[[hooks]]\nname = "save"', hooks + '[[hooks]]\nname = "save"'))
    with logging_of(0, 1) as log:
        assert run_recipe("tiny.toml", POLICY, True, Launch(), log) == 0
    said = capsys.readouterr()
    assert "resuming after step 3" in said.out and "finished after step 8" in said.out
    assert not list((tmp_path / "runs" / "tiny").glob("previous-*")), "--fresh was for the start, not for going back"
    assert [entry["step"] for entry in read_metrics(tmp_path / "runs" / "tiny" / METRICS)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (
        "going back to step 3, and on without the data of steps 4 to 6"
        in (tmp_path / "runs" / "tiny" / "logs" / "rank-00000.log").read_text()
    )
