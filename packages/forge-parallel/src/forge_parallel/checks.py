"""Rules across sections that concern layouts: pure functions of (job, layout), run before torch is imported.

A job is read by attribute, so that any tree with these sections can be checked.
"""

from collections.abc import Iterator
from typing import Any

from forge_core.errors import Fault
from forge_core.layout import Layout, divisors
from forge_parallel.plan import AXIS_DEFAULTS
from forge_parallel.proven import FEATURES, unproven

IMPLEMENTED = frozenset({"compile", "recompute", "shard", "tensor"})
"""Transforms of this distribution that exist; an axis whose default is another one needs a plugin that claims it."""


def batch_fits(job: Any, layout: Layout) -> Iterator[Fault]:
    """The global batch is cut into whole micro-batches on every data rank."""
    train = job.train
    rows, left = divmod(train.global_batch, layout.data)
    if left:
        legal = ", ".join(str(n) for n in divisors(train.global_batch))
        yield Fault(
            "train.global_batch",
            f"{train.global_batch} sequences cannot be shared by {layout.data} data ranks",
            hint=f"dp_replicate * dp_shard may be {legal}",
        )
    elif rows % train.micro_batch:
        legal = ", ".join(str(n) for n in divisors(rows))
        yield Fault(
            "train.micro_batch",
            f"a rank has {rows} sequences per step, which micro-batches of {train.micro_batch} do not divide",
            hint=f"with global_batch = {train.global_batch} on {layout.data} data ranks it may be {legal}",
        )


def axes_are_claimed(job: Any, layout: Layout) -> Iterator[Fault]:
    """Every axis larger than 1 has a transform that implements it."""
    for axis in layout.active():
        default = AXIS_DEFAULTS.get(axis)
        if default not in IMPLEMENTED and default not in job.transforms:
            what = f"the transform {default!r}" if default else "pipeline parts"
            yield Fault(
                f"parallel.{axis}",
                f"= {layout.size(axis)}, but no installed distribution offers {what}",
                hint=f"set parallel.{axis} = 1",
            )


def features(job: Any, layout: Layout) -> set[str]:
    """Features of `forge_parallel.proven` that a job uses, plus transforms by name that it does not know."""
    used = {axis for axis in layout.active() if axis in FEATURES}
    if job.train.global_batch > job.train.micro_batch * layout.data:
        used.add("accumulate")
    if job.precision.compute == "bf16":
        used.add("bf16")
    if job.precision.state == "bf16":
        used.add("bf16_state")
    for name, transform in job.transforms.items():
        if name != "shard":
            used.add(name)
        elif getattr(transform, "reduce", "last") == "each":
            used.add("reduce_each")
    return used


def compositions_are_proven(job: Any, layout: Layout) -> Iterator[Fault]:
    """A pair of features that no parity test covers is refused."""
    for pair in unproven(features(job, layout)):
        keys = " with ".join(FEATURES.get(name, f"transforms.{name}") for name in pair)
        yield Fault("parallel", f"{keys}: no test proves that it equals one process", hint="leave one of them out")
