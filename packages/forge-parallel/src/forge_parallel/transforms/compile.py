"""The transform `compile`: torch.compile, block by block. See `transforms.compilation`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt, Le

from forge_core.component import FREE, Component
from forge_core.features import Feature, Neutral
from forge_core.protocols.model import Transform
from forge_parallel.model.plan import Order

if TYPE_CHECKING:
    from torch import nn

    from forge_core.protocols.model import Context


@dataclass(frozen=True, kw_only=True)
class Compile(Component, Transform):
    """torch.compile, block by block; blocks of one shape share one graph."""

    name = "compile"
    order = Order.COMPILE
    axes = frozenset()
    plane = "graph"
    # Measured with split backwards: errors, hangs, and without donated buffers once a gradient that was wrong by 4e-3.
    whole_backward = True
    key_class: ClassVar = FREE

    fullgraph: Annotated[bool, Neutral("where a graph may end; blocks exchange the same")] = True
    """Make a graph break an error instead of a silent slowdown; the break around separately sharded experts is allowed."""
    mode: Annotated[Literal["default", "max-autotune-no-cudagraphs"], Neutral("which kernels a rank runs")] = "default"
    """How long the compiler searches for fast kernels."""
    budget: Annotated[float, Gt(0), Le(1), Feature("compile_budget", unless=1.0, plane="graph")] = 1.0
    """Share of the activations that the compiler may save for the backward; below 1 it recomputes the cheapest ones."""

    def apply(self, part: "nn.Module", context: "Context") -> "nn.Module":
        """Replaces the forward of each block of `part` in place, and on an accelerator the loss head.

        Raises:
            PlanError: this process cannot compile for its accelerator.
        """
        from forge_parallel.accelerator import require_compiler
        from forge_parallel.transforms.compilation import compile_blocks, compile_loss_heads

        require_compiler(context.topology.device, "transforms.compile")
        compile_loss_heads(part, context)
        compile_blocks(part, context, fullgraph=self.fullgraph, mode=self.mode, budget=self.budget)
        return part
