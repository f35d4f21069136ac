"""The plan of a model: transforms, sorted by the order of application and checked for compatibility.

Torch-free: a plan can be checked before any process starts.
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
    """When a transform is applied. Float8 conversion comes first, because after tensor parallelism it would drop that one's
    hooks."""

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
"""Axis larger than 1 -> the transforms that it implies: the one that claims the axis, then those that this one needs."""


@dataclass(frozen=True)
class Plan:
    """Transforms in the order of application, for one layout. Create it with `Plan.of`.

    `pipeline` says how the model is split before transforms are applied; None if pp is 1.
    """

    transforms: tuple[Transform, ...]
    layout: Layout
    pipeline: Pipeline | None = None

    @classmethod
    def of(cls, transforms: Iterable[Transform], layout: Layout, pipeline: Pipeline | None = None) -> "Plan":
        """Sorts transforms by their order. `pipeline` claims the axis pp, and is ignored if pp is 1.

        Raises:
            PlanError: two transforms have the same order or claim the same axis, no transform claims an axis larger than 1, a
                transform that another one needs is missing, or the pipeline's schedule does not support a transform.
        """
        ordered = sorted(transforms, key=lambda transform: transform.order)
        for transform, other in pairwise(ordered):
            if transform.order == other.order:
                place = next((place.name for place in Order if place == transform.order), transform.order)
                raise PlanError(f"transforms {transform.name!r} and {other.name!r} have the same order {place}; keep one of them")
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
                    raise PlanError(f"parallel.pp = {layout.pp} but the plan has no pipeline; add one, or set parallel.pp = 1")
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
        """Returns the transforms' names in the order of application."""
        return tuple(transform.name for transform in self.transforms)


def default_transforms(layout: Layout, chosen: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the transforms that the layout implies, except for those in `chosen`."""
    present = set(chosen)
    names = dict.fromkeys(name for axis in layout.active() for name in AXIS_DEFAULTS.get(axis, ()))
    return tuple(name for name in names if name not in present)
