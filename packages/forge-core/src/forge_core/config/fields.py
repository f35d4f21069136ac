"""One field of a recipe: its shape, its type in words, and its value, which pydantic parses.

A field holds a section, a component, a list or dictionary of sections or components, or a leaf.
"""

import contextlib
import dataclasses
import datetime
import enum
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import annotated_types as ranges
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from forge_core.component import FieldInfo, Slot, fields_of
from forge_core.config.tree import UNSET, Array, Leaf, Node, Table, join, plain
from forge_core.errors import Fault, did_you_mean
from forge_core.features import without_declarations


@dataclass(frozen=True)
class Shape:
    """The kind of value that a field holds.

    Attributes:
        kind: pydantic parses `leaf` values; all other kinds are walked.
        type: the leaf's type with its ranges, the section's dataclass, or the required base class of a component.
        optional: whether None is allowed, written `"none"`.
        slot: slot of a component.
        inner: shape of the items of a list, tuple or dictionary.
    """

    kind: Literal["leaf", "section", "component", "list", "tuple", "dict"]
    type: Any
    optional: bool = False
    slot: Slot | None = None
    inner: "Shape | None" = None


LEAF = Shape("leaf", Any)


def shape_of(annotation: Any) -> Shape:
    """Returns the shape of a field with this annotation."""
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
    """Returns the fields of a section or component by name, with their shapes."""
    return types.MappingProxyType({info.name: (info, shape_of(info.type)) for info in fields_of(cls)})


def _strip(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    metadata: tuple[Any, ...] = ()
    while typing.get_origin(annotation) is typing.Annotated:
        annotation, *extra = typing.get_args(annotation)
        metadata = (*extra, *metadata)
    return annotation, metadata


def _options(bare: Any) -> tuple[Any, ...] | None:
    return typing.get_args(bare) if typing.get_origin(bare) in (typing.Union, types.UnionType) else None


_PLAIN: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
    Any: ("any value", "values"),
}


def describe(annotation: Any) -> str:
    """Returns a type in words, such as `an integer greater than 0` or `one of 'bf16', 'fp32'`."""
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
    """Returns a shape in words; see `describe`."""
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
    """Returns all values that literals, enumerations and booleans in a type allow, for did-you-mean hints."""
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


_CUSTOM = ("value_error", "assertion_error")
_SCALARS = (bool, int, float, str)
_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


def read_leaf(key: str, node: Node, shape: Shape) -> tuple[Any, list[Fault]]:
    """Returns the typed value of a node, or None and its faults."""
    wrong = [Fault(at, message, origin) for at, message, origin in _unreadable(key, node)]
    if wrong:
        return None, wrong
    value = plain(node)
    try:
        return _adapter(shape.type).validate_json(json.dumps(value)), []
    except PydanticUserError as error:
        return None, [Fault(key, f"type {describe(shape.type)} cannot be read from a recipe: {error.message}", node.origin)]
    except ValidationError as error:
        return None, _faults(key, node, shape, error)


def written(value: Any, annotation: Any) -> Any:
    """Converts a typed leaf for TOML: paths to text, tuples to lists, enumerations to their values."""
    if type(value) in _SCALARS and _is_scalar(annotation) and (not isinstance(value, float) or math.isfinite(value)):
        return value  # the same as from pydantic, which takes a millisecond to build an adapter
    return _adapter(annotation).dump_python(value, mode="json")


