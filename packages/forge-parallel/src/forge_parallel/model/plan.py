"""The order of strategies, by construction: a plan sorts transforms by phase and refuses what does not fit together.

Torch-free: a plan can be made, and refused, long before any process starts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import Transform
from forge_parallel.pipeline.definition import Pipeline


class Order(IntEnum):
    """When a transform is applied. Float8 conversion stands first: after tensor parallelism it drops its hooks."""

    QUANTIZE = 0
    TENSOR = 1
    CONTEXT = 2
    EXPERT = 3
    RECOMPUTE = 4
    COMPILE = 5
    SHARD = 6


AXIS_DEFAULTS = {
    "dp_replicate": ("shard",),
    "dp_shard": ("shard",),
    "cp": ("context", "shard"),
    "tp": ("tensor", "shard"),
    "ep": ("expert", "shard"),
    "etp": ("expert", "shard"),
}
"""The transforms that an axis larger than 1 pulls in when the recipe names none: the one that claims it, then what that needs."""


@dataclass(frozen=True)
class Plan:
    """Transforms in the order in which they are applied, for one layout. Build it with `Plan.of`.

    `pipeline` is how the model is cut before they are applied; None where pp is 1.
    """

    transforms: tuple[Transform, ...]
    layout: Layout
    pipeline: Pipeline | None = None

    @classmethod
    def of(cls, transforms: Iterable[Transform], layout: Layout, pipeline: Pipeline | None = None) -> "Plan":
        """Sorts by phase. `pipeline` claims the axis pp, and has nothing to do where that is 1.

        Raises:
            PlanError: two transforms share a phase or claim one axis, an axis larger than 1 is claimed by none, a
                transform that another one needs is missing, or the pipeline's schedule cannot do with one of them.
        """
        ordered = sorted(transforms, key=lambda transform: transform.phase)
        for one, other in pairwise(ordered):
            if one.phase == other.phase:
                raise PlanError(
                    f"transforms {one.name!r} and {other.name!r} are both of phase {Order(one.phase).name}; keep one of them"
                )
        cut = pipeline if layout.pp > 1 else None
        for transform in ordered:
            if cut is not None and cut.schedule.splits_backward and transform.whole_backward:
                raise PlanError(
                    f"pipeline schedule {cut.schedule.name!r} splits the backward pass, which transform {transform.name!r} "
                    "does not support; remove the transform, or use the schedule 1f1b or interleaved"
                )
        claimed: dict[str, str] = {} if cut is None else {"pp": "pipeline"}
        for transform in ordered:
            for axis in sorted(transform.axes):
                if axis in claimed:
                    raise PlanError(
                        f"transforms {claimed[axis]!r} and {transform.name!r} both claim axis {axis}; keep one of them"
                    )
                claimed[axis] = transform.name
        for axis in layout.active():
            if axis not in claimed:
                if axis == "pp":
                    raise PlanError(f"parallel.pp = {layout.pp} but the plan has no pipeline; give one, or set parallel.pp = 1")
                raise PlanError(
                    f"parallel.{axis} = {layout.size(axis)} but no transform of the plan claims axis {axis}; "
                    f"set parallel.{axis} = 1 or add [transforms.{AXIS_DEFAULTS.get(axis, (axis,))[0]}]"
                )
        present = {transform.name for transform in ordered}
        for transform in ordered:
            used, missing = transform.axes & set(layout.active()), sorted(transform.needs - present)
            if used and missing:
                raise PlanError(
                    f"parallel.{min(used)} > 1: transform {transform.name!r} needs {', '.join(missing)}; "
                    f"add [transforms.{missing[0]}]"
                )
        return cls(tuple(ordered), layout, cut)

    def names(self) -> tuple[str, ...]:
        """Names in the order of application."""
        return tuple(transform.name for transform in self.transforms)


def default_transforms(layout: Layout, chosen: Iterable[str]) -> tuple[str, ...]:
    """Names of the transforms that the layout's axes pull in beyond those already chosen."""
    present = set(chosen)
    names = dict.fromkeys(name for axis in layout.active() for name in AXIS_DEFAULTS.get(axis, ()))
    return tuple(name for name in names if name not in present)
