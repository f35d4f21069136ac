"""Float8 training: what a recipe chooses. See `float8.convert`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from forge_core.component import FREE, Component
from forge_core.errors import PlanError
from forge_core.features import Feature, Neutral
from forge_core.protocols.model import Transform
from forge_core.specs import Dim, Matrix, Specs
from forge_parallel.model.plan import Order
from forge_parallel.placement.shares import collapsed, float8_experts_refusal, float8_refusal

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
        from forge_parallel.transforms.float8.conversion import check_torchao

        check_torchao()
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


def candidates(specs: Specs) -> tuple[str, ...]:
    """Paths of the modules with a hidden matrix called `weight`: neither a table, nor the output head, nor stacked experts."""
    return tuple(
        name.removesuffix(".weight")
        for name, spec in specs.tensors.items()
        if name.endswith(".weight") and spec.group == "matrix" and len(spec.dims) == 2 and "expert" not in spec.dims
    )


def selected(paths: Sequence[str], include: Iterable[str], exclude: Iterable[str]) -> frozenset[str]:
    """Those of `paths` that match one of the patterns `include` and none of `exclude`; `*` crosses dots.

    Raises:
        PlanError: a pattern matches none of `paths`, or all patterns together leave none.
    """
    chosen: set[str] = set()
    for key, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            matches = {path for path in paths if fnmatchcase(path, pattern)}
            if not matches:
                there = ", ".join(collapsed(paths)) or "none"
                raise PlanError(
                    f"transforms.float8.{key}: {pattern!r} matches no linear layer with a hidden matrix; there are {there}"
                )
            chosen = chosen | matches if key == "include" else chosen - matches
    if not chosen:
        raise PlanError("transforms.float8 converts no layer: include and exclude leave none; change or remove them")
    return frozenset(chosen)


def check_shapes(shapes: Mapping[str, tuple[int, int]], specs: Specs, tp: int) -> None:
    """Whether each layer can be multiplied in float8 as every one of `tp` ranks will hold it.

    Args:
        shapes: (outputs, inputs) per path, not cut.
        specs: the part's.
        tp: ranks over which matrices are cut.

    Raises:
        PlanError: names every layer that cannot, with the shapes that ranks hold.
    """
    if why := float8_refusal({path: matrix_of(path, shape, specs) for path, shape in shapes.items()}, specs.units, tp):
        raise PlanError(why)


def check_experts(shapes: Mapping[str, tuple[int, int]], specs: Specs, etp: int) -> None:
    """Whether stacked experts can be multiplied in float8 as every one of `etp` ranks will hold them.

    Args:
        shapes: (outputs, inputs) of one expert by name of the parameter, not cut.
        specs: the part's.
        etp: ranks over which each expert's width is cut.

    Raises:
        PlanError: names every stack that cannot, with the shapes that ranks hold.
    """
    stacked = {name: Matrix(shape, _pair(specs.tensors[name].dims[1:])) for name, shape in shapes.items()}
    if why := float8_experts_refusal(stacked, etp):
        raise PlanError(why)


def matrix_of(path: str, shape: tuple[int, int], specs: Specs) -> Matrix:
    """The weight of a layer as it will be shared."""
    return Matrix(shape, _pair(specs.tensors[f"{path}.weight"].dims))


def _pair(dims: tuple[Dim, ...]) -> tuple[Dim, Dim]:
    first, second = dims
    return first, second
