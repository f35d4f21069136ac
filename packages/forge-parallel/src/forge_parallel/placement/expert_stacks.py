"""Modules that hold stacked experts, and whether these are sharded apart from the block that they are in."""

from forge_core.layout import Layout
from forge_core.specs import Specs


def stacks(specs: Specs) -> tuple[str, ...]:
    """Paths of the modules whose parameters are stacked experts, in the order of the model."""
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name, spec in specs.tensors.items() if "expert" in spec.dims))


def apart(specs: Specs, layout: Layout) -> tuple[str, ...]:
    """The stacks that are sharded separately from their block: where tensor parallel ranks, or those that share
    experts, see different tokens. Elsewhere experts are sharded with the block that they are in."""
    return stacks(specs) if layout.tp * layout.ep * layout.etp > 1 else ()
