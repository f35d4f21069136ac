"""Types in plain words, for faults and explanations."""

import enum
import types
import typing
from pathlib import Path
from typing import Any, Literal

import annotated_types as ranges

from forge_core.config.shape import Shape
from forge_core.config.tree import UNSET

_PLAIN: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
    Any: ("any value", "values"),
}


def describe(annotation: Any) -> str:
    """Such as `an integer greater than 0` or `one of 'bf16', 'fp32'`."""
    if typing.get_origin(annotation) is typing.Annotated:
        base, *metadata = typing.get_args(annotation)
        return " ".join([describe(base), *(words for item in metadata if (words := _range(item)))])
    if annotation in _PLAIN:
        return _PLAIN[annotation][0]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return _one_of(arguments)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _one_of(tuple(item.value for item in annotation))
    if origin in (typing.Union, types.UnionType):
        rest = " or ".join(describe(item) for item in arguments if item is not type(None))
        return f"{rest}, or {UNSET!r} to unset it" if type(None) in arguments else rest
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return f"a list of {len(arguments)}: " + ", ".join(describe(item) for item in arguments)
    if origin in (list, tuple, set, frozenset):
        return f"a list of {_many(arguments[0])}"
    if origin is dict:
        return f"a table of {_many(arguments[1])}"
    return getattr(annotation, "__name__", str(annotation))


def describe_shape(shape: Shape) -> str:
    """As `describe`, for anything that a field may hold."""
    if shape.kind == "leaf":
        return describe(shape.type)
    if shape.kind == "section":
        words = "a table"
    elif shape.kind == "component":
        kind = _kind(shape)
        words = f"a table with the `name` of {'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    else:
        inner = typing.cast(Shape, shape.inner)
        items = f"{_kind(inner)} tables" if inner.kind == "component" else "tables"
        words = f"a table of {items}" if shape.kind == "dict" else f"a list of {items}"
    return f"{words}, or {UNSET!r} to unset it" if shape.optional else words


def literals(annotation: Any) -> list[Any]:
    """The values that a `Literal`, an enumeration or a boolean allows, wherever in the type; for did-you-mean."""
    if annotation is bool:
        return ["true", "false"]
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return [item.value for item in annotation]
    return [value for item in typing.get_args(annotation) for value in literals(item)]


def _kind(shape: Shape) -> str:
    return typing.cast(Any, shape.slot).group.removeprefix("forge.").replace("_", " ").removesuffix("s")


def _many(annotation: Any) -> str:
    if annotation in _PLAIN:
        return _PLAIN[annotation][1]
    if typing.get_origin(annotation) is typing.Annotated and typing.get_args(annotation)[0] in _PLAIN:
        base, *metadata = typing.get_args(annotation)
        return " ".join([_PLAIN[base][1], *(words for item in metadata if (words := _range(item)))])
    return "items, each " + describe(annotation)


def _one_of(values: tuple[Any, ...]) -> str:
    return ("one of " if len(values) > 1 else "") + ", ".join(repr(value) for value in values)


def _range(item: Any) -> str:
    match item:
        case ranges.Gt(bound):
            return f"greater than {bound}"
        case ranges.Ge(bound):
            return f"at least {bound}"
        case ranges.Lt(bound):
            return f"less than {bound}"
        case ranges.Le(bound):
            return f"at most {bound}"
        case ranges.MultipleOf(step):
            return f"that is a multiple of {step}"
        case ranges.MinLen(length):
            return f"of length at least {length}"
        case ranges.MaxLen(length):
            return f"of length at most {length}"
    if isinstance(item, ranges.GroupedMetadata):
        return " and ".join(words for part in item if (words := _range(part)))
    return ""
