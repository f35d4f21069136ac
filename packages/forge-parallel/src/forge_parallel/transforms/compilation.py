"""torch.compile, block by block: blocks share one graph, so the time to compile does not grow with depth.

On an accelerator the loss head is compiled, too, which otherwise reads its logits in each of a dozen operators. Only a
block's `forward` is compiled. What is attached to the call of the block (gathering a shard) runs outside the graph, and
no module or parameter changes its name.

Experts that are sharded separately are gathered, and given tokens whose number is known at run time only, in the
middle of a block. Their dispatcher, and all that it runs, stays outside the graphs: one before it and one behind it.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_core.protocols.model import LossHead
from forge_parallel.placement.shares import apart
from forge_parallel.torch_private import within_budget
from forge_parallel.transforms.checkpointing import inside

if TYPE_CHECKING:
    from forge_core.protocols.topology import Context


def compile_blocks(part: nn.Module, context: "Context", *, fullgraph: bool, mode: str, budget: float) -> None:
    """Compiles every block of `part` in place, with inductor.

    `budget` is the share of activations that the compiler may keep between forward and backward (1 keeps all that it likes);
    it decides what to recompute by solving a knapsack problem on its graph.
    """
    outside = apart(context.specs, context.topology.layout)
    for stack in outside:
        layer: Any = part.get_submodule(stack.rpartition(".")[0])
        layer.dispatch = torch.compiler.disable(layer.dispatch)
    for path in context.specs.blocks:
        block = part.get_submodule(path)
        broken = any(stack.startswith(f"{path}.") for stack in outside)
        wrap = partial(_compiled, fullgraph=fullgraph and not broken, mode=mode, budget=budget)
        # The compiler takes recomputation into a graph, but none that is broken: it would give up on the whole block.
        block.forward = inside(block.forward, wrap) if broken else wrap(block.forward)  # type: ignore[method-assign]


def compile_loss_heads(part: nn.Module, context: "Context") -> None:
    """Replaces the loss heads of `part` that have a compiled form, on an accelerator; a CPU's are made for its cache."""
    if context.topology.device.type == "cpu":
        return
    for path in context.specs.exit:
        for module in part.get_submodule(path).modules():
            core = getattr(module, "core", None)
            if isinstance(core, LossHead) and hasattr(core, "compiled"):
                module.core = core.compiled()  # type: ignore[assignment]


def _compiled(forward: Callable[..., Any], fullgraph: bool, mode: str, budget: float) -> Callable[..., Any]:
    compiled = torch.compile(forward, fullgraph=fullgraph, dynamic=False, mode=mode)
    return compiled if budget == 1.0 else partial(_within, budget, compiled)


def _within(budget: float, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # The compiler reads its budget when it compiles, which is inside some call of the block.
    with within_budget(budget):
        return compiled(*args, **kwargs)
