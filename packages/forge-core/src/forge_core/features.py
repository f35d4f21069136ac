"""Which options of a strategy have to be proven, declared with the field itself.

    reduce: Annotated[Literal["last", "each"], Feature("reduce_each", when="each")] = "last"
    timeout: Annotated[float, Neutral("how long ranks wait; what they exchange is the same")] = 600.0

An option that reaches a collective, or changes which numbers are summed where, is a feature: a layout may use it only together
with what a test has proven it with. An option that does neither says why. A field's default needs no word: it is what proofs of
the component itself run with. What says nothing is refused in a layout, so that a new option cannot be forgotten.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from forge_core.component import FieldInfo, Slot, fields_of

ANY: Any = object()
"""Stands for every value."""


Plane = Literal["layout", "numerics", "graph", "model", "optimizer", "storage", "data"]
"""What a feature changes: which ranks hold and exchange what, how numbers are rounded, how operators are scheduled on one rank,
which function is computed, how parameters are updated, where states are kept, which samples come."""

_CROSSED = frozenset({"layout", "numerics", "graph", "model"})


def interact(one: Plane, other: Plane) -> bool:
    """Whether features of these planes have to be proven together.

    An update sees parameters and gradients, so it depends on how they are laid out and on nothing else. Where states are kept and
    which samples come are proven by separate tests: round trips between layouts, and the sequence of samples.
    """
    return {one, other} <= _CROSSED or {one, other} == {"optimizer", "layout"}


class Feature(NamedTuple):
    """A value that has to be proven: `when` is that value, `unless` the only one that does not have to be.

    `axis`: it counts only where this axis of the layout is larger than 1.
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
    """Values (all of them, or `when`) that change no collective and no sum over ranks; `why` says the reason."""

    why: str
    when: Any = ANY

    def covers(self, value: Any) -> bool:
        """Whether this speaks of `value`."""
        return _same(self.when, value)


def _same(pattern: Any, value: Any) -> bool:
    return pattern is ANY or (type(pattern) is type(value) and pattern == value)


def declared(info: FieldInfo) -> tuple[Feature | Neutral, ...]:
    """What a field says about its values."""
    found: list[Any] = []
    annotation = info.type
    while typing.get_origin(annotation) is typing.Annotated:
        annotation, *metadata = typing.get_args(annotation)
        found += metadata
    return tuple(item for item in found if isinstance(item, Feature | Neutral))


def without_declarations(annotation: Any) -> Any:
    """The type itself: fields that differ only in what they declare then share one reader, which takes a millisecond to make."""
    if typing.get_origin(annotation) is not typing.Annotated:
        return annotation
    bare, *metadata = typing.get_args(annotation)
    kept = [item for item in metadata if not isinstance(item, Feature | Neutral)]
    return typing.Annotated[(bare, *kept)] if kept else bare


class Use(NamedTuple):
    """A feature that a job uses, and the key and value that switch it on, as a recipe writes them.

    `module`: the top-level module of the plugin that brings it; empty for what is Forge's own.
    """

    name: str
    plane: Plane
    key: str
    module: str = ""


def used(cls: type, values: Mapping[str, Any], sizes: Mapping[str, int], at: str = "") -> list[Use]:
    """The features that an instance of `cls` with these `values`, at key `at`, has in a layout of these `sizes`."""
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
    """(field, its values that say nothing, or none when the field says nothing at all) of a component or section.

    Fields that hold other components and sections speak for themselves.
    """
    for info in fields_of(cls):
        said = declared(info)
        if _holds_others(info.type):
            continue
        if not said:
            yield info.name, ()
            continue
        silent = tuple(
            value
            for value in values_of(info.type)
            if not (_same(info.default, value) and not info.required) and not any(item.covers(value) for item in said)
        )
        if silent:
            yield info.name, silent


def values_of(annotation: Any) -> tuple[Any, ...]:
    """All values of a type that has few: literals, booleans, and None with them. Other types list none."""
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
