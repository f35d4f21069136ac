"""Components: dataclasses whose fields are TOML keys. A component names the class that it configures:

    @dataclass(frozen=True, kw_only=True)
    class LionConfig(Component):
        lr: Annotated[float, Gt(0)] = 1e-4
        '''Learning rate.'''
        implementation: ClassVar[str] = "forge_lionize.lion:Lion"

`build(model)` imports `Lion` and returns `Lion(model, lr=1e-4)`. A component without an implementation defines `build`, or is
itself the object that its group requires. Because a component has no tensors and `build` imports on use, listing, `--help`,
validation and editor schemas never import torch. A field that contains another component is annotated with `Slot`:

    attention: Annotated[Component, Slot("forge.attentions", default="gqa")] = Slot.unset()

Every key has a class, which says what a resume does if the checkpoint was trained with a different value. A section or component
sets the class of its keys by `key_class: ClassVar = FREE`; a single field sets its own by `Annotated[int, Gt(0), LAYOUT]`.
"""

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import import_module
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

from forge_core.errors import BrokenPlugin


class KeyClass(StrEnum):
    """Class of a key: what a resume does if the key has a different value in the checkpoint."""

    IDENTITY = "identity"
    """Changes the trained function or the meaning of its state: refused unless `checkpoint.allow` names the key."""
    DATA = "data"
    """Changes what is read: listed. The data position is compared too, and refused if its numbers would mean other samples."""
    FREE = "free"
    """May change freely: listed once with both values."""
    LAYOUT = "layout"
    """Changes how the work is distributed, which does not affect the result: listed as well."""


IDENTITY, DATA, FREE, LAYOUT = KeyClass


class Component:
    """Base class of everything that a recipe chooses by name.

    Subclasses are dataclasses with keyword-only fields, and frozen unless they set `keeps_state`. Each field has a type that
    pydantic supports (with ranges from `annotated_types`) and a docstring below it. Subclasses set `implementation`, define
    `build`, or are themselves the object that their group requires. A `ValueError` raised in `__post_init__` becomes a fault of
    the recipe.

    Keys without a class are `IDENTITY`: a resume refuses different values unless the user allows them.

    Keys and values of earlier versions are refused with a hint: `renamed: ClassVar = {"old key": "new key"}` and
    `removed: ClassVar = {("key", "value"): "what to do instead"}`.
    """

    implementation: ClassVar[Any] = None
    """Module and name, separated by a colon, of the class or function that `build` calls; imported by the first `build`."""
    keeps_state: ClassVar[bool] = False
    """True for hooks, which change during a run: `build` returns a copy for each run. All other components are frozen."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Returns `implementation(*args, **fields)`, or the component itself if it names no implementation.

        The arguments are those of the component's group (`forge_core.registry`); an implementation without parameters for them is
        called without them. The fields are those of `passed`, by name; a field that contains a component passes the component.
        Subclasses that compute something from their fields override `build`.

        Raises:
            BrokenPlugin: the implementation does not exist, or does not accept these arguments and fields.
        """
        if self.implementation is None:
            return self
        implementation = implementation_of(type(self))
        count, fault = _fit(type(self), implementation, len(args), frozenset(kwargs))
        if fault:
            raise BrokenPlugin(f"{_origin(type(self))} cannot be built: {fault}")
        return implementation(*args[:count], **kwargs, **{name: getattr(self, name) for name in self.passed()})

    @classmethod
    def passed(cls) -> tuple[str, ...]:
        """Returns the names of the attributes that `build` passes: the fields of the class that sets `implementation`.

        A class overrides this if some of its fields are not for the implementation, or if a property is.
        """
        named = next(base for base in cls.__mro__ if "implementation" in vars(base))
        return tuple(item.name for item in dataclasses.fields(named) if item.init)

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Self]":
        """Returns small components for conformance checks (forge-testing); by default one with all defaults.

        Components with required keys, slots, or defaults too large for a test override this. Files that examples need go into
        `folder`, which is empty.
        """
        return (cls(),)


def implementation_of(cls: type[Component]) -> Callable[..., Any]:
    """Imports and returns the class or function that a component names.

    Raises:
        BrokenPlugin: the implementation does not exist.
    """
    module, _, names = str(cls.implementation).partition(":")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as cause:
        if not f"{module}.".startswith(f"{cause.name}."):  # a library that the implementation needs
            raise
        fault = f"there is no module {module!r}"
    else:
        try:
            for name in names.split("."):
                found = getattr(found, name)
        except AttributeError:
            fault = f"{module} has no {names!r}"
        else:
            return found
    raise BrokenPlugin(f"{_origin(cls)} names the implementation {cls.implementation!r}, but {fault}; correct `implementation`")


def misfit(cls: type[Component], implementation: Callable[..., Any], given: Iterable[str]) -> str:
    """Returns why an implementation cannot be called with a group's arguments and a component's fields; empty if it can.

    Args:
        given: names of the group's arguments, which are passed by position.
    """
    return _fit(cls, implementation, len(tuple(given)), frozenset())[1]


@cache
def _fit(cls: type[Component], implementation: Callable[..., Any], count: int, named: frozenset[str]) -> tuple[int, str]:
    """Returns how many of `count` arguments an implementation accepts, all or none, and why it accepts neither, else ""."""
    try:
        signature = inspect.signature(implementation)
    except (NameError, ValueError):  # annotations that exist for type checkers only; a builtin
        return count, ""
    keywords = dict.fromkeys((*named, *cls.passed()))
    faults = []
    for number in (count, 0):
        try:
            signature.bind(*[None] * number, **keywords)
        except TypeError as cause:
            faults.append(str(cause))
        else:
            return number, ""
    takes = f"{count} argument{'' if count == 1 else 's'} by position and {', '.join(keywords) or 'no field'} by name"
    change = "rename the field or the parameter, give the parameter a default, or define `build`"
    return count, f"{cls.implementation}{signature} does not take {takes} ({faults[0]}); {change}"


