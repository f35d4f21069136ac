"""With MLflow itself, in files: what is written is read back, and a resume voids what came later."""

import math
from pathlib import Path

import pytest

pytest.importorskip("mlflow")

from forge_mlflow.tracker import RUN_ID, MlflowTracker
from mlflow.tracking import MlflowClient


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more than mlflow-skinny
    return f"file:{tmp_path}/mlruns"


def started(folder: Path, uri: str, after: int, *steps: int) -> str:
    tracker = MlflowTracker(folder, "mine", {"model": {"dim": 8}, "api_key": "hidden"}, uri=uri)
    assert after or not (folder / RUN_ID).exists(), "nothing before it begins"
    tracker.rewind(after)
    for step in steps:
        tracker.write(step, {"loss": 10.0 / step, "evaluation/held_out@ema/loss": 1.0 * step})
    tracker.close()
    return (folder / RUN_ID).read_text().strip()


def history(uri: str, run: str, name: str = "loss") -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in MlflowClient(tracking_uri=uri).get_metric_history(run, name)]


def test_a_run_goes_on_and_voids_what_a_resume_trains_again(tmp_path: Path, uri: str) -> None:
    first = started(tmp_path, uri, 0, 1, 2, 3)
    assert history(uri, first) == [(1, 10.0), (2, 5.0), (3, 10 / 3)]
    assert started(tmp_path, uri, 3, 4) == first, "nothing was void"
    second = started(tmp_path, uri, 2, 3, 5)
    assert second != first
    assert history(uri, second) == [(1, 10.0), (2, 5.0), (3, 10 / 3), (5, 2.0)]
    assert [step for step, _ in history(uri, second, "evaluation/held_out_ema/loss")] == [1, 2, 3, 5]
    client = MlflowClient(tracking_uri=uri)
    assert client.get_run(first).data.tags["forge.void_after"] == "2"
    found = client.get_run(second)
    assert found.data.params["model.dim"] == "8" and "hidden" not in found.data.params.values()
    assert found.info.status == "FINISHED" and found.info.run_name == "mine"


def test_numbers_that_are_none_are_taken(tmp_path: Path, uri: str) -> None:
    tracker = MlflowTracker(tmp_path, "mine", {}, uri=uri)
    tracker.rewind(0)
    tracker.write(1, {"bad": math.nan, "large": math.inf})
    tracker.close()
    run = (tmp_path / RUN_ID).read_text().strip()
    assert math.isnan(history(uri, run, "bad")[0][1])
    assert history(uri, run, "large")[0][1] > 1e300


def test_without_a_server_nothing_is_written(tmp_path: Path) -> None:
    tracker = MlflowTracker(tmp_path, "mine", {}, uri="nonsense://nowhere")
    with pytest.raises(Exception, match="nonsense"):
        tracker.rewind(0)  # the run warns once and goes on
    tracker.write(1, {"loss": 1.0})
    tracker.close()
    assert not (tmp_path / RUN_ID).exists()
