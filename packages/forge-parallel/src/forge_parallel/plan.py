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


class Phase(IntEnum):
    """When a transform is applied. Float8 conversion stands first: after tensor parallelism it drops its hooks."""

    QUANTIZE = 0
    TENSOR = 1
    CONTEXT = 2
    EXPERT = 3
    RECOMPUTE = 4
    COMPILE = 5
    SHARD = 6


AXIS_DEFAULTS = {"dp_replicate": "shard", "dp_shard": "shard", "cp": "context", "tp": "tensor", "ep": "expert", "etp": "expert"}
"""The transform that an axis larger than 1 pulls in when the recipe names none for it."""


@dataclass(frozen=True)
class Plan:
    """Transforms in the order in which they are applied, for one layout. Build it with `Plan.of`."""

    transforms: tuple[Transform, ...]
    layout: Layout

    @classmethod
    def of(cls, transforms: Iterable[Transform], layout: Layout) -> "Plan":
        """Sorts by phase.

        Raises:
            PlanError: two transforms share a phase or claim one axis, or an axis larger than 1 is claimed by none.
        """
        ordered = sorted(transforms, key=lambda transform: transform.phase)
        for one, other in pairwise(ordered):
            if one.phase == other.phase:
                raise PlanError(
                    f"transforms {one.name!r} and {other.name!r} are both of phase {Phase(one.phase).name}; keep one of them"
                )
        claimed: dict[str, str] = {}
        for transform in ordered:
            for axis in sorted(transform.axes):
                if axis in claimed:
                    raise PlanError(
                        f"transforms {claimed[axis]!r} and {transform.name!r} both claim axis {axis}; keep one of them"
                    )
                claimed[axis] = transform.name
        for axis in layout.active():
            if axis not in claimed:
                raise PlanError(
                    f"parallel.{axis} = {layout.size(axis)} but no transform of the plan claims axis {axis}; "
                    f"set parallel.{axis} = 1 or add [transforms.{AXIS_DEFAULTS.get(axis, axis)}]"
                )
        return cls(tuple(ordered), layout)

    def names(self) -> tuple[str, ...]:
        """Names in the order of application."""
        return tuple(transform.name for transform in self.transforms)


def default_transforms(layout: Layout, chosen: Iterable[str]) -> tuple[str, ...]:
    """Names of the transforms that the layout's axes pull in beyond those already chosen."""
    present = set(chosen)
    names = dict.fromkeys(AXIS_DEFAULTS[axis] for axis in layout.active() if axis in AXIS_DEFAULTS)
    return tuple(name for name in names if name not in present)