def _origin(cls: type) -> str:
    """Returns the description of a component in messages: its class, and the distribution that registers it."""
    target = f"{cls.__module__}:{cls.__qualname__}"
    for distribution in distributions():
        if target in (distribution.read_text("entry_points.txt") or "").split():
            return f"{target} of {distribution.name} {distribution.version}"
    return target


def decorator_fault(cls: type[Component]) -> str:
    """Returns why the dataclass decorator of a component is wrong; empty if it is right."""
    if "__dataclass_fields__" not in vars(cls):
        fault = "not a dataclass"
    elif (is_frozen := cast("Any", cls).__dataclass_params__.frozen) == cls.keeps_state:
        fault = "frozen" if is_frozen else "not frozen"
    else:
        return ""
    return f"is {fault}: decorate it with @dataclass({'' if cls.keeps_state else 'frozen=True, '}kw_only=True)"


def class_name(component: Any) -> str:
    """Returns the name of a component in messages: its class name without `Config`."""
    return type(component).__name__.removesuffix("Config")


@dataclass(frozen=True)
class Slot:
    """Marks a field as a component of `group` that the key `name` chooses; `default` is the name when absent.

    In `list[Annotated[Component, Slot(...)]]` each table of the array has a `name`. In `dict[str, Annotated[...]]` each table has
    a `name`, unless `named_by_key` is set: then its key is the name (`[transforms.recompute]`).
    """

    group: str
    default: str | None = None
    named_by_key: bool = False

    @staticmethod
    def unset() -> Any:
        """Returns the default value of a slot field: the configuration fills it from `default`, if set, else it is None."""
        return dataclasses.field(default=None)


class Place:
    """Marks a text field as a file, directory or URL if its name does not say so: `Annotated[str, Place]`."""


PLACES = frozenset(
    {"path", "paths", "file", "files", "folder", "folders", "dir", "dirs", "directory", "directories", "url", "urls"}
)
"""Words in a field's name that mark it as a file, directory or URL."""

Class = type
"""The builtin `type`, which cannot be named inside `FieldInfo` because a field has the same name."""


class FieldInfo(NamedTuple):
    """One field of a section or component, for the configuration."""

    name: str
    type: Any
    required: bool
    default: Any
    owner: "Class"

    @property
    def doc(self) -> str:
        """Docstring below the field; read from the source on access."""
        return _docs_of(self.owner).get(self.name, "")

    @property
    def is_place(self) -> bool:
        """Whether the field names files, directories or URLs: by a word of its name, by `Place`, or by the type `Path`."""
        return not PLACES.isdisjoint(self.name.split("_")) or any(kind in _parts(self.type) for kind in (Place, Path))

    @property
    def declared_class(self) -> KeyClass | None:
        """Class that the field, or the dataclass that introduces it, declares; declarations of subclasses do not count."""
        return _marked(self.type) or class_of_keys(_introduced_by(self.owner, self.name))

    @property
    def key_class(self) -> KeyClass:
        """Class of the key; `IDENTITY` if none is declared."""
        return self.declared_class or KeyClass.IDENTITY


def fields_of(cls: type) -> tuple[FieldInfo, ...]:
    """Returns the fields of a section or component, with resolved types."""
    hints = _types_of(cls)
    return tuple(
        FieldInfo(
            name=item.name,
            type=hints[item.name],
            required=item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING,
            default=_default_of(item),
            owner=cls,
        )
        for item in dataclasses.fields(cls)
        if item.init
    )


@cache
def _types_of(cls: type) -> dict[str, Any]:
    """Returns the resolved annotations of `cls`; to resolve them takes 0.1 ms, and commands ask for them thousands of times."""
    return typing.get_type_hints(cls, include_extras=True)


def class_of_keys(cls: type) -> KeyClass | None:
    """Returns the class that a section or component itself declares for its keys; a base's declaration covers only its keys."""
    declared = vars(cls).get("key_class")
    return declared if isinstance(declared, KeyClass) else None


def _marked(annotation: Any) -> KeyClass | None:
    """Returns the key class in an annotation, at any depth, as in `Annotated[int, Gt(0), FREE] | None`."""
    if isinstance(annotation, KeyClass):
        return annotation
    return next((found for item in typing.get_args(annotation) if (found := _marked(item)) is not None), None)


def _parts(annotation: Any) -> list[Any]:
    """Returns an annotation and everything inside it."""
    return [annotation, *(found for item in typing.get_args(annotation) for found in _parts(item))]


def _introduced_by(cls: type, name: str) -> type:
    """Returns the dataclass that introduces a field of `cls`: the farthest base with the identical field."""
    fields = {base: vars(base).get("__dataclass_fields__", {}) for base in cls.__mro__}
    return [base for base, own in fields.items() if own.get(name) is fields[cls].get(name)][-1]


def _default_of(item: "dataclasses.Field[Any]") -> Any:
    if item.default is not dataclasses.MISSING:
        return item.default
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return None


@cache
def _docs_of(cls: type) -> dict[str, str]:
    """Returns the docstrings below the fields of `cls` and its bases; the nearest class takes precedence."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        if dataclasses.is_dataclass(base):
            for name, doc in _docs_in_source(base):
                found.setdefault(name, doc)
    return found


def _docs_in_source(cls: type) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # a class defined in a console or by a tool has no source
        return
    body = cast(ast.ClassDef, tree.body[0]).body
    for statement, following in pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            yield statement.target.id, " ".join(following.value.value.split())
