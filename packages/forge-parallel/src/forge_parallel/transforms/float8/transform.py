"""The transform `float8`: float8 training. See `float8.conversion`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from forge_core.component import FREE, Component
from forge_core.features import Feature, Neutral
from forge_core.protocols.model import Transform
from forge_parallel import torchao_library
from forge_parallel.model.plan import Order

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import nn

    from forge_core.protocols.model import Context


@dataclass(frozen=True, kw_only=True)
class Float8(Component, Transform):
    """Multiplies hidden matrices in float8 (torchao); weights, gradients and optimizer stay as they are. Faster on GPUs from Ada
    and Hopper on. Needs `pip install "forge-parallel[float8]"`.

    Converts linear layers whose weight is a hidden matrix, and with `experts` stacked experts; not the embedding, the output head
    or routers. The local dimensions of a layer, and a rank's tokens per micro-batch, must be multiples of 16.
    """

    name = "float8"
    order = Order.QUANTIZE
    axes = frozenset()
    plane = "numerics"
    products = "fp8"
    key_class: ClassVar = FREE

    recipe: Annotated[Literal["tensorwise", "rowwise"], Feature("float8_rowwise", when="rowwise", plane="numerics")] = (
        "tensorwise"
    )
    """`tensorwise` has one scale per tensor and gradients in E5M2: the fastest. `rowwise` has one scale per row of each operand,
    all in E4M3: more accurate, but weights are gathered in `precision.compute`."""
    include: Annotated[list[str], Neutral("each layer is converted by itself")] = field(default_factory=lambda: ["*"])
    """Layers to convert: patterns of module paths such as `blocks.0.mlp.up_proj`; `*` matches dots as well."""
    exclude: Annotated[list[str], Neutral("each layer is converted by itself")] = field(default_factory=list)
    """Layers not to convert, by patterns; `["blocks.0.*"]` leaves the first block unconverted."""
    emulate: Annotated[Literal["auto"] | bool, Neutral("what multiplies on one rank")] = "auto"
    """Compute in fp32 from operands rounded to float8: the same numbers on any device, but not faster. `auto` does so if the
    device has no float8 hardware; with false such a device is refused."""
    all_gather: Annotated[
        bool | None,
        Feature("float8_wide_gather", when=False, plane="numerics"),
        Neutral("what tensorwise does when it is unset; rowwise refuses it", when=True),
    ] = None
    """Gather the weights of sharded layers in float8 instead of `precision.compute`. Default: true for `tensorwise`."""
    experts: Annotated[bool, Feature("float8_experts", when=True, plane="numerics")] = False
    """Multiply stacked experts in float8 instead of with `model.moe.kernel`. With either recipe, they are rowwise and gathered in
    `precision.compute`; an expert may have any number of tokens. Needs Hopper or data-center Blackwell GPUs."""

    def __post_init__(self) -> None:
        if self.recipe == "rowwise" and self.all_gather:
            raise ValueError("all_gather = true needs recipe = 'tensorwise', because rowwise scales differ between operands")

    def build(self) -> "Float8":
        torchao_library.check_installed(f"transforms.{self.name}", extra=self.name)
        return self

    def block_variant(self, index: int, path: str, modules: "Sequence[str]") -> "Hashable":
        """Returns which modules of the block the patterns select."""
        from fnmatch import fnmatchcase

        def chosen(patterns: list[str]) -> "frozenset[str]":
            return frozenset(name for name in modules if any(fnmatchcase(f"{path}.{name}", pattern) for pattern in patterns))

        return chosen(self.include) - chosen(self.exclude)

    def apply(self, part: "nn.Module", context: "Context") -> "nn.Module":
        """Converts layers of `part` in place: modules keep their parameters and hooks, but get another class.

        Raises:
            PlanError: a pattern matches no layer, float8 does not support a layer's shape or class, or the precision is fp64.
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
        """Computes the scales of all weights that will be gathered, together."""
        from forge_parallel.transforms.float8.conversion import find_scales

        find_scales(part)

    def after_backward(self, part: "nn.Module", context: "Context") -> None:
        """Discards the scales, because the weights change next."""
        from forge_parallel.transforms.float8.conversion import forget_scales

        forget_scales(part)
