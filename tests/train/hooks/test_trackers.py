"""TensorBoard and W&B read back from disk, resumed, missing, and failing in the middle of a run."""

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb

from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook
from forge_train.directory import RECIPE, move_aside
from forge_train.mlflow_tracker import Mlflow
from forge_train.run.loop import fit
from forge_train.trackers import SafeTracker, TensorBoard, Wandb, read_metrics
from train.event_files import tensorboard_scalars, wandb_records, wandb_rows
from train.runs import TINY, prepared

VALUES = {"loss": 2.5, "evaluation/held_out/loss": 3.0}


@pytest.fixture
def run(tmp_path, monkeypatch) -> SimpleNamespace:
    """What trackers look at, with everything of W&B kept inside of the test's directory."""
    wandb.teardown()  # it keeps the settings of its first use in a process
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "elsewhere"))
    config = {"optimizer": {"name": "adamw", "lr": 1e-3}, "trackers": [{"name": "mine", "api_key": "sk-hidden-1"}]}
    return SimpleNamespace(directory=tmp_path, config=config, job=SimpleNamespace(job=SimpleNamespace(name="tiny")))


def offline_files(run: Any) -> list[Path]:
    return sorted(run.directory.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.parent.name)


def start(component: Any, run: Any, after: int) -> Any:
    tracker = component.build(run)
    tracker.rewind(after)
    return tracker


def test_tensorboard_reads_every_value(run) -> None:
    tracker = start(TensorBoard(), run, 0)
    tracker.write(0, {"evaluation/held_out/loss": 4.0})
    for step in range(1, 40):
        tracker.write(step, {"loss": 1 / step, "tokens": 4096 * step})
    tracker.write(40, {"loss": math.nan})
    tracker.close()
    found = tensorboard_scalars(run.directory / "tensorboard")
    assert found["evaluation/held_out/loss"] == [(0, 4.0)]
    assert found["tokens"] == [(step, 4096.0 * step) for step in range(1, 40)]
    steps, losses = zip(*found["loss"], strict=True)
    assert steps == tuple(range(1, 41))
    assert losses[:39] == pytest.approx([1 / step for step in range(1, 40)], rel=1e-7)
    assert math.isnan(losses[39])


def test_tensorboard_leaves_out_what_a_resume_voids(run) -> None:
    first = start(TensorBoard(), run, 0)
    for step in (0, 10, 20, 30):
        first.write(step, {"loss": float(step)})
    first.close()
    again = start(TensorBoard(), run, 20)
    again.write(25, {"loss": -25.0})
    again.close()
    assert tensorboard_scalars(run.directory / "tensorboard") == {"loss": [(0, 0.0), (10, 10.0), (20, 20.0), (25, -25.0)]}
    over = start(TensorBoard(), run, 0)  # stopped before the first checkpoint: only what preceded the first step stays
    over.write(10, {"loss": -10.0})
    over.close()
    assert tensorboard_scalars(run.directory / "tensorboard") == {"loss": [(0, 0.0), (10, -10.0)]}


def test_fault_48_wandb_keeps_id_rows_and_recipe(run, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["forge-train", "run", "tiny.toml", "--trackers.0.api_key=sk-hidden-2"])
    tracker = start(Wandb(project="small", group="first", tags=["a", "b"]), run, 0)
    tracker.write(0, {"evaluation/held_out/loss": 4.0})
    tracker.write(10, {"loss": 2.5, "grad_norm": math.inf})
    tracker.write(20, {"loss": 2.0})
    tracker.close()
    again = start(Wandb(project="small"), run, 10)
    again.write(20, {"loss": -2.0})
    again.close()

    first, second = (wandb_records(file) for file in offline_files(run))
    rows = wandb_rows(first)
    assert rows[0] == {"step": 0, "started_after": 0, "evaluation/held_out/loss": 4.0}
    assert rows[1]["loss"] == 2.5 and rows[1]["step"] == 10 and float(rows[1]["grad_norm"]) == math.inf
    assert rows[2] == {"step": 20, "started_after": 0, "loss": 2.0}
    assert wandb_rows(second) == [{"step": 20, "started_after": 10, "loss": -2.0}], "an earlier step is not dropped"

    described = [next(r.run for r in records if r.WhichOneof("record_type") == "run") for records in (first, second)]
    kept = (run.directory / "wandb-id").read_text().strip()
    assert [item.run_id for item in described] == [kept, kept]
    assert (described[0].project, described[0].run_group, list(described[0].tags)) == ("small", "first", ["a", "b"])
    assert described[0].display_name == "tiny"
    config = {item.key: json.loads(item.value_json) for item in described[0].config.update}
    assert config["optimizer"] == {"name": "adamw", "lr": 1e-3}
    assert config["trackers"][0] == {"name": "mine", "api_key": "(hidden)"}
    metrics = [record.metric for record in first if record.WhichOneof("record_type") == "metric"]
    assert {item.glob_name: item.step_metric for item in metrics if item.glob_name} == {"*": "step"}

    content = b"".join(path.read_bytes() for path in run.directory.rglob("*") if path.is_file())
    assert b"sk-hidden" not in content


@pytest.mark.parametrize(
    ("component", "package"), [(TensorBoard(), "tensorboard"), (Wandb(), "wandb"), (Mlflow(uri="http://there"), "mlflow")]
)
def test_a_missing_library_is_refused_with_its_extra(run, monkeypatch, component, package) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    hide = SimpleNamespace(find_spec=lambda name, *_: absent(name) if name.partition(".")[0] == package else None)
    monkeypatch.setattr(sys, "meta_path", [hide, *sys.meta_path])
    with pytest.raises(ForgeError, match=rf'pip install "forge-train\[{package}\]"'):
        component.build(run)


