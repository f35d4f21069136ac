"""What the trainer, its hooks and its trackers agree on."""

from collections.abc import Mapping
from typing import Any, Protocol


class Hook:
    """Something that happens around a step; override what you need. Hooks run in the order of the recipe.

    A hook is given its run by every method. Until `start`, an older job may still work in the run's directory: a hook writes
    nothing there before.

    Attributes:
        state_key: finds the hook's state in a checkpoint. A run sets the registered name of a hook of its recipe, such as
            `forge-train:evaluate`; a hook without one goes by the name of its class. Hooks with the same key keep their order.
    """

    state_key: str = ""

    def check(self, run: Any) -> None:
        """Once, before the run takes over its directory: raises a ForgeError when the hook cannot work with this run."""

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
        """Takes what `state` gave, after `check` and before `start`."""


class Tracker(Protocol):
    """Where numbers are written; lives on rank 0 only. A failing tracker never stops a run.

    It is built before the run owns its directory, so it writes nothing there before `rewind`.
    """

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """Once at every start, before any write: the run goes on after `step`, 0 for a new one; later steps are void."""
        ...

    def close(self) -> None: ...
