"""The tracker `mlflow`: resumed, with a server that is away, and in runs that end in each way.

The stand-in for MLflow's client has the limits of MLflow. Slow tests do the same with MLflow itself, where that is installed.
"""

import contextlib
import importlib.util
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest

from forge_core.conformance import checks_of
from forge_core.errors import ForgeError, Superseded
from forge_core.protocols.run import Hook
from forge_core.registry import Registry
from forge_train import mlflow_tracker
from forge_train.mlflow_tracker import Mlflow
from forge_train.process.ranks import JobRanks
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import train
from train.runs import TINY


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


class Refused(Exception):
    def __init__(self, message: str, error_code: str = "INVALID_PARAMETER_VALUE") -> None:
        super().__init__(message)
        self.error_code = error_code


@dataclass
class Kept:
    name: str
    experiment: str
    metrics: list[Metric] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    status: str = "RUNNING"


class Client:
    """What the tracker calls, kept in memory by URI, with MLflow's limits; `away` are addresses that do not answer."""

    stores: ClassVar[dict[str, dict[str, Kept]]] = {}
    away: ClassVar[set[str]] = set()
    batches: ClassVar[list[int]] = []

    def __init__(self, tracking_uri: str | None = None) -> None:
        assert tracking_uri
        self.uri = tracking_uri
        self.runs = self.stores.setdefault(tracking_uri, {})

    def _found(self, run: str) -> Kept:
        if self.uri in self.away:
            raise ConnectionError("no route to host")
        if run not in self.runs:
            raise Refused(f"Run with id={run} not found", "RESOURCE_DOES_NOT_EXIST")
        return self.runs[run]

    def get_experiment_by_name(self, name: str) -> Any:
        if self.uri in self.away:
            raise ConnectionError("no route to host")
        known = [kept.experiment for kept in self.runs.values() if kept.experiment == name]
        return SimpleNamespace(experiment_id=name) if known else None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, run_name: str, tags: Any) -> Any:
        made = f"run-{len(self.runs)}"
        self.runs[made] = Kept(run_name, experiment, tags=dict(tags))
        return SimpleNamespace(info=SimpleNamespace(run_id=made))

    def log_batch(self, run: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = ()) -> None:
        kept = self._found(run)
        if len(metrics) > 1000 or len(params) > 100:
            raise Refused("too many at once")
        for item in (*metrics, *params):
            if not re.fullmatch(r"[/\w.\- ]{1,250}", item.key, flags=re.ASCII):
                raise Refused(f"Invalid name {item.key!r}")
        for key, value in params:
            if len(value) > 500 or kept.params.setdefault(key, value) != value:
                raise Refused(f"parameter {key!r} cannot change")
        self.batches.append(len(metrics))
        kept.metrics += metrics

    def get_run(self, run: str) -> Any:
        kept = self._found(run)
        info = SimpleNamespace(status=kept.status, run_name=kept.name)
        return SimpleNamespace(data=SimpleNamespace(params=dict(kept.params), tags=dict(kept.tags)), info=info)

    def get_metric_history(self, run: str, name: str) -> list[Metric]:
        return [metric for metric in self._found(run).metrics if metric.key == name]

    def set_tag(self, run: str, name: str, value: str) -> None:
        self._found(run).tags[name] = value

    def update_run(self, run: str, status: str) -> None:
        self._found(run).status = status

    def set_terminated(self, run: str, status: str) -> None:
        assert status in ("FINISHED", "FAILED", "KILLED")
        self._found(run).status = status


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings of MLflow from outside; those that the tracker makes go away with the test."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in (*mlflow_tracker._SETTINGS, "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, quiet: None) -> Iterator[type[Client]]:
    entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    entities.Metric, entities.Param, tracking.MlflowClient = Metric, Param, Client  # type: ignore[attr-defined]
    for module in (ModuleType("mlflow"), entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, empty in (("stores", {}), ("away", set()), ("batches", [])):
        monkeypatch.setattr(Client, name, empty)
    yield Client
    assert not [thread for thread in threading.enumerate() if thread.name == "mlflow"], "a thread is left"


REAL = pytest.param("real", marks=pytest.mark.slow)


@pytest.fixture(params=["stand-in", REAL])
def client_at(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Makes a client of the stand-in, or of MLflow itself."""
    if request.param == "stand-in":
        return request.getfixturevalue("fake")
    pytest.importorskip("mlflow")
    request.getfixturevalue("quiet")
    from mlflow.tracking import MlflowClient

    return MlflowClient


def run_in(folder: Path, lr: float = 1e-3) -> Any:
    config = {
        "optimizer": {"name": "adamw", "lr": lr, "betas": [0.9, 0.95]},
        "trackers": [{"name": "mine", "api_key": "sk-hidden-1", "url": "https://me:sk-hidden-2@host/x"}],
        "data": {"evaluation": {f"set {number}": {"path": "x" * 900} for number in range(150)}},
    }
    return SimpleNamespace(directory=folder, config=config, job=SimpleNamespace(job=SimpleNamespace(name="tiny")))


def written(run: Any, component: Mlflow, after: int, steps: Sequence[int], status: Any = None) -> None:
    tracker: Any = component.build(run)
    tracker.rewind(after)
    for step in steps:
        tracker.write(step, {"loss": 10.0 / step, "evaluation/held_out@ema/loss": math.inf if step == 2 else step})
    if status:
        tracker.end(status)
    tracker.close()


def uris(folder: Path) -> list[str]:
    """A folder, and a database where MLflow can write one."""
    installed = all(importlib.util.find_spec(name) for name in ("sqlalchemy", "alembic"))
    return [f"file:{folder}/store"] + ([f"sqlite:///{folder}/mlflow.db"] if installed else [])


@pytest.mark.filterwarnings("ignore")  # of MLflow and what it imports
def test_one_mlflow_run_has_all_starts(tmp_path: Path, client_at: Callable[[str], Any]) -> None:
    for number, uri in enumerate(uris(tmp_path)):
        folder = tmp_path / str(number)
        folder.mkdir()
        component = Mlflow(experiment="small", uri=uri, tags={"team": "a"})
        written(run_in(folder), component, 0, (1, 2, 3), "running")
        run, client = (folder / "mlflow-id").read_text().strip(), client_at(uri)
        assert client.get_run(run).info.status == "RUNNING"
        written(run_in(folder), component, 2, (3, 4), "killed")
        assert client.get_run(run).info.status == "KILLED"
        written(run_in(folder, lr=2e-3), component, 4, (5,))
        assert (folder / "mlflow-id").read_text().strip() == run

        def history(name: str, run: str = run, client: Any = client) -> list[tuple[int, float]]:
            found = client.get_metric_history(run, name)
            return [(item.step, item.value) for item in sorted(found, key=lambda item: (item.timestamp, item.step))]

        assert history("loss") == [(1, 10.0), (2, 5.0), (3, 10 / 3), (3, 10 / 3), (4, 2.5), (5, 2.0)]
        assert history("started_after") == [(1, 0), (2, 0), (3, 0), (3, 2), (4, 2), (5, 4)]
        kept = history("evaluation/held_out_ema/loss")
        assert [step for step, _ in kept] == [1, 2, 3, 3, 4, 5] and kept[1][1] > 1e300
        found = client.get_run(run)
        assert found.info.status == "FINISHED" and found.info.run_name == "tiny"
        params, tags = found.data.params, found.data.tags
        assert (params["optimizer.lr"], params["optimizer.betas"], params["trackers.0.name"]) == ("0.001", "[0.9, 0.95]", "mine")
        assert len(params) > 150 and {len(text) for key, text in params.items() if key.endswith("path")} == {500}
        assert tags["team"] == "a" and tags["resumed.optimizer.lr"] == "0.002" and "resumed.optimizer.name" not in tags
        assert params["trackers.0.api_key"] == "(hidden)" and not any("sk-hidden" in text for text in params.values())
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"sk-hidden" not in path.read_bytes(), path


def test_it_conforms_as_every_tracker(fake: type[Client]) -> None:
    checks = checks_of(Registry(), "forge.trackers")
    assert len(checks) >= 4
    for _, check in checks:
        check(Mlflow(uri="there"))


def test_many_values_go_in_batches(tmp_path: Path, fake: type[Client]) -> None:
    tracker: Any = Mlflow(uri="there").build(run_in(tmp_path))
    tracker.rewind(0)
    start = time.monotonic()
    for step in range(1, 301):
        tracker.write(step, {f"value/{number}": 1.0 for number in range(49)})
    assert time.monotonic() - start < 2.0
    tracker.close()
    (kept,) = fake.stores["there"].values()
    assert len(kept.metrics) == 300 * 50 and [item.step for item in kept.metrics] == sorted(item.step for item in kept.metrics)
    assert max(fake.batches) <= 1000 and len(fake.batches) < 300, "several steps at once"


def test_the_store_is_that_of_the_recipe_then_of_the_environment_then_a_folder(
    tmp_path: Path, fake: type[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(run_in(tmp_path), Mlflow(), 0, (1,))
    assert list(fake.stores) == [(tmp_path / "mlflow").as_uri()]
    (tmp_path / "mlflow-id").unlink()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://here")
    written(run_in(tmp_path), Mlflow(), 0, (1,))
    written(run_in(tmp_path), Mlflow(uri="http://there"), 1, (2,))
    assert list(fake.stores)[1:] == ["http://here", "http://there"]
    assert len(fake.stores["http://there"]) == 1, "a store without the run gets a new one"


def test_a_server_that_comes_back_gets_everything(tmp_path: Path, fake: type[Client]) -> None:
    fake.away.add("down")
    tracker: Any = Mlflow(uri="down").build(run_in(tmp_path))
    tracker.rewind(0)
    raised = []
    deadline = time.monotonic() + 20
    for step in range(1, 10_000):
        start = time.monotonic()
        try:
            tracker.write(step, {"loss": 1.0})
        except ConnectionError as cause:
            raised.append(cause)
        assert time.monotonic() - start < 1.0, "it never waits"
        if raised:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    tracker.write(step + 1, {"loss": 1.0})
    fake.away.clear()
    tracker.close()
    assert len(raised) == 1, "one warning"
    (kept,) = fake.stores["down"].values()
    assert [item.step for item in kept.metrics if item.key == "loss"] == list(range(1, step + 2)), "nothing twice, nothing lost"
    assert kept.status == "FINISHED"


def test_a_server_that_stays_away_is_told_with_what_is_lost(
    tmp_path: Path, fake: type[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "MOST_WAITING", 20)
    fake.away.add("down")
    tracker: Any = Mlflow(uri="down").build(run_in(tmp_path))
    tracker.rewind(0)
    for step in range(1, 31):
        with contextlib.suppress(ConnectionError):
            tracker.write(step, {"loss": 1.0})
        time.sleep(0.005)
    start = time.monotonic()
    with pytest.raises((ForgeError, ConnectionError)) as told:
        tracker.close()
    assert time.monotonic() - start < 5.0
    if isinstance(told.value, ForgeError):
        assert "60 values were not sent to MLflow; metrics.jsonl" in str(told.value)
    assert len(tracker._waiting) == 20, "memory is bounded"
    assert not (tmp_path / "mlflow-id").exists()


class Breaks(Hook):
    def __init__(self, run: Callable[[Any], None]) -> None:
        self.run = run

    def before_step(self, run: Any) -> None:
        if run.state.step == 4:
            self.run(run)


def fails(run: Any) -> None:
    raise RuntimeError("a fault")


def is_interrupted(run: Any) -> None:
    raise KeyboardInterrupt


def is_asked_to_stop(run: Any) -> None:
    run.stop.wanted = lambda: True  # as after SIGTERM


def is_taken_over(run: Any) -> None:
    run.stop.superseded = lambda: True
    raise Superseded("another job has started")


ENDS = {
    "finished": (None, None, "FINISHED"),
    "failed": (fails, RuntimeError, "FAILED"),
    "interrupted": (is_interrupted, KeyboardInterrupt, "KILLED"),
    "asked to stop": (is_asked_to_stop, None, "KILLED"),
    "taken over": (is_taken_over, Superseded, "RUNNING"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_ends_in_mlflow_as_it_ends(
    tmp_path: Path, fake: type[Client], monkeypatch: pytest.MonkeyPatch, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    happens, error, status = ENDS[end]
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(TINY + '\n[[hooks]]\nname = "log"\nevery = 1\n\n[[trackers]]\nname = "mlflow"\nuri = "there"\n')
    if happens:
        from forge_train.run import loop

        real = loop.start_run

        def started(*args: Any, **kwargs: Any) -> Any:
            run = real(*args, **kwargs)
            run.hooks.append(Breaks(happens))
            return run

        monkeypatch.setattr(loop, "start_run", started)
    arguments = (load_recipe(recipe, [f"--job.dir={tmp_path / 'run'}"], 1), JobRanks())
    with caplog.at_level(logging.WARNING, logger="forge_train.trackers"):
        if error is not None:
            with pytest.raises(error):
                train(*arguments)
        else:
            run, _ = train(*arguments)
            run.saves.close()
    assert not [record for record in caplog.records if record.name == "forge_train.trackers"], caplog.text
    (kept,) = fake.stores["there"].values()
    assert kept.status == status
    steps = [item.step for item in kept.metrics if item.key == "loss"]
    assert steps == list(range(1, 9 if end == "finished" else 6 if end == "asked to stop" else 5))
    assert kept.params["optimizer.lr"] == "0.01" and kept.name == "tiny"