def absent(name: str) -> None:
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_wandb_without_a_key_is_refused_before_it_could_ask(tmp_path) -> None:
    """In a process of its own, since W&B remembers its settings; with an address that nobody answers."""
    code = (
        "from types import SimpleNamespace as N; from pathlib import Path; from forge_core.errors import ForgeError\n"
        "from forge_train.trackers import Wandb\n"
        "run = N(directory=Path('.'), config={}, job=N(job=N(name='x')))\n"
        "Wandb(mode='offline').build(run)\n"
        "try: Wandb().build(run)\n"
        "except ForgeError as refusal: print(refusal)"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment = kept | {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9", "NETRC": str(tmp_path / "netrc")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "wandb login" in done.stdout and 'mode = "offline"' in done.stdout, done.stderr


class Failing:
    """Fails at every second write, and at everything else."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.calls = 0

    def write(self, step: int, values: Any) -> None:
        self.calls += 1
        if self.calls % 2:
            raise RuntimeError("no route to host")
        self.written.append(step)

    def rewind(self, step: int) -> None:
        raise KeyError(step)

    def close(self) -> None:
        raise OSError("gone")


def test_fault_43_a_failing_tracker_is_one_warning(caplog) -> None:
    tracker = SafeTracker(failing := Failing())
    with caplog.at_level(logging.WARNING):
        tracker.rewind(3)
        for step in range(4):
            tracker.write(step, {})
        tracker.close()
    assert failing.written == [1, 3]
    assert len(caplog.records) == 1 and "Failing" in caplog.text and "KeyError" in caplog.text


def test_an_interrupt_is_no_failure_of_a_tracker() -> None:
    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SafeTracker(SimpleNamespace(rewind=interrupt)).rewind(1)  # type: ignore[arg-type]


PLUGIN = '''
from dataclasses import dataclass
from forge_core.component import Component


@dataclass(frozen=True, kw_only=True)
class Broken(Component):
    """Fails always."""

    def build(self, run):
        return self

    def rewind(self, step):
        raise RuntimeError("no route to host")

    def write(self, step, values):
        raise RuntimeError("no route to host")

    close = rewind
'''


def test_fault_43_a_run_survives_its_trackers_and_resumes_in_them(run, caplog) -> None:
    directory = run.directory
    (directory / "broken.py").write_text(PLUGIN)
    named = ("tensorboard", "wandb", "./broken.py:Broken", "jsonl")
    trackers = "".join(f'\n[[trackers]]\nname = "{name}"\n' for name in named)
    (directory / "tiny.toml").write_text(TINY + '\n[[hooks]]\nname = "log"\nevery = 1\n' + trackers)
    place = directory / "run"

    def train(fall_after: int | None = None) -> list[int]:
        """Steps in `metrics.jsonl` after training to the end, or until it falls over after a step."""
        assembled, _ = prepared(directory / "tiny.toml", [f"--job.dir={place}"])
        if fall_after:
            assembled.hooks[:] = [*assembled.hooks, Falling(fall_after)]
        try:
            fit(assembled)
        except Fall:
            pass
        finally:
            for tracker in assembled.trackers:
                tracker.close()
        return [entry["step"] for entry in read_metrics(place / "metrics.jsonl")]

    with caplog.at_level(logging.WARNING, logger="forge_train"):
        assert train(fall_after=5) == [1, 2, 3, 4, 5], "every value once, named `jsonl` or not"
    assert [record.name for record in caplog.records] == ["forge_train.trackers", "forge_train.run.observers"]
    assert "no route to host" in caplog.messages[0] and "hook 'Falling' failed" in caplog.messages[1]
    assert train() == list(range(1, 9)), "from the checkpoint of step 3"
    losses = [entry["loss"] for entry in read_metrics(place / "metrics.jsonl")]
    drawn = tensorboard_scalars(place / "tensorboard")
    assert [step for step, _ in drawn["loss"]] == list(range(1, 9))
    written: dict[str, list[tuple[int, float]]] = {}
    for entry in read_metrics(place / "metrics.jsonl"):
        for name, value in entry.items():
            if name not in ("step", "time"):
                written.setdefault(name, []).append((entry["step"], pytest.approx(value, rel=1e-6)))
    assert len(written) > 15 and drawn == written, "every number of every step, those before the resume too"
    files = offline_files(SimpleNamespace(directory=place))
    rows = [row for file in files for row in wandb_rows(wandb_records(file))]
    first, second = ([(step, 0) for step in range(1, 6)], [(step, 3) for step in range(4, 9)])
    assert [(row["step"], row["started_after"]) for row in rows] == first + second
    assert [row["loss"] for row in rows[:3] + rows[5:]] == losses


class Fall(Exception):
    """The machine is gone."""


class Falling(Hook):
    """Ends the run without a checkpoint, as a lost machine would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: Any, result: Any) -> None:
        if run.state.step == self.step:
            raise Fall


def test_fresh_moves_aside_what_trackers_left(run) -> None:
    (run.directory / RECIPE).write_text("")
    for component in (TensorBoard(), Wandb()):
        tracker = start(component, run, 0)
        tracker.write(1, VALUES)
        tracker.close()
    left = {path.name for path in run.directory.iterdir()} - {"elsewhere"}
    moved = move_aside(run.directory)
    assert moved is not None and {path.name for path in moved.iterdir()} == left
    assert {path.name for path in run.directory.iterdir()} - {"elsewhere"} == {moved.name}
