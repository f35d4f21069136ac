"""The transform `recompute`: activation recomputation. See `transforms.checkpointing`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from forge_core.component import FREE, Component
from forge_core.features import Feature, Neutral
from forge_core.protocols.model import Transform
from forge_parallel.model.plan import Order

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import nn

    from forge_core.protocols.model import Context


@dataclass(frozen=True, kw_only=True)
class Recompute(Component, Transform):
    """Saves less between forward and backward and computes the rest again: less memory for more time.

    Elements saved per token and block: `full` saves dim; `matmul` adds the outputs of the block's matrices, for the Llama shape
    3 dim + 2 dim kv_heads / heads + 2 ffn_dim; `attention` adds dim + heads (its output, and the log-sum-exp in fp32 or wider).
    """

    name = "recompute"
    order = Order.RECOMPUTE
    axes = frozenset()
    plane = "graph"
    key_class: ClassVar = FREE

    policy: Annotated[Literal["full", "selective"], Feature("recompute_full", when="full", plane="graph")] = "selective"
    """`full` saves only the input of a block; `selective` also saves the results of the operators in `keep`."""
    keep: Annotated[
        list[Literal["matmul", "attention"]],
        Neutral("results of collectives and choices of routers are kept in any case, and made once"),
    ] = field(default_factory=lambda: ["matmul", "attention"])
    """Operators whose results `selective` saves: those that are expensive to compute again."""
    every: Annotated[int, Gt(0), Neutral("each block is wrapped by itself")] = 1
    """Recompute every n-th block, starting with the first."""

    @property
    def whole_backward(self) -> bool:  # type: ignore[override]
        """Whether split backwards are not supported: saved results can be used by one backward only."""
        return self.policy == "selective"

    def block_variant(self, index: int, path: str, modules: "Sequence[str]") -> "Hashable":
        """Returns whether the block is recomputed."""
        return index % self.every == 0

    def apply(self, part: "nn.Module", context: "Context") -> "nn.Module":
        """Wraps every n-th block of `part` in place."""
        from forge_parallel.transforms.checkpointing import checkpoint_blocks

        checkpoint_blocks(part, context, keep=None if self.policy == "full" else tuple(self.keep), every=self.every)
        return part
