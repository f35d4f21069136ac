"""Modules that hold stacked experts, and how they read their share of them."""

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge_core.layout import Layout
from forge_core.specs import Specs

CUT = frozenset({"ep", "etp"})
"""Mesh dimensions over which experts are cut for computing, not only for keeping."""


def stacks(specs: Specs) -> tuple[str, ...]:
    """Paths of the modules whose parameters are stacked experts, in the order of the model."""
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name, spec in specs.tensors.items() if "expert" in spec.dims))


def apart(specs: Specs, layout: Layout) -> tuple[str, ...]:
    """The stacks that are sharded by themselves, over ranks of their own: where tensor parallel ranks, or those that share
    experts, see different tokens. Elsewhere experts are sharded with the block that they are in."""
    return stacks(specs) if layout.tp * layout.ep * layout.etp > 1 else ()


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
