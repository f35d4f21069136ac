"""What the trainer, its hooks and its trackers agree on."""

from collections.abc import Mapping
from typing import Any, Protocol


class Hook:
    """Something that happens around a step; override what you need. Hooks run in the order of the recipe.

    A hook is built before the run owns its directory, where an older job may still work: it writes nothing there before `start`.

    `run` is the assembled trainer (`forge_train.run.assemble.Run`); its documented attributes are `model`, `optimizer`,
    `state`, `data`, `step`, `job`, `directory`, `topology`, `log(values)`.
    """

    def start(self, run: Any) -> None:
        """Once, after a checkpoint was restored and before the first step."""

    def before_step(self, run: Any) -> None:
        """Before forward and backward."""

    def before_update(self, run: Any, result: Any) -> None:
        """Gradients are complete and visible; parameters are those of the step before."""

    def after_step(self, run: Any, result: Any) -> None:
        """Parameters are updated, gradients cleared, the cursor advanced."""

    def finish(self, run: Any) -> None:
        """Once, after the last step or when the run stops early; not after an exception."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of this hook: JSON as it stands."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave, before `start`."""


class Tracker(Protocol):
    """Where numbers are written; lives on rank 0 only. A failing tracker never stops a run.

    It is built before the run owns its directory, so it writes nothing there before `rewind`.
    """

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """Once at every start, before any write: the run goes on after `step`, 0 for a new one; later steps are void."""
        ...

    def close(self) -> None: ...
