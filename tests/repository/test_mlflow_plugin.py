"""The example of a tracker, against a stand-in for MLflow's client; its own tests use MLflow itself where that is installed."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest

from forge_core.conformance import checks_of
from forge_core.registry import Entry, Registry

WHEEL = Path(__file__).parents[2] / "examples" / "forge-mlflow"


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


@dataclass
class Kept:
    metrics: list[Metric] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    status: str = "RUNNING"


class Client:
    """What the tracker calls, kept in memory."""

    runs: ClassVar[dict[str, Kept]] = {}

    def __init__(self, tracking_uri: str | None = None) -> None:
        if tracking_uri == "down":
            raise ConnectionError("no route to host")

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> Any:
        made = f"run-{len(self.runs)}"
        self.runs[made] = Kept()
        return SimpleNamespace(info=SimpleNamespace(run_id=made))

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        self.runs[run].metrics += metrics
        self.runs[run].params |= dict(params)

    def get_run(self, run: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(metrics={metric.key: 0.0 for metric in self.runs[run].metrics}))

    def get_metric_history(self, run: str, name: str) -> list[Metric]:
        return [metric for metric in self.runs[run].metrics if metric.key == name]

    def set_tag(self, run: str, name: str, value: str) -> None:
        self.runs[run].tags[name] = value

    def update_run(self, run: str, status: str) -> None:
        self.runs[run].status = status

    def set_terminated(self, run: str) -> None:
        self.runs[run].status = "FINISHED"


@pytest.fixture
def component(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    entities.Metric, entities.Param, tracking.MlflowClient = Metric, lambda *pair: pair, Client  # type: ignore[attr-defined]
    for module in (ModuleType("mlflow"), entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(WHEEL / "src"))
    monkeypatch.setattr(Client, "runs", {})
    yield Registry([Entry("forge.trackers", "mlflow", "forge-mlflow", "0.1.0", "forge_mlflow.component:Mlflow")]).load(
        "forge.trackers", "mlflow"
    )
    for name in [name for name in sys.modules if name.startswith("forge_mlflow")]:
        del sys.modules[name]


def test_it_conforms_as_every_tracker(component: Any) -> None:
    checks = checks_of(Registry(), "forge.trackers")
    assert len(checks) >= 4
    for _, check in checks:
        check(component())


def test_steps_of_every_run_grow(component: Any, tmp_path: Path) -> None:
    run: Any = SimpleNamespace(directory=tmp_path, job=SimpleNamespace(job=SimpleNamespace(name="mine")), config={"a": {"b": 1}})
    for after, steps in ((0, (1, 2, 3)), (3, (4,)), (1, (2, 3))):
        tracker = component().build(run)
        tracker.rewind(after)
        for step in steps:
            tracker.write(step, {"loss": float(step)})
        tracker.close()
    assert [[metric.step for metric in kept.metrics] for kept in Client.runs.values()] == [[1, 2, 3, 4], [1, 2, 3]]
    first, second = Client.runs.values()
    assert first.tags == {"forge.void_after": "1"} and second.params == {"a.b": "1"} and second.status == "FINISHED"


def test_a_server_that_is_down_hurts_the_first_call_only(component: Any, tmp_path: Path) -> None:
    run: Any = SimpleNamespace(directory=tmp_path, job=SimpleNamespace(job=SimpleNamespace(name="mine")), config={})
    tracker = component(uri="down").build(run)
    with pytest.raises(ConnectionError):
        tracker.rewind(0)
    tracker.write(1, {"loss": 1.0})
    tracker.close()
    assert Client.runs == {}
