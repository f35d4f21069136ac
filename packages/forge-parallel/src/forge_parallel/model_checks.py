"""Rules about a model and a layout, asked of the model's `outline()` before it is built: what ranks would refuse later.

The arithmetic is in `forge_parallel.placement.shares`, which the strategies themselves ask.
"""

import re
from collections.abc import Callable, Iterator

from forge_core.errors import Fault, PlanError
from forge_core.layout import Layout
from forge_core.specs import Outline
from forge_parallel.placement import shares
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.proofs import ParallelJob


def outline_of(job: ParallelJob) -> Outline | None:
    """What the recipe's model says of itself; None where it says nothing."""
    outline: Callable[[], Outline] | None = getattr(job.model, "outline", None)
    return outline() if outline is not None else None


def tensors_can_be_cut(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Ranks of tp share heads, widths and vocabulary, and the stream where sequences are cut."""
    if layout.tp == 1 or (model := outline_of(job)) is None:
        return
    if why := shares.heads_refusal(model.units, layout.tp):
        unit = "heads" if model.units.get("heads", 0) % layout.tp else "kv_heads"
        yield Fault(model.keys.get(unit, "parallel.tp"), why, hint="change it, or change parallel.tp")
    for key, rows in dict.fromkeys(model.shared):
        if why := shares.rows_refusal(key, rows, layout.tp):
            yield Fault(key, why, hint=f"raise it, or set parallel.tp to at most {rows}")
    tensor = job.transforms.get("tensor", TensorParallel())
    # Experts have to see different tokens on every rank of tp, so with them sequences are cut.
    dense = getattr(job.model, "moe", None) is None
    hint = "set transforms.tensor.sequence_parallel = false, or parallel.tp = 1" if dense else "remove it, or set parallel.tp = 1"
    for reason in model.whole_stream if getattr(tensor, "sequence_parallel", True) else ():
        yield Fault(_key(reason), shares.stream_refusal([reason]) or "", hint=hint)


def rows_can_be_shared(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Ranks of cp share rows, in the way that attention is asked to see them."""
    if layout.cp == 1 or (model := outline_of(job)) is None:
        return
    for reason in model.whole_rows:
        yield Fault(_key(reason), shares.whole_rows_refusal([reason]) or "", hint="remove it, or set parallel.cp = 1")
    kind = getattr(job.transforms.get("context", ContextParallel()), "kind", None)
    if kind == "ulysses" and (why := shares.ulysses_refusal(model.units.get("heads", 0), layout.cp, layout.tp)):
        yield Fault("transforms.context.kind", why)
    if kind == "ring" and (why := shares.ring_refusal(model.keys.get("capped", "attention"), model.capped)):
        yield Fault("transforms.context.kind", why)


def float8_can_multiply(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Float8 finds layers to convert, of shapes that it takes on every rank."""
    float8 = job.transforms.get("float8")
    if not isinstance(float8, Float8) or (model := outline_of(job)) is None or model.matrices is None:
        return
    from forge_parallel.transforms.float8 import layers

    stacks = tuple(dict.fromkeys(name.rpartition(".")[0] for name in model.experts or ())) if float8.experts else ()
    try:
        chosen = layers.selected([*model.matrices, *stacks], float8.include, float8.exclude)
    except PlanError as error:
        yield Fault("transforms.float8", str(error))
        return
    linear = {path: matrix for path, matrix in model.matrices.items() if path in chosen}
    fits = shares.heads_refusal(model.units, layout.tp) is None  # else it is not known what a rank would hold
    if fits and (why := shares.float8_refusal(linear, model.units, layout.tp)):
        yield Fault("transforms.float8", why)
    if not float8.experts:
        return
    experts = {name: matrix for name, matrix in (model.experts or {}).items() if name.rpartition(".")[0] in chosen}
    if not experts:
        there = "include and exclude leave none of them" if stacks else "the model has none"
        yield Fault("transforms.float8.experts", f"= true converts stacked experts, but {there}", hint="remove it")
    if why := shares.float8_experts_refusal(experts, layout.etp):
        yield Fault("transforms.float8.experts", why)


def _key(reason: str) -> str:
    """The key that a reason begins with."""
    return re.split(r"[ ,]", reason, maxsplit=1)[0]
