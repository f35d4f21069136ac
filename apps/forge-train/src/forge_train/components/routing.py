"""The hook `routing`, chosen in `[[hooks]]`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt

from forge_core.component import FREE, Component

if TYPE_CHECKING:
    from forge_core.protocols.run import Hook


@dataclass(frozen=True, kw_only=True)
class Routing(Component):
    """Writes how evenly experts are used: load, entropy, dropped slots and bias of every layer, and a heat map for the report."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 100
    """Optimizer steps between two looks; the last step is always looked at."""

    def build(self, run: Any) -> "Hook":
        from forge_train.hooks.routing import RoutingHook

        return RoutingHook(self, run)
