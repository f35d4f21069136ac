"""torch.compile, block by block: what a recipe chooses. See `transforms.compiled`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt, Le

from forge_core.component import FREE, Component
from forge_core.features import Feature, Neutral
from forge_core.protocols.model import Transform
from forge_parallel.model.plan import Order

if TYPE_CHECKING:
    from torch import nn

    from forge_core.protocols.topology import Context


@dataclass(frozen=True, kw_only=True)
class Compile(Component, Transform):
    """torch.compile, block by block; blocks of one shape share one graph."""

    name = "compile"
    phase = Order.COMPILE
    axes = frozenset()
    plane = "graph"
    # Measured: errors, hangs, and with donated buffers off once a gradient that was silently wrong by 4e-3.
    whole_backward = True
    key_class: ClassVar = FREE

    fullgraph: Annotated[bool, Neutral("where a graph may end; blocks exchange the same")] = True
    """A graph break is an error instead of a silent loss of speed; but for the one around experts that are shared over ranks."""
    mode: Annotated[Literal["default", "max-autotune-no-cudagraphs"], Neutral("which kernels a rank runs")] = "default"
    """How long the compiler may look for fast kernels."""
    budget: Annotated[float, Gt(0), Le(1), Feature("compile_budget", unless=1.0, plane="graph")] = 1.0
    """Share of the activations that the compiler may keep for the backward; below 1 it recomputes the cheapest ones."""

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
