"""Declares on a field which options of a strategy must be proven by tests.

    reduce: Annotated[Literal["last", "each"], Feature("reduce_each", when="each")] = "last"
    timeout: Annotated[float, Neutral("how long ranks wait; what they exchange is the same")] = 600.0

An option that affects a collective, or changes which numbers are summed where, is a feature: a layout may use it only in
combinations that a test has proven. Other options are `Neutral`, with a reason. The default of a field needs no declaration,
because tests of the component itself use it. Undeclared values are refused in a layout, so that new options cannot be forgotten.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from forge_core.component import FieldInfo, Slot, fields_of

ANY: Any = object()
"""Matches every value."""


Plane = Literal["layout", "numerics", "graph", "model", "optimizer", "storage", "data"]
"""What a feature changes: placement and communication between ranks, rounding, the schedule of operators on one rank, the
computed function, the update of parameters, the storage of states, the order of samples."""

_CROSSED = frozenset({"layout", "numerics", "graph", "model"})


def interact(one: Plane, other: Plane) -> bool:
    """Whether features of these planes must be proven in combination.

    An update uses parameters and gradients, so it depends only on their layout. Storage and data have separate tests: round
    trips between layouts, and the sequence of samples.
    """
    return {one, other} <= _CROSSED or {one, other} == {"optimizer", "layout"}


class Feature(NamedTuple):
    """A value that must be proven: `when` is this value; `unless` is the only value that need not be.

    `axis`: the feature counts only if this axis of the layout is larger than 1.
    """

    name: str
    when: Any = ANY
    unless: Any = ANY
    axis: str = ""
    plane: Plane = "layout"

    def covers(self, value: Any) -> bool:
        """Whether a field with this value has the feature."""
        return _same(self.when, value) and not (self.unless is not ANY and _same(self.unless, value))


class Neutral(NamedTuple):
    """Values (all, or `when`) that change neither collectives nor sums over ranks; `why` is the reason."""

    why: str
    when: Any = ANY

    def covers(self, value: Any) -> bool:
        """Whether the declaration applies to `value`."""
        return _same(self.when, value)


def _same(pattern: Any, value: Any) -> bool:
    return pattern is ANY or (type(pattern) is type(value) and pattern == value)


def declared(info: FieldInfo) -> tuple[Feature | Neutral, ...]:
    """Returns the declarations of a field."""
    declarations: list[Any] = []
    annotation = info.type
    while typing.get_origin(annotation) is typing.Annotated:
        annotation, *metadata = typing.get_args(annotation)
        declarations += metadata
    return tuple(item for item in declarations if isinstance(item, Feature | Neutral))


def without_declarations(annotation: Any) -> Any:
    """Returns the type without declarations, so that fields which differ only in them share one parser (1 ms to build)."""
    if typing.get_origin(annotation) is not typing.Annotated:
        return annotation
    bare, *metadata = typing.get_args(annotation)
    kept = [item for item in metadata if not isinstance(item, Feature | Neutral)]
    return typing.Annotated[(bare, *kept)] if kept else bare


class Use(NamedTuple):
    """A feature that a job uses, and the key and value that enable it, as in a recipe.

    `module`: the top-level module of the plugin with the feature; empty for Forge's own features.
    """

    name: str
    plane: Plane
    key: str
    module: str = ""


def used(cls: type, values: Mapping[str, Any], sizes: Mapping[str, int], at: str = "") -> list[Use]:
    """Returns the features of an instance of `cls` with these `values`, at key `at`, in a layout of these `sizes`."""
    return [
        Use(item.name, item.plane, _written(f"{at}.{info.name}" if at else info.name, values[info.name], item, sizes))
        for info in (fields_of(cls) if dataclasses.is_dataclass(cls) else ())
        for item in declared(info)
        if isinstance(item, Feature) and info.name in values and item.covers(values[info.name])
        if not item.axis or sizes[item.axis] > 1
    ]


def _written(key: str, value: Any, feature: Feature, sizes: Mapping[str, int]) -> str:
    if dataclasses.is_dataclass(value):
        return f"[{key}]"
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{key} = {shown}" + (f" (parallel.{feature.axis} = {sizes[feature.axis]})" if feature.axis else "")


def undeclared(cls: type) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields (field, its undeclared values) of a component or section; the values are empty if the field has no declaration.

    Skips fields that hold other components or sections, which have their own declarations.
    """
    for info in fields_of(cls):
        declarations = declared(info)
        if _holds_others(info.type):
            continue
        if not declarations:
            yield info.name, ()
            continue
        missing = tuple(
            value
            for value in values_of(info.type)
            if not (_same(info.default, value) and not info.required) and not any(item.covers(value) for item in declarations)
        )
        if missing:
            yield info.name, missing


def values_of(annotation: Any) -> tuple[Any, ...]:
    """Returns all values of literals, booleans and None in a type; empty for other types."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if annotation is bool:
        return False, True
    if annotation is None or annotation is types.NoneType:
        return (None,)
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(value for option in typing.get_args(annotation) for value in values_of(option))
    return ()


def _holds_others(annotation: Any) -> bool:
    bare = annotation
    while typing.get_origin(bare) is typing.Annotated:
        bare, *metadata = typing.get_args(bare)
        if any(isinstance(item, Slot) for item in metadata):
            return True
    return dataclasses.is_dataclass(bare)
