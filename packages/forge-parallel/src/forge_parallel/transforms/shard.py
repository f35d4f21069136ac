"""Fully sharded data parallelism (FSDP2) and its hybrid form (HSDP): what a recipe chooses. See `transforms.fully_sharded`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from forge_core.component import LAYOUT, Component
from forge_core.errors import PlanError
from forge_core.features import Feature, Neutral
from forge_core.protocols.model import Transform
from forge_parallel.model.plan import Order

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.protocols.topology import Context


@dataclass(frozen=True, kw_only=True)
class FullyShard(Component, Transform):
    """Shards parameters, gradients and optimizer state over data ranks (FSDP2; with dp_replicate HSDP)."""

    name = "shard"
    phase = Order.SHARD
    axes = frozenset({"dp_replicate", "dp_shard"})
    key_class: ClassVar = LAYOUT

    reshard: Annotated[
        bool | Literal["auto"] | None,
        Feature("reshard", when=True, axis="pp"),
        Feature("keep_gathered", when=False),
        Neutral("the value that is chosen says what it is", when="auto"),
    ] = None
    """Free a block's gathered parameters after its forward and gather them again for its backward. Unset: yes, but not in a
    pipeline, where every micro-batch would gather them again. `"auto"`: no, where there is memory for all of them."""
    reduce: Annotated[
        Literal["last", "each", "auto"],
        Feature("reduce_each", when="each"),
        Neutral("the value that is chosen says what it is", when="auto"),
    ] = "last"
    """Reduce gradients after the last micro-batch (fast) or after each one (no unsharded gradient is ever kept). A pipeline
    always reduces a stage once, after its last micro-batch. The two sum in another order, so last bits differ. `"auto"`: after
    the last one, where there is memory for whole gradients; a resume in the same layout goes on as before while that fits.
    Without a device whose memory is known, both keys choose what takes least."""
    offload: Annotated[bool, Feature("offload", when=True)] = False
    """Keep parameters, gradients and optimizer state in the host's memory: a block's parameters come to the GPU when it is
    gathered, and the optimizer runs on the host. For models that fit no other way; needs CUDA."""

    def apply(self, part: "nn.Module", context: "Context") -> "nn.Module":
        """Applies FSDP2 to each block, then to the rest. On one data rank it does nothing, unless shards lie on the host.

        Raises:
            PlanError: the model names no blocks, so the whole of it would be gathered at once; or shards cannot lie on the host;
                or a value is still to be chosen.
        """
        from forge_parallel.transforms.fully_sharded import shard

        if self.reshard == "auto" or self.reduce == "auto":
            raise PlanError(
                f"shard: reshard = {self.reshard!r}, reduce = {self.reduce!r}: 'auto' stands for a value that is chosen for a "
                "whole recipe (forge_parallel.settle.settled); give values here"
            )
        shard(part, context, reshard=self.reshard, offload=self.offload)
        return part

    def parameter_device(self, device: "torch.device") -> "torch.device":
        """With `offload` the host: a shard goes to the device when it is gathered."""
        import torch

        return torch.device("cpu") if self.offload else device

    def before_micro_batch(self, part: "nn.Module", last: bool) -> None:
        """Gradients are reduced in the backward of the last micro-batch, or of each one."""
        from forge_parallel.transforms.fully_sharded import reduce_next

        reduce_next(part, last or self.reduce == "each")
