"""Strategies that say too little, or something that a plan does not understand."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from conformance.part import Part
from forge_core.component import Component
from forge_core.features import Feature


def placed(**changed: Any) -> Part:
    given = {"name": "mine", "order": 4, "axes": frozenset(), "needs": frozenset(), "plane": "graph"} | changed
    return Part(make=lambda: SimpleNamespace(**given))


@dataclass(frozen=True, kw_only=True)
class Silent(Component):
    every: int = 1

    def build(self) -> Any:
        return self


@dataclass(frozen=True, kw_only=True)
class HalfSaid(Component):
    reduce: Annotated[Literal["last", "each", "some"], Feature("reduce_each", when="each")] = "last"

    def build(self) -> Any:
        return self


OPTIONS = [(Silent(), "neither Feature nor Neutral: every"), (HalfSaid(), r"neither Feature nor Neutral: reduce \('some'\)")]
BAD = {
    "check_place": [
        (placed(name=""), "name is ''"),
        (placed(order=9), "order is 9; it is one of QUANTIZE"),
        (placed(axes=frozenset({"zz"})), "claims axes zz"),
        (placed(plane="color"), "plane is 'color'"),
        (placed(needs=frozenset({"mine"})), "needs itself"),
        (placed(axes=frozenset({"tp"})), "claims axes, so its plane is 'layout'"),
    ],
    "check_options": OPTIONS,
}
