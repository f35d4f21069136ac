"""torch.compile, block by block: equal blocks share one graph, so compile time does not grow with depth.

On an accelerator, the loss head is compiled as well; otherwise each of a dozen operators would read its logits. Only a block's
`forward` is compiled. Hooks of the block's call, such as gathering a shard, run outside the graph, and modules and parameters
keep their names.

Separately sharded experts are gathered in the middle of a block, and the number of their tokens is known only at run time. So
their dispatcher, and everything that it calls, stays outside the graphs: there is one graph before and one after it.
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
    from forge_core.protocols.model import Context


def compile_blocks(part: nn.Module, context: "Context", *, fullgraph: bool, mode: str, budget: float) -> None:
    """Compiles every block of `part` in place with inductor.

    `budget` is the share of activations that the compiler may save for the backward (1: all that it chooses). The compiler
    decides what to recompute by solving a knapsack problem on the graph.
    """
    outside = apart(context.specs, context.topology.layout)
    for stack in outside:
        layer: Any = part.get_submodule(stack.rpartition(".")[0])
        layer.dispatch = torch.compiler.disable(layer.dispatch)
    for path in context.specs.blocks:
        block = part.get_submodule(path)
        _tell_cores(block)
        broken = any(stack.startswith(f"{path}.") for stack in outside)
        wrap = partial(_compiled, fullgraph=fullgraph and not broken, mode=mode, budget=budget)
        # The compiler includes recomputation in a graph, but gives up on a whole block if the recomputed part has a graph break.
        block.forward = inside(block.forward, wrap) if broken else wrap(block.forward)  # type: ignore[method-assign]


def _tell_cores(block: nn.Module) -> None:
    """Sets `in_compiled_block` of attention cores that have it, including those inside other cores: kernels for which a compiled
    block is not proven are then not chosen."""
    for module in block.modules():
        core = getattr(module, "core", None)
        while core is not None:
            if hasattr(core, "in_compiled_block"):
                core.in_compiled_block = True
            core = getattr(core, "inner", None)


def compile_loss_heads(part: nn.Module, context: "Context") -> None:
    """Replaces loss heads of `part` by their compiled form, if they have one, on an accelerator; CPU heads use the cache
    instead."""
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
    # The compiler reads its budget when it compiles, during some call of the block.
    with within_budget(budget):
        return compiled(*args, **kwargs)
