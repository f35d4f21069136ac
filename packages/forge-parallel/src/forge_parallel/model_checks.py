"""Rules about a model and a layout, checked on the model's shape before it is built: what ranks would refuse later.

A component whose `shape` has the attributes of `forge_models.shape.DecoderShape` is checked here. Other models are checked when
they are built on the meta device, at the start of a run and by `plan`, before anything is written. The arithmetic is in
`forge_parallel.placement.shares`, which the strategies themselves ask.
"""

import re
from collections.abc import Iterator
from typing import Any

from forge_core.errors import Fault, PlanError
from forge_core.layout import Layout
from forge_parallel.placement import shares
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.proofs import ParallelJob


def shape_of(job: ParallelJob) -> Any:
    """Returns the shape of the recipe's model; None if it has none that says how the model can be split."""
    shape = getattr(job.model, "shape", None)
    return shape if hasattr(shape, "units") else None


def left_to_the_start(job: ParallelJob, layout: Layout | None) -> tuple[str, ...]:
    """Returns the keys that these rules do not check, because the model's shape does not say enough."""
    shape = shape_of(job)
    left = {
        "parallel.tp": shape is None and layout is not None and layout.tp > 1,
        "parallel.cp": shape is None and layout is not None and layout.cp > 1,
        "transforms.float8": (shape is None or not shape.declares_matrices) and "float8" in job.transforms,
    }
    return tuple(key for key, unchecked in left.items() if unchecked)


def split_widths(model: Any) -> Iterator[tuple[str, int]]:
    """Yields key and rows of each table and width of a model component that tp ranks split without regard to units."""
    shape = model.shape
    yield "model.vocab_size", shape.vocab_size
    if shape.has_dense:
        yield "model.ffn_dim", shape.ffn_dim
    if shape.moe is not None and shape.moe.shared:
        key = "model.ffn_dim" if getattr(getattr(model, "moe", None), "ffn_dim", None) is None else "model.moe.ffn_dim"
        yield key, shape.moe.shared * shape.moe.ffn_dim


def tensors_can_be_cut(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Ranks of tp share heads, widths and vocabulary, and the stream where sequences are cut."""
    if layout.tp == 1 or (shape := shape_of(job)) is None:
        return
    if why := shares.heads_refusal(shape.units, layout.tp):
        unit = "heads" if shape.heads % layout.tp else "kv_heads"
        yield Fault(f"model.{unit}", why, hint="change it, or change parallel.tp")
    for key, rows in dict.fromkeys(split_widths(job.model)):
        if why := shares.rows_refusal(key, rows, layout.tp):
            yield Fault(key, why, hint=f"raise it, or set parallel.tp to at most {rows}")
    tensor = job.transforms.get("tensor", TensorParallel())
    # Experts have to see different tokens on every rank of tp, so with them sequences are cut.
    dense = getattr(job.model, "moe", None) is None
    hint = "set transforms.tensor.sequence_parallel = false, or parallel.tp = 1" if dense else "remove it, or set parallel.tp = 1"
    for reason in shape.whole_stream if getattr(tensor, "sequence_parallel", True) else ():
        yield Fault(_key(reason), shares.stream_refusal([reason]) or "", hint=hint)


def rows_can_be_shared(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Ranks of cp share rows, in the way that attention is asked to see them."""
    if layout.cp == 1 or (shape := shape_of(job)) is None:
        return
    for reason in shape.whole_rows:
        yield Fault(_key(reason), shares.whole_rows_refusal([reason]) or "", hint="remove it, or set parallel.cp = 1")
    kind = getattr(job.transforms.get("context", ContextParallel()), "kind", None)
    if kind == "ulysses" and (why := shares.ulysses_refusal(shape.heads, layout.cp, layout.tp)):
        yield Fault("transforms.context.kind", why)
    capped = getattr(shape.attention, "soft_cap", None) is not None
    if kind == "ring" and (why := shares.ring_refusal("model.attention.soft_cap", capped)):
        yield Fault("transforms.context.kind", why)


def float8_can_multiply(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Float8 finds layers to convert, of shapes that it takes on every rank."""
    float8 = job.transforms.get("float8")
    if not isinstance(float8, Float8) or (shape := shape_of(job)) is None or not shape.declares_matrices:
        return
    from forge_parallel.transforms.float8 import layers

    hidden, stacked = shape.matrices()
    stacks = tuple(dict.fromkeys(name.rpartition(".")[0] for name in stacked)) if float8.experts else ()
    try:
        chosen = layers.selected([*hidden, *stacks], float8.include, float8.exclude)
    except PlanError as error:
        yield Fault("transforms.float8", str(error))
        return
    linear = {path: matrix for path, matrix in hidden.items() if path in chosen}
    fits = shares.heads_refusal(shape.units, layout.tp) is None  # else it is not known what a rank would hold
    if fits and (why := shares.float8_refusal(linear, shape.units, layout.tp)):
        yield Fault("transforms.float8", why)
    if not float8.experts:
        return
    experts = {name: matrix for name, matrix in stacked.items() if name.rpartition(".")[0] in chosen}
    if not experts:
        there = "include and exclude leave none of them" if stacks else "the model has none"
        yield Fault("transforms.float8.experts", f"= true converts stacked experts, but {there}", hint="remove it")
    if why := shares.float8_experts_refusal(experts, layout.etp):
        yield Fault("transforms.float8.experts", why)


def _key(reason: str) -> str:
    """The key that a reason begins with."""
    return re.split(r"[ ,]", reason, maxsplit=1)[0]
