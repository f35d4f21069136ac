"""Checks for every transform: its place in a plan, the axes that it claims, and the declarations of its options."""

import typing
from typing import Any


def check_place(component: Any) -> None:
    """`name`, `phase`, `axes`, `needs` and `plane` have valid values."""
    from forge_core.features import Plane
    from forge_core.layout import SIZES
    from forge_parallel.model.plan import Order

    transform = component.build()
    axes, needs = frozenset(transform.axes), frozenset(transform.needs)
    assert isinstance(transform.name, str) and transform.name, f"name is {transform.name!r}; give it the name that recipes use"
    assert transform.phase in list(Order), f"phase is {transform.phase!r}; phases are {', '.join(Order.__members__)}"
    assert axes <= set(SIZES), f"claims axes {', '.join(sorted(axes - set(SIZES)))}; axes are {', '.join(SIZES)}"
    planes = typing.get_args(Plane)
    assert transform.plane in planes, f"plane is {transform.plane!r}; planes are {', '.join(planes)}"
    assert transform.name not in needs, "needs itself"
    assert not axes or transform.plane == "layout", f"claims axes, so its plane is 'layout', not {transform.plane!r}"


def check_options(component: Any) -> None:
    """Every option declares for all its values whether they must be proven (Feature) or why not (Neutral)."""
    from forge_core.features import undeclared

    silent = [f"{name} ({', '.join(map(repr, values))})" if values else name for name, values in undeclared(type(component))]
    assert not silent, f"options declare neither Feature nor Neutral: {'; '.join(silent)}"
