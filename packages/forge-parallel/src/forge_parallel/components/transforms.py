"""Transforms that a recipe switches on by `[transforms.NAME]`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge_core.component import Component

if TYPE_CHECKING:
    from forge_core.protocols.model import Transform


@dataclass(frozen=True, kw_only=True)
class Shard(Component):
    """Shards parameters, gradients and optimizer state over data ranks (FSDP2; with dp_replicate HSDP)."""

    reshard: bool = True
    """Free a block's gathered parameters after its forward and gather them again for its backward."""
    reduce: Literal["last", "each"] = "last"
    """Reduce gradients after the last micro-batch (fast) or after each one (no unsharded gradient is ever kept)."""

    def build(self) -> "Transform":
        from forge_parallel.transforms.shard import Shard as Transformed

        return Transformed(reshard=self.reshard, reduce=self.reduce)