def _is_scalar(annotation: Any) -> bool:
    """Whether a type has only booleans, numbers, text or None, without a custom serialization."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *metadata = typing.get_args(annotation)
        return _is_scalar(inner) and not any(hasattr(item, "__get_pydantic_core_schema__") for item in metadata)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return all(_is_scalar(option) for option in typing.get_args(annotation))
    return annotation in (*_SCALARS, types.NoneType) or typing.get_origin(annotation) is typing.Literal


def schema_of(annotation: Any) -> dict[str, Any]:
    """Returns the JSON Schema of a leaf's type.

    Raises:
        PydanticUserError: pydantic does not support the type.
    """
    return _adapter(annotation).json_schema()


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return _kept(annotation)
    except TypeError:  # not hashable, so not cached
        return _new(annotation)


@cache
def _kept(annotation: Any) -> TypeAdapter[Any]:
    return _new(annotation)


def _new(annotation: Any) -> TypeAdapter[Any]:
    with _without_plugins():
        try:
            return TypeAdapter(annotation, config=ConfigDict(strict=True))
        except PydanticUserError:  # types with their own configuration (TypedDict, BaseModel) do not accept another one
            return TypeAdapter(annotation)


@contextlib.contextmanager
def _without_plugins() -> Iterator[None]:
    """Disables plugins of pydantic, so that installed packages cannot change the meaning of a recipe. It also saves 10 ms."""
    before = os.environ.get(_PLUGINS)
    os.environ[_PLUGINS] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PLUGINS]
        else:
            os.environ[_PLUGINS] = before


def bad_letter(text: str, *, is_name: bool) -> str:
    """Returns the fault of the first forbidden character of a text, or "". Names of files and components may not contain
    control characters, including line breaks."""
    for letter in text:
        is_control = letter < " " or "\x7f" <= letter < "\xa0" or letter in "\u2028\u2029"
        if letter == "\0" or (is_name and is_control):
            what = "NUL" if letter == "\0" else "a line break" if letter in _BREAKS else "a control character"
            return f"contains {what} ({letter!r})"
        if "\ud800" <= letter <= "\udfff":
            return f"is not UTF-8 text: it contains {letter!r}"
    return ""


_BREAKS = "\n\r\v\f\x85\u2028\u2029"
_NAMES = re.compile(r"(^|[._])(name|label|dir|path|paths|file|folder|url|weights)$")
"""Matches keys whose text is a name of a file or of a component."""


def _unreadable(key: str, node: Node) -> list[tuple[str, str, str]]:
    """Returns the faults (key, message, origin) of TOML values that no field accepts: dates, infinities, not-a-number, integers
    beyond 64 bits, NUL in text, control characters in names."""
    if isinstance(node, Table):
        return [fault for name, item in node.items.items() for fault in _unreadable(join(key, name), item)]
    if isinstance(node, Array):
        return [fault for index, item in enumerate(node.items) for fault in _unreadable(join(key, str(index)), item)]
    if isinstance(node.value, datetime.date | datetime.time):
        return [(key, f"{node.value} is a date; text needs quotes", node.origin)]
    if isinstance(node.value, float) and not math.isfinite(node.value):
        return [(key, f"{node.value} is not a finite number", node.origin)]
    if isinstance(node.value, int) and not -(2**63) <= node.value < 2**63:
        return [(key, f"{node.value} does not fit in 64 bits", node.origin)]
    if isinstance(node.value, str) and (wrong := bad_letter(node.value, is_name=_NAMES.search(key) is not None)):
        return [(key, wrong, node.origin)]
    return []


def _faults(key: str, node: Node, shape: Shape, error: ValidationError) -> list[Fault]:
    """Converts pydantic's errors to one fault per key; errors of a union's alternatives are merged."""
    places: dict[str, tuple[Node, list[str]]] = {}
    for detail in error.errors(include_url=False):
        at, inner = key, node
        for part in detail["loc"]:
            below = _below(inner, part)
            if below is None:  # the rest of the path names alternatives of a union, not keys
                break
            at, inner = join(at, str(part)), below
        message = detail["msg"].split(", ", 1)[-1] if detail["type"] in _CUSTOM else ""
        places.setdefault(at, (inner, []))[1].append(message)
    faults = []
    for at, (inner, messages) in places.items():
        custom = "; ".join(dict.fromkeys(message for message in messages if message))
        value = plain(inner)
        shown = "a table" if isinstance(inner, Table) else repr(value)
        expected = describe(shape.type) if at == key else f"its part of {describe(shape.type)}"
        faults.append(
            Fault(at, custom or f"expected {expected}, not {shown}", inner.origin, _hint(value, inner.origin, at, shape))
        )
    return faults


def _below(node: Node, part: str | int) -> Node | None:
    if isinstance(node, Table):
        return node.items.get(str(part))
    if isinstance(node, Array) and isinstance(part, int) and part < len(node.items):
        return node.items[part]
    return None


def _hint(value: Any, origin: str, key: str, shape: Shape) -> str:
    allowed = [str(literal) for literal in literals(shape.type)]
    if isinstance(value, str) and allowed:
        close = did_you_mean(value.lower(), allowed)
        return close if close.startswith("did") else ""
    if isinstance(value, Leaf | bool | int | float) and "text" in describe(shape.type) and origin.startswith("--"):
        return f"quote it: --{key}='\"{value}\"'"
    return ""
