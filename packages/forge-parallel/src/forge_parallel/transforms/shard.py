"""Fully sharded data parallelism (FSDP2) and its hybrid form (HSDP): what a recipe chooses. See `transforms.fully_sharded`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from forge_core.component import LAYOUT, Component
from forge_core.features import Feature
from forge_core.protocols.model import Transform
from forge_parallel.model.plan import Order, Plan

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch
    from torch import nn

    from forge_core.protocols.model import Context

_STATED = "a run no longer chooses by itself: leave the key out, or state what `forge-train plan --device` recommends"


@dataclass(frozen=True, kw_only=True)
class FullyShard(Component, Transform):
    """Shards parameters, gradients and optimizer state over data ranks (FSDP2; with dp_replicate HSDP)."""

    name = "shard"
    order = Order.SHARD
    axes = frozenset({"dp_replicate", "dp_shard"})
    key_class: ClassVar = LAYOUT
    removed: ClassVar = {
        ("reduce", "auto"): f"{_STATED}; to continue a run bit for bit, state what its log says that it chose",
        ("reshard", "auto"): f"{_STATED}; no bit of a run depends on it",
    }

    reshard: Annotated[bool | None, Feature("reshard", when=True, axis="pp"), Feature("keep_gathered", when=False)] = None
    """Free a block's gathered parameters after its forward and gather them again for its backward. Unset: yes, but not in a
    pipeline, where every micro-batch would gather them again. `forge-train plan --device` says where `false` fits."""
    reduce: Annotated[Literal["last", "each"], Feature("reduce_each", when="each")] = "last"
    """Reduce gradients after the last micro-batch (`last`: less traffic, but whole gradients are kept until then) or after each
    one (`each`). A pipeline always reduces a stage once, after its last micro-batch. The two values sum micro-batches in another
    order, so last bits differ. `forge-train plan --device` says which one to use."""
    offload: Annotated[bool, Feature("offload", when=True)] = False
    """Keep parameters, gradients and optimizer state in the host's memory: a block's parameters come to the GPU when it is
    gathered, and the optimizer runs on the host. For models that fit no other way; needs CUDA."""

    def block_variant(self, index: int, path: str, modules: "Sequence[str]") -> "Hashable":
        """Returns nothing: every block is sharded in the same way."""
        return None

    def apply(self, part: "nn.Module", context: "Context") -> "nn.Module":
        """Applies FSDP2 to each block, then to the rest. On one data rank it does nothing, unless shards lie on the host.

        Raises:
            PlanError: the model names no blocks, so the whole of it would be gathered at once; or shards cannot lie on the host.
        """
        from forge_parallel.transforms.fully_sharded import shard

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


def reduce_of(plan: Plan) -> str | None:
    """When a plan reduces gradients (`FullyShard.reduce`), as a checkpoint records it; None for a plan that shards nothing."""
    return next((transform.reduce for transform in plan.transforms if isinstance(transform, FullyShard)), None)
