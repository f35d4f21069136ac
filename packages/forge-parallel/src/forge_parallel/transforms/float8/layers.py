"""Selects the layers to convert, by name, and checks that float8 supports their shapes.

Pure data over `Specs`, so a recipe is refused before any memory is allocated. Does not import torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from forge_core.errors import PlanError
from forge_core.specs import Dim, Matrix, Specs
from forge_parallel.placement.shares import collapsed, float8_experts_refusal, float8_refusal


def candidates(specs: Specs) -> tuple[str, ...]:
    """Returns the paths of modules with a hidden matrix `weight`: no embeddings, no output head and no stacked experts."""
    return tuple(
        name.removesuffix(".weight")
        for name, spec in specs.tensors.items()
        if name.endswith(".weight") and spec.group == "matrix" and len(spec.dims) == 2 and "expert" not in spec.dims
    )


def selected(paths: Sequence[str], include: Iterable[str], exclude: Iterable[str]) -> frozenset[str]:
    """Returns the `paths` that match a pattern of `include` and none of `exclude`; `*` matches dots as well.

    Raises:
        PlanError: a pattern matches none of `paths`, or all patterns together select none.
    """
    chosen: set[str] = set()
    for key, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            matches = {path for path in paths if fnmatchcase(path, pattern)}
            if not matches:
                known = ", ".join(collapsed(paths)) or "none"
                raise PlanError(
                    f"transforms.float8.{key}: {pattern!r} matches no linear layer with a hidden matrix; these layers are {known}"
                )
            chosen = chosen | matches if key == "include" else chosen - matches
    if not chosen:
        raise PlanError("transforms.float8 converts no layer: include and exclude select none; change or remove them")
    return frozenset(chosen)


def check_shapes(shapes: Mapping[str, tuple[int, int]], specs: Specs, tp: int) -> None:
    """Checks that each layer can be multiplied in float8 as each of `tp` ranks holds it.

    Args:
        shapes: path -> (outputs, inputs) of the whole layer.
        specs: specs of the part.
        tp: number of ranks over which matrices are split.

    Raises:
        PlanError: a layer is not supported; names all such layers, with the shapes that ranks hold.
    """
    if why := float8_refusal({path: matrix_of(path, shape, specs) for path, shape in shapes.items()}, specs.units, tp):
        raise PlanError(why)


def check_experts(shapes: Mapping[str, tuple[int, int]], specs: Specs, etp: int) -> None:
    """Checks that stacked experts can be multiplied in float8 as each of `etp` ranks holds them.

    Args:
        shapes: name of the parameter -> (outputs, inputs) of one whole expert.
        specs: specs of the part.
        etp: number of ranks over which each expert's width is split.

    Raises:
        PlanError: a stack is not supported; names all such stacks, with the shapes that ranks hold.
    """
    stacked = {name: Matrix(shape, _pair(specs.tensors[name].dims[1:])) for name, shape in shapes.items()}
    if why := float8_experts_refusal(stacked, etp):
        raise PlanError(why)


def matrix_of(path: str, shape: tuple[int, int], specs: Specs) -> Matrix:
    """Returns the weight of a layer with its logical dimensions."""
    return Matrix(shape, _pair(specs.tensors[f"{path}.weight"].dims))


def _pair(dims: tuple[Dim, ...]) -> tuple[Dim, Dim]:
    first, second = dims
    return first, second
