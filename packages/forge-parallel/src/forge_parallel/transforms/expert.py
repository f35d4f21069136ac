"""The transform `expert`: expert parallelism. See `dispatchers`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from forge_core.component import LAYOUT, Component
from forge_core.features import Feature, Neutral
from forge_core.protocols.model import Transform
from forge_parallel.model.plan import Order

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import nn

    from forge_core.protocols.model import Context

Kind = Literal["all_to_all", "all_gather", "hierarchical"]


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(Component, Transform):
    """Splits experts over `parallel.ep` ranks, to which tokens are sent, and each expert's width over `parallel.etp`."""

    name = "expert"
    order = Order.EXPERT
    axes = frozenset({"ep", "etp"})
    needs = frozenset({"shard"})
    key_class: ClassVar = LAYOUT

    dispatcher: Annotated[
        Kind,
        Feature("ep_all_to_all", when="all_to_all", axis="ep"),
        Feature("ep_all_gather", when="all_gather", axis="ep"),
        Feature("ep_hierarchical", when="hierarchical", axis="ep"),
    ] = "all_to_all"
    """How tokens are sent. `all_to_all` sends each token to the ranks that have its experts; `all_gather` sends all tokens to all
    ranks; `hierarchical` sends each token at most once to each other node, and from there to its experts."""
    ranks_per_node: Annotated[Annotated[int, Gt(1)] | None, Neutral("a size of groups, as that of an axis")] = None
    """For `hierarchical`: number of neighboring `ep` ranks in one node."""
    overlap: Annotated[bool, Feature("ep_in_turn", when=False, axis="ep")] = True
    """Compute shared experts while tokens are being sent."""

    def __post_init__(self) -> None:
        if self.dispatcher == "hierarchical" and self.ranks_per_node is None:
            raise ValueError("dispatcher = 'hierarchical' needs ranks_per_node, the number of ep ranks in one node")
        if self.dispatcher != "hierarchical" and self.ranks_per_node is not None:
            raise ValueError(f"dispatcher = '{self.dispatcher}' does not use ranks_per_node; remove it, or use 'hierarchical'")

    def block_variant(self, index: int, path: str, modules: "Sequence[str]") -> "Hashable":
        """Returns nothing: experts of every block are split in the same way."""
        return None

    def apply(self, part: "nn.Module", context: "Context") -> "nn.Module":
        """Splits stacked experts over `ep` and `etp` and replaces their layers' dispatchers. Does nothing if both are 1.

        Raises:
            PlanError: a layer has no dispatcher to replace, experts cannot be split evenly, or ranks per node do not divide ep.
        """
        if context.topology.layout.ep * context.topology.layout.etp > 1:
            from forge_parallel.transforms.dispatchers import share_experts

            share_experts(part, context, dispatcher=self.dispatcher, ranks_per_node=self.ranks_per_node, overlap=self.overlap)
        return part
