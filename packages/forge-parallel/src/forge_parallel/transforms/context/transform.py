"""The transform `context`: context parallelism. See `context.cores`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from forge_core.component import LAYOUT, Component
from forge_core.features import Feature
from forge_core.protocols.model import Transform
from forge_parallel.model.plan import Order
from forge_parallel.transforms.context.row_order import SequenceOrder

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import nn

    from forge_core.batch import Batch
    from forge_core.protocols.model import Context

Kind = Literal["all_gather", "ring", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class ContextParallel(Component, Transform):
    """Splits each row over `parallel.cp` ranks, for sequences that are too long for one device.

    `parallel.cp` must divide `data.sequence_length`; except for `ulysses`, 2 * `parallel.cp` must, so that causal attention is
    balanced.
    """

    name = "context"
    order = Order.CONTEXT
    axes = frozenset({"cp"})
    needs = frozenset({"shard"})
    key_class: ClassVar = LAYOUT

    kind: Annotated[
        Kind,
        Feature("cp_all_gather", when="all_gather", axis="cp"),
        Feature("cp_ring", when="ring", axis="cp"),
        Feature("cp_ulysses", when="ulysses", axis="cp"),
    ] = "all_gather"
    """How attention covers the whole row. `all_gather` gathers keys and values, which are small with grouped key-value heads;
    `ring` passes them around while computing and never holds more than two blocks; `ulysses` exchanges heads for positions, and
    `parallel.cp` must divide the heads."""

    def sequence_order(self, ranks: int) -> SequenceOrder:
        """Returns which positions each rank holds. Ulysses needs no balance, because it works on whole rows."""
        return SequenceOrder(ranks, balanced=self.kind != "ulysses")

    def block_variant(self, index: int, path: str, modules: "Sequence[str]") -> "Hashable":
        """Returns nothing: attention of every block is replaced in the same way."""
        return None

    def apply(self, part: "nn.Module", context: "Context") -> "nn.Module":
        """Replaces `core` in the modules of each block of `part` that have one. On one rank of `cp` it does nothing.

        Raises:
            PlanError: a block has no attention core, the model needs whole rows elsewhere, or this kind does not support a core
                or the number of heads.
        """
        ranks = context.topology.layout.cp
        if ranks > 1:
            from forge_parallel.transforms.context.cores import replace_cores

            replace_cores(part, context, self.kind, self.sequence_order(ranks))
        return part

    def local_batch(self, batch: "Batch", context: "Context") -> "Batch":
        """Returns this rank's part of each row, with explicit positions, because these do not follow from the index any more.

        Raises:
            ForgeError: the length cannot be split, or the batch has extra inputs, for which no rule is known.
        """
        ranks = context.topology.layout.cp
        if ranks == 1:
            return batch
        from forge_parallel.transforms.context.cores import cut_rows

        return cut_rows(batch, self.sequence_order(ranks), context.topology.coordinates["cp"], self.kind)
