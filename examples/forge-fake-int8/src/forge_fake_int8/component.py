"""The keys of the transform."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from forge_core import Component, Feature
from forge_core.protocols import Context, Transform

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class FakeInt8(Component, Transform):
    """Matrices of blocks are rounded in the forward, as they will be after training, and so learn to live with it.

    Each row of a matrix has its own scale. Gradients pass the rounding unchanged (Jacob et al., 2018), and the optimizer updates
    the weights that are not rounded.
    """

    name = "fake_int8"
    order = 0  # number formats come before any sharding
    axes = frozenset()
    plane = "numerics"

    bits: Annotated[int, Ge(2), Le(8), Feature("fake_int8_bits", unless=8, plane="numerics")] = 8
    """Bits of a rounded weight, with its sign."""

    def apply(self, part: "nn.Module", context: Context) -> "nn.Module":
        from forge_fake_int8.rounding import round_linear_layers

        matrices = {name for name, spec in context.specs.tensors.items() if spec.group == "matrix"}
        round_linear_layers(part, matrices, self.bits)
        return part
