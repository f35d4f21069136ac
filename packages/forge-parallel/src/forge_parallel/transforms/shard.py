"""Fully sharded data parallelism (FSDP2) and its hybrid form (HSDP), with gradients summed, not averaged.

The loss is already a sum over the world's valid tokens divided by their number, so FSDP's own division must be off:
otherwise the number of ranks would leak into the gradient. `average` puts it back for loops that take a mean on each rank.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from forge_core.errors import PlanError
from forge_core.protocols.model import Transform
from forge_parallel.plan import Phase

if TYPE_CHECKING:
    from forge_parallel.context import Context


@dataclass(frozen=True)
class Shard(Transform):
    """Applies FSDP2 to each block, then to the rest. On one data rank it does nothing.

    Ranks that split a sequence (`cp`) shard parameters like data ranks: each has a part of every gradient's sum.
    """

    reshard: bool | None = None
    reduce: str = "last"
    average: bool = False
    name: str = "shard"
    phase: int = Phase.SHARD
    axes: frozenset[str] = frozenset({"dp_replicate", "dp_shard"})

    def apply(self, part: nn.Module, context: "Context") -> nn.Module:
        """Shards `part` in place over the data axes.

        Raises:
            PlanError: the model names no blocks, so the whole of it would be gathered at once.
        """
        layout = context.topology.layout
        if layout.dp_shard * layout.dp_replicate * layout.cp == 1:
            return part
        if not context.specs.blocks:
            raise PlanError("shard: the model's specs name no blocks to shard one by one")
        mesh = context.topology.data_mesh
        # Sums over ranks are never rounded to less than fp32, even where the result is kept in bf16.
        policy = MixedPrecisionPolicy(
            param_dtype=context.compute if context.compute != context.state else None,
            reduce_dtype=torch.promote_types(context.state, torch.float32) if context.compute == torch.bfloat16 else None,
            cast_forward_inputs=False,
        )
        reshard = layout.pp == 1 if self.reshard is None else self.reshard
        for path in context.specs.blocks:
            fully_shard(part.get_submodule(path), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                if not self.average:
                    module.set_gradient_divide_factor(1.0)
                # gloo has no fused multiply-and-sum; with a factor of 1 there is nothing to multiply anyway.
                module.set_force_sum_reduction_for_comms(True)
        return part

    def before_micro_batch(self, part: nn.Module, last: bool) -> None:
        """Gradients are reduced in the backward of the last micro-batch, or of each one."""
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(last or self.reduce == "each")
