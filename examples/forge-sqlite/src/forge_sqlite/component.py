"""The keys of the tracker."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from forge_core import FREE, Component

if TYPE_CHECKING:
    from forge_core.protocols import Run, Tracker


@dataclass(frozen=True, kw_only=True)
class Sqlite(Component):
    """One database for all runs, so that a question about many runs is one query. Rank 0 writes it."""

    key_class: ClassVar = FREE

    path: str | None = None
    """File of the database; by default `metrics.sqlite` in the folder that contains the directories of the runs."""

    def build(self, run: "Run") -> "Tracker":
        from forge_sqlite.tracker import SqliteTracker

        path = Path(self.path) if self.path else run.directory.resolve().parent / "metrics.sqlite"
        return SqliteTracker(path, str(run.directory.resolve()))
