"""Tensor parallelism: what a recipe chooses. See `tensor.cut`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from forge_core.component import LAYOUT, Component
from forge_core.features import Feature
from forge_core.protocols.model import Transform
from forge_parallel.model.plan import Order

if TYPE_CHECKING:
    from torch import nn

    from forge_core.protocols.topology import Context
    from forge_core.specs import Specs
    from forge_parallel.transforms.tensor.rules import Rules


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Component, Transform):
    """Cuts single matrices over `parallel.tp` ranks: heads, hidden features and vocabulary (tensor parallelism)."""

    name = "tensor"
    phase = Order.TENSOR
    axes = frozenset({"tp"})
    key_class: ClassVar = LAYOUT

    sequence_parallel: Annotated[bool, Feature("tp_whole", when=False, axis="tp")] = True
    """Cut the residual stream along the sequence between the cut matrices: less memory, the same bytes on the wire. `parallel.tp`
    has to divide the length then."""
    asynchronous: Annotated[bool, Feature("tp_asynchronous", when=True, axis="tp")] = False
    """Overlap the exchanges with the adjacent matrix products: on CUDA devices that reach each other's memory, with
    sequence parallelism, in compiled blocks."""

    def __post_init__(self) -> None:
        if self.asynchronous and not self.sequence_parallel:
            raise ValueError("asynchronous = true overlaps the exchanges of sequence parallelism: keep sequence_parallel = true")

    def rules(self, specs: "Specs", tp: int) -> "Rules":
        """What is cut, and how, over `tp` ranks."""
        from forge_parallel.transforms.tensor.rules import rules

        return rules(specs, tp, self.sequence_parallel)

    def apply(self, part: "nn.Module", context: "Context") -> "nn.Module":
        """Cuts the parameters of a part over tp ranks. On one tp rank it does nothing.

        Raises:
            PlanError: the model's specs do not tell how to cut a parameter, or a cut would leave a rank without any.
        """
        tp = context.topology.layout.tp
        if tp > 1:
            from forge_parallel.transforms.tensor.cut import cut, overlap

            if self.asynchronous:
                overlap(context.topology)
            cut(part, self.rules(context.specs, tp), context, self.sequence_parallel)
        return part

    def hidden_shape(self, shape: tuple[int, ...], context: "Context") -> tuple[int, ...]:
        """Between pipeline stages the residual stream stays cut along the sequence."""
        from forge_parallel.placement.shares import chunk

        topology = context.topology
        tp = topology.layout.tp
        if tp == 1 or not self.sequence_parallel:
            return shape
        batch, length, width = shape
        return batch, chunk(length, tp, topology.coordinates["tp"])[1], width

    def whole_sequences(self, part: "nn.Module", on: bool) -> None:
        """Without sequence parallelism the same modules work on sequences of any length."""
        from forge_parallel.transforms.tensor.cut import cut_sequences

        cut_sequences(part, self.sequence_parallel and not on)

    def after_backward(self, part: "nn.Module", context: "Context") -> None:
        """Collective: sums over tp the gradients of parameters that every rank holds and used for its own share."""
        from forge_parallel.transforms.tensor.cut import sum_partial_gradients

        sum_partial_gradients(part, context.topology)
