"""What kind of thing a field holds: a section, a component, a list or dictionary of them, or a leaf."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from forge_core.component import FieldInfo, Slot, fields_of
from forge_core.features import without_declarations


@dataclass(frozen=True)
class Shape:
    """How the value of a field is read.

    Attributes:
        kind: `leaf` values are typed by pydantic, all others are walked.
        type: the leaf's type with its ranges, the section's dataclass, or the base class that a component must have.
        optional: None is allowed, written `"none"`.
        slot: of a component.
        inner: of the items of a list, tuple or dictionary.
    """

    kind: Literal["leaf", "section", "component", "list", "tuple", "dict"]
    type: Any
    optional: bool = False
    slot: Slot | None = None
    inner: "Shape | None" = None


LEAF = Shape("leaf", Any)


def shape_of(annotation: Any) -> Shape:
    """The shape of a field annotated so."""
    bare, metadata = _strip(annotation)
    options = _options(bare)
    optional = options is not None and type(None) in options
    slot = next((item for item in metadata if isinstance(item, Slot)), None)
    if options is not None and optional and len(options) == 2:
        rest = next(option for option in options if option is not type(None))
        if slot is not None:
            return Shape("component", _strip(rest)[0], True, slot)
        inner = shape_of(rest)
        if inner.kind != "leaf":
            return dataclasses.replace(inner, optional=True)
    if slot is not None:
        return Shape("component", bare, False, slot)
    if dataclasses.is_dataclass(bare) and isinstance(bare, type):
        return Shape("section", bare)
    origin, arguments = typing.get_origin(bare), typing.get_args(bare)
    item = {list: 0, tuple: 0, dict: 1}.get(origin, -1) if origin is not None else -1
    uniform = origin is not tuple or (len(arguments) == 2 and arguments[1] is Ellipsis)
    if item >= 0 and uniform and len(arguments) > item:
        inner = shape_of(arguments[item])
        if inner.kind != "leaf":
            kinds: dict[Any, Literal["list", "tuple", "dict"]] = {list: "list", tuple: "tuple", dict: "dict"}
            return Shape(kinds[origin], bare, False, None, inner)
    return Shape("leaf", without_declarations(annotation), optional)


@cache
def shapes_in(cls: type) -> Mapping[str, tuple[FieldInfo, Shape]]:
    """Every field of a section or component by name, with its shape."""
    return types.MappingProxyType({info.name: (info, shape_of(info.type)) for info in fields_of(cls)})


def _strip(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    metadata: tuple[Any, ...] = ()
    while typing.get_origin(annotation) is typing.Annotated:
        annotation, *extra = typing.get_args(annotation)
        metadata = (*extra, *metadata)
    return annotation, metadata


def _options(bare: Any) -> tuple[Any, ...] | None:
    return typing.get_args(bare) if typing.get_origin(bare) in (typing.Union, types.UnionType) else None
