"""One leaf: typed by pydantic, its faults in plain words."""

import contextlib
import datetime
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from forge_core.config.shape import Shape
from forge_core.config.tree import Array, Leaf, Node, Table, join, plain
from forge_core.config.words import describe, literals
from forge_core.errors import Fault, did_you_mean

_CUSTOM = ("value_error", "assertion_error")
_SCALARS = (bool, int, float, str)
_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


def read_leaf(key: str, node: Node, shape: Shape) -> tuple[Any, list[Fault]]:
    """The typed value of a node, or the faults that refuse it."""
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
    """A typed leaf as TOML can hold it: paths as text, tuples as lists, enumerations by value."""
    if type(value) in _SCALARS and _is_scalar(annotation) and (not isinstance(value, float) or math.isfinite(value)):
        return value  # what pydantic would say, without the millisecond in which it builds an adapter
    return _adapter(annotation).dump_python(value, mode="json")


def _is_scalar(annotation: Any) -> bool:
    """Whether values of a type are booleans, numbers, text or None, and nothing in the type says how they are written."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *metadata = typing.get_args(annotation)
        return _is_scalar(inner) and not any(hasattr(item, "__get_pydantic_core_schema__") for item in metadata)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return all(_is_scalar(option) for option in typing.get_args(annotation))
    return annotation in (*_SCALARS, types.NoneType) or typing.get_origin(annotation) is typing.Literal


def schema_of(annotation: Any) -> dict[str, Any]:
    """The JSON Schema of a leaf's type.

    Raises:
        PydanticUserError: the type has none.
    """
    return _adapter(annotation).json_schema()


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return _kept(annotation)
    except TypeError:  # not hashable: made anew each time
        return _new(annotation)


@cache
def _kept(annotation: Any) -> TypeAdapter[Any]:
    return _new(annotation)


def _new(annotation: Any) -> TypeAdapter[Any]:
    with _without_plugins():
        try:
            return TypeAdapter(annotation, config=ConfigDict(strict=True))
        except PydanticUserError:  # a type that has a configuration (TypedDict, BaseModel) refuses another one
            return TypeAdapter(annotation)


@contextlib.contextmanager
def _without_plugins() -> Iterator[None]:
    """Pydantic's own plugins stay out: a recipe means the same with any package installed, and looking for them takes 10 ms."""
    said = os.environ.get(_PLUGINS)
    os.environ[_PLUGINS] = "__all__"
    try:
        yield
    finally:
        if said is None:
            del os.environ[_PLUGINS]
        else:
            os.environ[_PLUGINS] = said


def bad_letter(text: str, *, is_name: bool) -> str:
    """What is wrong with a letter of a text; "" where nothing is. A name, of a file or of a part, has no line breaks either."""
    for letter in text:
        is_control = letter < " " or "\x7f" <= letter < "\xa0" or letter in "\u2028\u2029"
        if letter == "\0" or (is_name and is_control):
            what = "NUL" if letter == "\0" else "a line break" if letter in _BREAKS else "a control character"
            return f"holds {what} ({letter!r})"
        if "\ud800" <= letter <= "\udfff":
            return f"is not UTF-8 text: it holds {letter!r}"
    return ""


_BREAKS = "\n\r\v\f\x85\u2028\u2029"
_NAMES = re.compile(r"(^|[._])(name|label|dir|path|paths|file|folder|url|weights)$")
"""Keys whose text is a name of a file or of a part."""


def _unreadable(key: str, node: Node) -> list[tuple[str, str, str]]:
    """What TOML can say and no key of ours can hold: dates, infinities, not-a-number, integers beyond 64 bits, NUL in text, line
    breaks in names."""
    if isinstance(node, Table):
        return [found for name, item in node.items.items() for found in _unreadable(join(key, name), item)]
    if isinstance(node, Array):
        return [found for index, item in enumerate(node.items) for found in _unreadable(join(key, str(index)), item)]
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
    """Pydantic's errors by place; those of a union's alternatives are one fault."""
    places: dict[str, tuple[Node, list[str]]] = {}
    for detail in error.errors(include_url=False):
        at, found = key, node
        for part in detail["loc"]:
            below = _below(found, part)
            if below is None:  # the rest of the path names alternatives of a union, not keys
                break
            at, found = join(at, str(part)), below
        message = detail["msg"].split(", ", 1)[-1] if detail["type"] in _CUSTOM else ""
        places.setdefault(at, (found, []))[1].append(message)
    faults = []
    for at, (found, messages) in places.items():
        custom = "; ".join(dict.fromkeys(message for message in messages if message))
        said = plain(found)
        shown = "a table" if isinstance(found, Table) else repr(said)
        expected = describe(shape.type) if at == key else f"its part of {describe(shape.type)}"
        faults.append(
            Fault(at, custom or f"expected {expected}, not {shown}", found.origin, _hint(said, found.origin, at, shape))
        )
    return faults


def _below(node: Node, part: str | int) -> Node | None:
    if isinstance(node, Table):
        return node.items.get(str(part))
    if isinstance(node, Array) and isinstance(part, int) and part < len(node.items):
        return node.items[part]
    return None


def _hint(said: Any, origin: str, key: str, shape: Shape) -> str:
    allowed = [str(value) for value in literals(shape.type)]
    if isinstance(said, str) and allowed:
        close = did_you_mean(said.lower(), allowed)
        return close if close.startswith("did") else ""
    if isinstance(said, Leaf | bool | int | float) and "text" in describe(shape.type) and origin.startswith("--"):
        return f"quote it: --{key}='\"{said}\"'"
    return ""
