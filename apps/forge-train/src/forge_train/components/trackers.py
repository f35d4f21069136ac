"""Trackers as they are chosen in `[[trackers]]`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from forge_core.component import FREE, Component

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_core.protocols.run import Run, Tracker


@dataclass(frozen=True, kw_only=True)
class Jsonl(Component):
    """JSON lines in `metrics.jsonl` of the run's directory; every run keeps them, named in its recipe or not."""

    def build(self, run: "Run") -> "Tracker":
        from forge_train.trackers.jsonl import METRICS, JsonlTracker

        return JsonlTracker(run.directory / METRICS)


@dataclass(frozen=True, kw_only=True)
class TensorBoard(Component):
    """TensorBoard event files in `tensorboard/` of the run's directory; needs `pip install "forge-train[tensorboard]"`."""

    key_class: ClassVar = FREE

    flush_seconds: Annotated[float, Gt(0)] = 30.0
    """Longest time that values wait in memory before they are written to the file."""

    def build(self, run: "Run") -> "Tracker":
        from forge_train.trackers.tensorboard import TensorBoardTracker

        return TensorBoardTracker(run.directory / "tensorboard", flush_seconds=self.flush_seconds)


@dataclass(frozen=True, kw_only=True)
class Wandb(Component):
    """Weights & Biases, with the resolved recipe (secrets removed); needs `pip install "forge-train[wandb]"`."""

    key_class: ClassVar = FREE

    project: str = "forge"
    """Project that the run appears in."""
    entity: str | None = None
    """User or team that owns the project; the account's default when absent."""
    group: str | None = None
    """Runs of one group are shown together."""
    tags: list[str] = field(default_factory=list)
    """Labels of the run."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes a folder that `wandb sync` uploads later; when absent, `WANDB_MODE` or W&B's own settings decide."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Wandb]":
        return (cls(mode="offline"),)

    def build(self, run: "Run") -> "Tracker":
        from forge_train.trackers.wandb import WandbTracker

        return WandbTracker(
            directory=run.directory,
            name=run.job.job.name,
            config=run.config,
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=self.tags,
            mode=self.mode,
        )
