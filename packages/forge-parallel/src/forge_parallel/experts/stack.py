"""How a module that holds stacked experts reads its share of them."""

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

CUT = frozenset({"ep", "etp"})
"""Mesh dimensions over which experts are cut for computing, not only for keeping."""


@cache
def stack_class(original: type[nn.Module], parameters: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of a module's class in which reading a parameter gives this rank's experts as a plain tensor."""
    return type(f"{original.__name__}Share", (original,), {name: property(_share_of(name)) for name in parameters})


def _share_of(name: str) -> Any:
    def read(self: nn.Module) -> Tensor | None:
        parameter = self._parameters[name]
        # Outside of the module's forward FSDP shows a shard, which also lies on data axes, and asks for that itself.
        if not isinstance(parameter, DTensor) or not CUT.issuperset(parameter.device_mesh.mesh_dim_names or ()):
            return parameter
        return parameter.to_local()

    return read
