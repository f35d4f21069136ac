"""Trackers as they are chosen in `[[trackers]]`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_core.component import Component

if TYPE_CHECKING:
    from forge_core.protocols.run import Tracker


@dataclass(frozen=True, kw_only=True)
class Jsonl(Component):
    """JSON lines in `metrics.jsonl` of the run's directory; every run keeps them, named in its recipe or not."""

    def build(self, run: Any) -> "Tracker":
        from forge_train.trackers.jsonl import JsonlTracker

        return JsonlTracker(run.directory / "metrics.jsonl")
