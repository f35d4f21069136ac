"""Which layers are converted, by logical name, and whether their shapes can be multiplied in float8.

Pure data over `Specs`, so a recipe that cannot work is refused before any memory is allocated.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from forge_core.errors import PlanError
from forge_core.specs import Specs
from forge_parallel.boxes import chunk
from forge_parallel.tensor.rules import Role, rules

MULTIPLE = 16
"""Float8 kernels read rows of 16 bytes: every dimension of a product is a multiple of it."""


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
        raise PlanError("transforms.float8 converts no layer: include and exclude leave none; leave [transforms.float8] out")
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
    bad: dict[str, list[str]] = defaultdict(list)
    for path, shape in shapes.items():
        local = held(path, shape, specs, tp)
        if any(size % MULTIPLE for pair in local for size in pair):
            sizes = " and ".join(f"{outputs} x {inputs}" for outputs, inputs in local)
            bad[sizes + (f" (cut by parallel.tp = {tp})" if tp > 1 else "")].append(path)
    if bad:
        lines = (f"{', '.join(collapsed(paths))}: {sizes}" for sizes, paths in bad.items())
        names = ", ".join(f'"{name}"' for name in collapsed([path for paths in bad.values() for path in paths]))
        raise PlanError(
            f"float8 needs outputs and inputs of every layer to be multiples of {MULTIPLE}, but: {'; '.join(lines)}. "
            f"Choose other sizes, or transforms.float8.exclude = [{names}]"
        )


def check_experts(shapes: Mapping[str, tuple[int, int]], specs: Specs, etp: int) -> None:
    """Whether stacked experts can be multiplied in float8 as every one of `etp` ranks will hold them.

    Args:
        shapes: (outputs, inputs) of one expert by name of the parameter, not cut.
        specs: the part's.
        etp: ranks over which each expert's width is cut.

    Raises:
        PlanError: names every stack that cannot, with the shapes that ranks hold.
    """
    bad: dict[str, None] = {}
    for name, shape in shapes.items():
        width = specs.tensors[name].dims[1:]
        sizes = [size // etp if dim == "ffn" else size for size, dim in zip(shape, width, strict=True)]
        if any(size % MULTIPLE for size in sizes):
            bad[f"{collapsed([name])[0]}: {sizes[0]} x {sizes[1]}"] = None
    if bad:
        cut = f" (cut by parallel.etp = {etp})" if etp > 1 else ""
        raise PlanError(
            f"float8 needs outputs and inputs of every expert to be multiples of {MULTIPLE}, but: {', '.join(bad)}{cut}. Choose "
            "other sizes, or transforms.float8.experts = false"
        )


def held(path: str, shape: tuple[int, int], specs: Specs, tp: int) -> tuple[tuple[int, int], ...]:
    """The different shapes that tp ranks hold of a layer and multiply."""
    if tp == 1:
        return (shape,)
    table = rules(specs, tp, True)
    if table.roles[path] is Role.KV_COPY:  # the weight is whole, one head of it is used
        return ((shape[0] // specs.units["kv_heads"], shape[1]),)
    dim = table.cut[f"{path}.weight"]
    if dim is None:
        return (shape,)
    sizes = dict.fromkeys(chunk(shape[dim], tp, rank)[1] for rank in range(tp))
    return tuple((size, shape[1]) if dim == 0 else (shape[0], size) for size in sizes)


def collapsed(paths: Iterable[str]) -> tuple[str, ...]:
    """Paths with `*` for their numbers, each once: as patterns they match all that were given."""
    return tuple(dict.fromkeys(".".join("*" if step.isdecimal() else step for step in path.split(".")) for path in paths))
