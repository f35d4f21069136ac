"""A component whose `build` calls a function: bad parts differ in what it makes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forge_core.component import Component


@dataclass(frozen=True, kw_only=True)
class Part(Component):
    """What `make` makes of the arguments of the group. `says` are further attributes of the component."""

    make: Callable[..., Any]
    says: tuple[tuple[str, Any], ...] = ()

    def build(self, *given: Any) -> Any:
        return self.make(*given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in dict(self.says):
            raise AttributeError(name)
        return dict(self.says)[name]
