"""The transform `tensor`: tensor parallelism. See `tensor.cut`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from forge_core.component import LAYOUT, Component
from forge_core.features import Feature
from forge_core.protocols.model import Transform
from forge_parallel.model.plan import Order

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import nn

    from forge_core.protocols.model import Context
    from forge_core.specs import Specs
    from forge_parallel.transforms.tensor.rules import Rules


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Component, Transform):
    """Splits matrices over `parallel.tp` ranks along heads, hidden features and vocabulary (tensor parallelism)."""

    name = "tensor"
    order = Order.TENSOR
    axes = frozenset({"tp"})
    key_class: ClassVar = LAYOUT

    sequence_parallel: Annotated[bool, Feature("tp_whole", when=False, axis="tp")] = True
    """Split the residual stream along the sequence between split matrices: less memory for equally many bytes sent. `parallel.tp`
    must divide the length."""
    asynchronous: Annotated[bool, Feature("tp_asynchronous", when=True, axis="tp")] = False
    """Overlap communication with adjacent matrix products: on CUDA devices that can access each other's memory, with sequence
    parallelism, in compiled blocks."""

    def __post_init__(self) -> None:
        if self.asynchronous and not self.sequence_parallel:
            raise ValueError("asynchronous = true overlaps communication of sequence parallelism; set sequence_parallel = true")

    def rules(self, specs: "Specs", tp: int) -> "Rules":
        """Returns which parameters are split over `tp` ranks, and how."""
        from forge_parallel.transforms.tensor.rules import tensor_parallel_rules

        return tensor_parallel_rules(specs, tp, self.sequence_parallel)

    def block_variant(self, index: int, path: str, modules: "Sequence[str]") -> "Hashable":
        """Returns nothing: every block is split in the same way."""
        return None

    def apply(self, part: "nn.Module", context: "Context") -> "nn.Module":
        """Splits the parameters of a part over tp ranks. Does nothing on one tp rank.

        Raises:
            PlanError: the specs do not say how to split a parameter, or a rank would get no part of one.
        """
        tp = context.topology.layout.tp
        if tp > 1:
            from forge_parallel.transforms.tensor.cut import cut, overlap

            if self.asynchronous:
                overlap(context.topology)
            if context.specs.tp_plan is not None:
                from forge_parallel.foreign.recipe_model import planned_rules

                rules = planned_rules(part, context.specs, context.whole or context.specs, tp)
            else:
                rules = self.rules(context.specs, tp)
            cut(part, rules, context, self.sequence_parallel)
        return part

    def hidden_shape(self, shape: tuple[int, ...], context: "Context") -> tuple[int, ...]:
        """Returns the shape between pipeline stages, where the residual stream stays split along the sequence."""
        from forge_parallel.placement.shares import chunk

        topology = context.topology
        tp = topology.layout.tp
        if tp == 1 or not self.sequence_parallel:
            return shape
        batch, length, *width = shape
        return batch, chunk(length, tp, topology.coordinates["tp"])[1], *width

    def whole_sequences(self, part: "nn.Module", on: bool) -> None:
        """Sets whether sequences are whole; without sequence parallelism they always are, and may have any length."""
        from forge_parallel.transforms.tensor.cut import cut_sequences

        cut_sequences(part, self.sequence_parallel and not on)

    def after_backward(self, part: "nn.Module", context: "Context") -> None:
        """Collective: sums over tp the gradients of parameters that every rank holds whole but used only for its own share."""
        from forge_parallel.transforms.tensor.cut import sum_partial_gradients

        sum_partial_gradients(part, context.topology)
