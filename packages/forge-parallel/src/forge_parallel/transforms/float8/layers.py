"""Which layers are converted, by logical name, and whether their shapes can be multiplied in float8.

Pure data over `Specs`, so a recipe that cannot work is refused before any memory is allocated. No torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from forge_core.errors import PlanError
from forge_core.specs import Dim, Matrix, Specs
from forge_parallel.placement.shares import collapsed, float8_experts_refusal, float8_refusal


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
