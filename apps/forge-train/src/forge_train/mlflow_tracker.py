"""Tracker `mlflow`: one MLflow run for all starts of a run. A thread sends the values, so training never waits for a server.

MLflow deletes no value. So every step has a metric `started_after`, as the rows of W&B have: the step from which this start
resumed, with the same step and time as the other values. A value is void if a later start has a `started_after` below its step.
"""

import os
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, ClassVar

from forge_core.component import FREE, Component
from forge_core.config.tree import build, leaves
from forge_core.errors import ForgeError
from forge_core.redaction import redacted
from forge_train.trackers import FINISH_SECONDS, import_library

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forge_core.protocols.run import EndStatus, Run, Tracker

RUN_ID = "mlflow-id"
"""File in the run's directory with the MLflow run id, so that a resumed run keeps its MLflow run."""

FOLDER = "mlflow"
"""Folder of the run's directory that is the store if neither the recipe nor MLFLOW_TRACKING_URI names another."""

BATCH = 1000
"""Maximum number of values that MLflow takes at once."""
PARAMETERS = 100
"""Maximum number of parameters that MLflow takes at once."""
LONGEST = 500
"""Maximum number of characters of a parameter that all stores take."""
MOST_WAITING = 200_000
"""Maximum number of values in memory; further ones are not sent. `metrics.jsonl` has them."""
RETRY_SECONDS = 300.0
"""Maximum seconds between two attempts to reach a server."""
AWAY_SECONDS = 10.0
"""Maximum seconds that the end of a run waits for a server that did not answer before."""

