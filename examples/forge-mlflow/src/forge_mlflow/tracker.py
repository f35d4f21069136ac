"""Numbers to MLflow. One MLflow run goes on over all starts that void nothing; a start that voids steps begins a new one."""

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from forge_core import redacted

RUN_ID = "mlflow-id"
"""File in the run's directory with the id of the newest MLflow run."""

_LONGEST = 500
"""Characters of a parameter."""
_BATCH = 100


class MlflowTracker:
    """Connects at `rewind`, which every start calls once, and writes nothing before."""

    def __init__(
        self, directory: Path, name: str, config: Mapping[str, Any], *, experiment: str = "forge", uri: str | None = None
    ) -> None:
        self._directory, self._name, self._config = directory, name, config
        self._experiment, self._uri = experiment, uri
        self._client: Any = None
        self._run = ""

    def rewind(self, step: int) -> None:
        """Goes on with the newest MLflow run, or begins a new one with what it has up to `step`, if it has later steps."""
        client = MlflowClient(tracking_uri=self._uri)
        path = self._directory / RUN_ID
        before = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        kept = list(_history(client, before)) if before else []
        if before and all(metric.step <= step for metric in kept):
            client.update_run(before, status="RUNNING")
            self._client, self._run = client, before
            return
        made = client.create_run(self._experiment_id(client), run_name=self._name).info.run_id
        if before:
            client.set_tag(before, "forge.void_after", str(step))
            client.set_tag(made, "forge.resumed_from", before)
        params = [Param(key, str(value)[:_LONGEST]) for key, value in _flat(redacted(self._config))]
        for start in range(0, len(params), _BATCH):
            client.log_batch(made, params=params[start : start + _BATCH])
        valid = [metric for metric in kept if metric.step <= step]
        for start in range(0, len(valid), _BATCH):
            client.log_batch(made, metrics=valid[start : start + _BATCH])
        path.write_text(made + "\n", encoding="utf-8")
        self._client, self._run = client, made

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes values of one step. Nothing while the server could not be reached at the start."""
        if self._client is not None:
            now = int(time.time() * 1000)
            metrics = [Metric(key(name), float(value), now, step) for name, value in values.items()]
            self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Ends the MLflow run."""
        if self._client is not None:
            self._client.set_terminated(self._run)
            self._client = None

    def _experiment_id(self, client: Any) -> str:
        found = client.get_experiment_by_name(self._experiment)
        return client.create_experiment(self._experiment) if found is None else found.experiment_id


def key(name: str) -> str:
    """The name of a number as MLflow takes it: letters, digits, `_`, `-`, `.`, blanks and `/`."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _history(client: Any, run: str) -> Iterator[Any]:
    """Everything that an MLflow run has, by time."""
    found = (metric for name in client.get_run(run).data.metrics for metric in client.get_metric_history(run, name))
    return iter(sorted(found, key=lambda metric: (metric.step, metric.timestamp)))


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """`section.key` and its value."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    nested = list(items)
    if path and not nested:
        yield path, tree
    for name, value in nested:
        yield from _flat(value, f"{path}.{key(str(name))}" if path else key(str(name)))
