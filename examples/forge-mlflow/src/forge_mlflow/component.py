"""What a recipe says about the tracker. Importing this needs no MLflow, so `forge-train check` stays quick."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge_core import FREE, Component

if TYPE_CHECKING:
    from forge_core.protocols import Run, Tracker


@dataclass(frozen=True, kw_only=True)
class Mlflow(Component):
    """Writes to MLflow, with the resolved recipe (secrets removed) as parameters."""

    key_class: ClassVar = FREE

    experiment: str = "forge"
    """Experiment that the run appears in; it is made if it does not exist."""
    uri: str | None = None
    """Tracking server or database, such as `sqlite:///mlflow.db`; when absent, MLFLOW_TRACKING_URI or MLflow's default."""

    def build(self, run: "Run") -> "Tracker":
        from forge_mlflow.tracker import MlflowTracker

        return MlflowTracker(run.directory, run.job.job.name, run.config, experiment=self.experiment, uri=self.uri)
