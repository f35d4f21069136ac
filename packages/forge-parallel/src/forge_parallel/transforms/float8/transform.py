"""Float8 training: the keys of `[transforms.float8]`. `conversion` replaces the layers."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from forge_core.component import FREE, Component
from forge_core.features import Feature, Neutral
from forge_core.protocols.model import Transform
from forge_parallel import torchao_library
from forge_parallel.model.plan import Order

if TYPE_CHECKING:
    from torch import nn

    from forge_core.protocols.topology import Context


@dataclass(frozen=True, kw_only=True)
class Float8(Component, Transform):
    """Multiplies hidden matrices in float8 (torchao), with weights, gradients and optimizer as before: faster on GPUs from Ada
    and Hopper on. Needs `pip install "forge-parallel[float8]"`.

    Converted are linear layers whose weight is a hidden matrix, and with `experts` stacked experts: not the embedding, the output
    head or routers. The dimensions that a rank holds of a layer, and its tokens of a micro-batch, have to be multiples of 16.
    """

    name = "float8"
    phase = Order.QUANTIZE
    axes = frozenset()
    plane = "numerics"
    products = "fp8"
    key_class: ClassVar = FREE

    recipe: Annotated[Literal["tensorwise", "rowwise"], Feature("float8_rowwise", when="rowwise", plane="numerics")] = (
        "tensorwise"
    )
    """`tensorwise` has one scale per tensor and gradients in E5M2: the fastest. `rowwise` has one scale per row of each operand,
    all in E4M3: more accurate, and whole weights are gathered in `precision.compute`."""
    include: Annotated[list[str], Neutral("each layer is converted by itself")] = field(default_factory=lambda: ["*"])
    """Layers to convert: shell patterns over paths of modules such as `blocks.0.mlp.up_proj`; `*` crosses dots."""
    exclude: Annotated[list[str], Neutral("each layer is converted by itself")] = field(default_factory=list)
    """Layers to leave as they are, by patterns; `["blocks.0.*"]` leaves the first block."""
    emulate: Annotated[Literal["auto"] | bool, Neutral("what multiplies on one rank")] = "auto"
    """Compute in fp32 from operands that are rounded to float8: the same numbers on any device, without the speed. `auto` does so
    where the device lacks hardware for float8; with false such a device is refused."""
    all_gather: Annotated[
        bool | None,
        Feature("float8_wide_gather", when=False, plane="numerics"),
        Neutral("what tensorwise does when it is unset; rowwise refuses it", when=True),
    ] = None
    """Gather the weights of sharded layers in float8 instead of `precision.compute`. Unset: yes with `tensorwise`."""
    experts: Annotated[bool, Feature("float8_experts", when=True, plane="numerics")] = False
    """Multiply stacked experts in float8, in the place of `model.moe.kernel`. With either recipe they are rowwise and gathered
    in `precision.compute`; an expert may have any number of tokens. Needs Hopper GPUs, or Blackwell ones of data centers."""

    def __post_init__(self) -> None:
        if self.recipe == "rowwise" and self.all_gather:
            raise ValueError("all_gather = true needs recipe = 'tensorwise': else its rows and columns are scaled differently")

    def build(self) -> "Float8":
        torchao_library.check_installed(f"transforms.{self.name}", extra=self.name)
        return self

    def apply(self, part: "nn.Module", context: "Context") -> "nn.Module":
        """Converts layers of `part` in place: each module stays, with its parameters and hooks, and changes its class.

        Raises:
            PlanError: a pattern matches nothing, a layer's shape or class does not allow it, or the precision is fp64.
            ForgeError: torchao is not installed.
        """
        from forge_parallel.transforms.float8.conversion import convert

        gathers = self.recipe == "tensorwise" and self.all_gather is not False
        convert(
            part,
            context,
            recipe=self.recipe,
            include=self.include,
            exclude=self.exclude,
            emulate=self.emulate,
            all_gather=gathers,
            experts=self.experts,
        )
        return part

    def before_micro_batch(self, part: "nn.Module", last: bool) -> None:
        """Finds the scales of all weights that will be gathered, at once."""
        from forge_parallel.transforms.float8.conversion import find_scales

        find_scales(part)

    def after_backward(self, part: "nn.Module", context: "Context") -> None:
        """Weights change next, and their scales with them."""
        from forge_parallel.transforms.float8.conversion import forget_scales

        forget_scales(part)