_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the terminal belongs to the trainer
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the thread tries again itself, without a warning each time
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Settings of MLflow, unless the environment has others."""


class MlflowTracker:
    """Writes to one MLflow run for all starts of a run; `rewind`, which every start calls once, starts the thread.

    Sends the resolved recipe without secrets as parameters; does not send source code, command line or terminal output. A key
    that a resume changes is a tag `resumed.KEY`, because parameters of MLflow cannot change.

    Raises:
        ForgeError: mlflow is not installed.
        Exception: a failure of the thread, once, at the next `write` or `close`; the thread tries again until the end.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        config: Mapping[str, Any],
        *,
        experiment: str = "forge",
        uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._directory, self._name, self._config = directory, name, config
        self._experiment, self._tags = experiment, dict(tags or {})
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or (directory / FOLDER).resolve().as_uri()
        for key, value in _SETTINGS.items():
            os.environ.setdefault(key, value)
        if self._uri.startswith("file:") or "://" not in self._uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow prefers databases, which need more packages
        self._tracking = import_library("mlflow.tracking", "mlflow")
        self._entities = import_library("mlflow.entities", "mlflow")
        self._after = 0
        self._status: EndStatus = "finished"
        self._thread: Thread | None = None
        self._changed = Condition()  # guards everything below
        self._waiting: deque[tuple[str, float, int, int]] = deque()
        self._unsent = 0
        self._closing = self._away = False
        self._failure: Exception | None = None

    def rewind(self, step: int) -> None:
        """Starts the thread, which opens the MLflow run, new or by its stored id; later steps have `started_after` = `step`."""
        self._after = step
        if self._thread is None:
            self._thread = Thread(target=self._work, name="mlflow", daemon=True)
            self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Passes the values of optimizer step `step` to the thread."""
        if self._thread is None:
            return
        now = int(time.time() * 1000)
        row = [(key_of(name), float(value), now, step) for name, value in {**values, "started_after": self._after}.items()]
        with self._changed:
            if len(self._waiting) < MOST_WAITING:
                self._waiting += row
                self._changed.notify()
            else:
                self._unsent += len(row)
        self._raise_failure()

    def end(self, status: "EndStatus") -> None:
        """Sets the status that the MLflow run gets at `close`; "running" leaves it open for the next start."""
        self._status = status

    def close(self) -> None:
        """Ends the MLflow run and waits for values that were not sent yet.

        Raises:
            ForgeError: some were not sent.
        """
        if self._thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
            seconds = AWAY_SECONDS if self._away else FINISH_SECONDS
        self._thread.join(seconds)
        self._thread = None
        self._raise_failure()
        if unsent := self._unsent + len(self._waiting):
            raise ForgeError(f"{unsent} values were not sent to MLflow; metrics.jsonl in the run's directory has them")

    def _raise_failure(self) -> None:
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        """Opens the run, sends what waits, and ends the run. After a failure it tries again, ever more slowly."""
        client = run = None
        pause = 1.0
        while True:
            with self._changed:
                while not (self._waiting or self._closing or run is None):
                    self._changed.wait()
                batch, closing = list(islice(self._waiting, BATCH)), self._closing
            try:
                if client is None or run is None:
                    client = self._tracking.MlflowClient(tracking_uri=self._uri)
                    run = self._open(client)
                if batch:
                    client.log_batch(run, metrics=[self._entities.Metric(*value) for value in batch])
                elif closing:
                    if self._status in _STATUSES:
                        client.set_terminated(run, status=_STATUSES[self._status])
                    return
            except Exception as cause:  # noqa: BLE001 - no error of a library, a disk or a network may stop training
                with self._changed:
                    if not self._away:
                        self._failure = cause
                    self._away = True
                    if closing:
                        return
                    self._changed.wait_for(lambda: self._closing, timeout=pause)
                pause = min(2 * pause, RETRY_SECONDS)
            else:
                with self._changed:
                    self._away = False
                    for _ in batch:
                        self._waiting.popleft()
                pause = 1.0

    def _open(self, client: Any) -> str:
        """Returns the id of the MLflow run of this run, with the recipe as its parameters."""
        path = self._directory / RUN_ID
        run = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        before = _parameters_of(client, run) if run else None
        if before is None:
            run = client.create_run(self._experiment_id(client), run_name=self._name, tags=self._tags).info.run_id
            path.write_text(run + "\n", encoding="utf-8")
        else:
            client.update_run(run, status="RUNNING")
        before = before or {}
        now = flat(self._config)
        new = [self._entities.Param(key, value) for key, value in now.items() if key not in before]
        for start in range(0, len(new), PARAMETERS):
            client.log_batch(run, params=new[start : start + PARAMETERS])
        for key, value in now.items():
            if before.get(key, value) != value:
                client.set_tag(run, f"resumed.{key}", value)
        return run

    def _experiment_id(self, client: Any) -> str:
        """Returns the id of the experiment, which another run may create at the same time."""
        if (known := client.get_experiment_by_name(self._experiment)) is None:
            try:
                return client.create_experiment(self._experiment)
            except Exception:
                if (known := client.get_experiment_by_name(self._experiment)) is None:
                    raise
        return known.experiment_id


def _parameters_of(client: Any, run: str) -> Mapping[str, str] | None:
    """Returns the parameters of an MLflow run; None if the store does not have it."""
    try:
        return client.get_run(run).data.params
    except Exception as cause:
        if getattr(cause, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def key_of(name: str) -> str:
    """Returns a name as MLflow takes it: letters, digits, `_`, `-`, `.`, spaces and `/`, at most 250 characters."""
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)[:250]


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns {dotted key: text of the value} of a recipe, without secrets."""
    tree = build(redacted(config), (), lambda _: "", Path())
    return {key_of(key): str(value)[:LONGEST] for key, value, _ in leaves(tree)}


@dataclass(frozen=True, kw_only=True)
class Mlflow(Component):
    """MLflow, with the resolved recipe (secrets removed) as parameters; needs `pip install "forge-train[mlflow]"`."""

    key_class: ClassVar = FREE

    experiment: str = "forge"
    """Experiment that the run appears in; it is created if it does not exist."""
    uri: str | None = None
    """URL of a tracking server (http://localhost:5000); by default MLFLOW_TRACKING_URI, else the folder mlflow of the run."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags of the MLflow run."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Mlflow]":
        return (cls(uri=folder.resolve().as_uri()),)

    def build(self, run: "Run") -> "Tracker":
        return MlflowTracker(
            directory=run.directory,
            name=run.job.job.name,
            config=run.config,
            experiment=self.experiment,
            uri=self.uri,
            tags=self.tags,
        )
