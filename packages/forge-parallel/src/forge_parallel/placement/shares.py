"""How sizes are shared among ranks, and which sizes cannot be: pure numbers for `check`, before torch is imported, and
transforms.

A function `..._refusal` returns why a size cannot be shared, with the keys to change; None if it can.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from forge_core.layout import Layout
from forge_core.specs import Dim, Matrix, Specs

CUT: frozenset[Dim] = frozenset({"heads", "kv_heads", "state_heads", "ffn", "vocab"})
"""Logical dimensions that are split over tp ranks."""

FLOAT8_MULTIPLE = 16
"""Float8 kernels read rows of 16 bytes, so every dimension of a product must be a multiple of 16."""


def chunk(size: int, pieces: int, index: int) -> tuple[int, int]:
    """Returns (start, length) of piece `index` when torch splits `size` elements: equal pieces, except that the last ones may be
    shorter or empty."""
    full = -(-size // pieces)
    start = min(full * index, size)
    return start, min(full, size - start)


def rows_refusal(name: str, size: int, tp: int) -> str | None:
    """Checks that every tp rank gets some of the `size` rows of `name`."""
    if chunk(size, tp, tp - 1)[1]:
        return None
    return f"{name} has {size} rows, too few for {tp} ranks: the last one would get none; use a smaller parallel.tp"


def heads_refusal(units: Mapping[str, int], tp: int) -> str | None:
    """Checks that tp ranks share query heads and heads of recurrent layers evenly, and key-value heads evenly or as copies."""
    heads, kv_heads = units.get("heads"), units.get("kv_heads")
    if heads is not None and heads % tp:
        return f"{heads} heads cannot be divided among parallel.tp = {tp} ranks; choose a tp that divides them"
    if kv_heads is not None and kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} key-value heads do not fit parallel.tp = {tp}; choose values of which one divides the other"
    if (common := units.get("common_kv_heads")) is not None and common % tp:
        return (
            f"layers have different numbers of key-value heads, which parallel.tp = {tp} must all be multiples of; choose a tp "
            f"that divides {common}"
        )
    if (groups := units.get("output_groups")) is not None and groups % tp:
        return (
            f"{groups} groups of heads, each with an output projection (o_groups), cannot be divided among parallel.tp = {tp} "
            "ranks; choose a tp that divides them"
        )
    if (states := units.get("state_heads")) is not None and states % tp:
        return (
            f"{states} heads of recurrent layers cannot be divided among parallel.tp = {tp} ranks; choose a tp that divides them"
        )
    return None


def stream_refusal(whole_stream: Iterable[str]) -> str | None:
    """Checks that the residual stream may be split along the sequence."""
    needs = "; ".join(whole_stream)
    return f"sequences are split between blocks, but the model needs them whole: {needs}" if needs else None


def whole_rows_refusal(whole_rows: Iterable[str]) -> str | None:
    """Checks that rows may be split over cp ranks."""
    needs = "; ".join(whole_rows)
    return f"parallel.cp splits rows, but the model needs them whole: {needs}; set parallel.cp = 1" if needs else None


def ulysses_refusal(heads: int, cp: int, tp: int) -> str | None:
    """Checks that ranks that exchange heads for positions get equally many heads."""
    if heads % (cp * tp) == 0:
        return None
    others = f" * parallel.tp = {tp}" if tp > 1 else ""
    return (
        f"transforms.context.kind = 'ulysses': parallel.cp = {cp}{others} does not divide {heads} heads; "
        "use 'all_gather' or 'ring'"
    )


def exchange_refusal(units: Mapping[str, int], cp: int, tp: int) -> str | None:
    """Checks that ranks that exchange heads of recurrent layers for positions get equally many heads."""
    states = units.get("state_heads")
    if states is None or states % (cp * tp) == 0:
        return None
    others = f" * parallel.tp = {tp}" if tp > 1 else ""
    return (
        f"recurrent layers exchange heads for positions, but parallel.cp = {cp}{others} does not divide their {states} heads; "
        "choose values that do"
    )


def ring_refusal(attention: str, capped: bool, causal: bool = True) -> str | None:
    """Checks that the attention named `attention`, a key of the recipe or a path in the model, can run block by block in a
    ring."""
    if not causal:
        return (
            f"transforms.context.kind = 'ring' supports causal attention only, but {attention} sees later tokens too; use "
            "'all_gather' or 'ulysses'"
        )
    if not capped:
        return None
    return f"transforms.context.kind = 'ring' does not support the soft cap of {attention}; use 'all_gather' or 'ulysses'"


def mtp_refusal(schedule: str, splits_backward: bool, depth: int) -> str | None:
    """Checks that a schedule supports a model with `depth` MTP modules."""
    if not splits_backward or depth < 2:
        return None
    # Two MTP modules that depend on each other look up the same embedding, whose gradient needs a full backward.
    return (
        f"pipeline schedule {schedule!r} splits the backward pass, which multi-token prediction of depth {depth} does not "
        "support; set model.mtp.depth = 1, or use schedule 1f1b or interleaved"
    )


def held(matrix: Matrix, units: Mapping[str, int], tp: int) -> tuple[tuple[int, int], ...]:
    """Returns the different shapes (outputs, inputs) of a matrix that tp ranks hold and multiply with."""
    dim = next((index for index, name in enumerate(matrix.dims) if name in CUT), None)
    if tp == 1 or dim is None:
        return (matrix.shape,)
    if dim == 0 and matrix.dims[0] == "kv_heads" and units["kv_heads"] % tp:
        return ((matrix.shape[0] // units["kv_heads"], matrix.shape[1]),)  # every rank holds all heads and uses one
    sizes = dict.fromkeys(chunk(matrix.shape[dim], tp, rank)[1] for rank in range(tp))
    return tuple((size, matrix.shape[1]) if dim == 0 else (matrix.shape[0], size) for size in sizes)


def float8_refusal(matrices: Mapping[str, Matrix], units: Mapping[str, int], tp: int) -> str | None:
    """Checks that each of `tp` ranks can multiply with its part of each layer (by path) in float8."""
    bad: dict[str, list[str]] = defaultdict(list)
    for path, matrix in matrices.items():
        local = held(matrix, units, tp)
        if any(size % FLOAT8_MULTIPLE for pair in local for size in pair):
            sizes = " and ".join(f"{outputs} x {inputs}" for outputs, inputs in local)
            bad[sizes + (f" (split by parallel.tp = {tp})" if tp > 1 else "")].append(path)
    if not bad:
        return None
    lines = (f"{', '.join(collapsed(paths))}: {sizes}" for sizes, paths in bad.items())
    names = ", ".join(f'"{name}"' for name in collapsed([path for paths in bad.values() for path in paths]))
    return (
        f"float8 needs outputs and inputs of every layer to be multiples of {FLOAT8_MULTIPLE}, but: {'; '.join(lines)}. "
        f"Choose other sizes, or transforms.float8.exclude = [{names}]"
    )


def float8_experts_refusal(experts: Mapping[str, Matrix], etp: int) -> str | None:
    """Checks that each of `etp` ranks can multiply with its part of stacked experts (by parameter name) in float8."""
    bad: dict[str, None] = {}
    for name, matrix in experts.items():
        sizes = [size // etp if dim == "ffn" else size for size, dim in zip(matrix.shape, matrix.dims, strict=True)]
        if any(size % FLOAT8_MULTIPLE for size in sizes):
            bad[f"{collapsed([name])[0]}: {sizes[0]} x {sizes[1]}"] = None
    if not bad:
        return None
    cut = f" (split by parallel.etp = {etp})" if etp > 1 else ""
    return (
        f"float8 needs outputs and inputs of every expert to be multiples of {FLOAT8_MULTIPLE}, but: {', '.join(bad)}{cut}. "
        "Choose other sizes, or transforms.float8.experts = false"
    )


def collapsed(paths: Iterable[str]) -> tuple[str, ...]:
    """Replaces numbers in paths by `*`, and returns each resulting pattern once."""
    return tuple(dict.fromkeys(".".join("*" if step.isdecimal() else step for step in path.split(".")) for path in paths))


def stacks(specs: Specs) -> tuple[str, ...]:
    """Returns the paths of modules whose parameters are stacked experts, in the order of the model."""
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name, spec in specs.tensors.items() if "expert" in spec.dims))


def apart(specs: Specs, layout: Layout) -> tuple[str, ...]:
    """Returns the stacks that are sharded separately from their block: those of layouts in which tensor-parallel ranks, or ranks
    that share experts, see different tokens. In other layouts experts are sharded with their block."""
    return stacks(specs) if layout.tp * layout.ep * layout.etp > 1 else ()
