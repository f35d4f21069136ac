"""Describes plugins (their keys), and diagnoses them: whether they load, and conform to their groups."""

import dataclasses
import inspect
import sys
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

from forge_core.component import Component, Slot, decorator_fault, fields_of
from forge_core.config.fields import describe_shape, read_leaf, shape_of, shapes_in, written
from forge_core.config.toml import to_toml, value_text
from forge_core.config.tree import DEFAULT, Leaf, Table, build, plain
from forge_core.config.validation import default_of, walk
from forge_core.errors import BrokenPlugin, UnknownComponent, did_you_mean
from forge_core.registry import GROUPS, Entry, Registry, canonical
from forge_core.trust import trust_name


@dataclass(frozen=True)
class KeyDescription:
    """One key of a component.

    Attributes:
        default: default value as TOML; None for a required key, and for a table that always exists, whose `keys` have their own
            defaults.
        keys: keys of the table that this key holds, or of each table in it.
    """

    name: str
    expected: str
    default: str | None
    doc: str
    keys: tuple["KeyDescription", ...] = ()


@dataclass(frozen=True)
class PluginDescription:
    """Docstring and keys of a plugin."""

    entry: Entry
    doc: str
    keys: tuple[KeyDescription, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            **self.entry.as_json(),
            "target": self.entry.target,
            "doc": self.doc,
            "keys": [dataclasses.asdict(key) for key in self.keys],
        }


@dataclass(frozen=True)
class PluginReport:
    """The problems of one plugin; empty if it is sound."""

    entry: Entry
    problems: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {**self.entry.as_json(), "problems": list(self.problems)}


def find_everywhere(registry: Registry, name: str, group: str = "") -> list[Entry]:
    """Returns all plugins that `name` may mean, in one group or in all groups; the name of a distribution means all its plugins.

    Raises:
        UnknownComponent: no plugin or distribution has this name.
    """
    if group or ".py:" in name:
        wanted = group if group.startswith("forge.") else f"forge.{group}"
        if not group:
            raise UnknownComponent(f"the group of {name!r} is unknown; set it with --group")
        trust_name(name)
        return [registry.find(wanted, name)]
    entries = [entry for entry in registry.entries if name in (entry.name, entry.qualified)]
    entries = entries or [entry for entry in registry.entries if canonical(entry.distribution) == canonical(name)]
    if not entries:
        hint = did_you_mean(name, sorted({known for entry in registry.entries for known in (entry.name, entry.distribution)}))
        raise UnknownComponent(f"unknown plugin {name!r}" + (f"; {hint}" if hint else ""))
    return sorted(entries, key=lambda entry: (entry.group, entry.distribution))


def describe_plugin(entry: Entry, registry: Registry) -> PluginDescription:
    """Returns a plugin's docstring and keys.

    Raises:
        BrokenPlugin: the plugin cannot be loaded.
    """
    loaded = registry.load_entry(entry)
    if not (inspect.isclass(loaded) and issubclass(loaded, Component)):
        documented = callable(loaded) or isinstance(loaded, ModuleType)
        return PluginDescription(entry, (inspect.getdoc(loaded) or "").partition("\n\n")[0] if documented else str(loaded), ())
    return PluginDescription(entry, " ".join((inspect.getdoc(loaded) or "").split()), _keys(loaded, registry))


def _keys(cls: type, registry: Registry, instance: Any = None, above: tuple[type, ...] = ()) -> tuple[KeyDescription, ...]:
    """Returns the keys of a component or section; with an `instance`, its values are the defaults."""
    keys = []
    for info, shape in shapes_in(cls).values():
        value = info.default if instance is None else getattr(instance, info.name)
        default = None
        if value is None and shape.slot is not None and shape.slot.default is not None:
            default = shape.slot.default
        elif instance is not None or not info.required:
            default = "none" if value is None else value_text(default_of(value, shape, registry))
        table = shape.inner or shape
        below: tuple[KeyDescription, ...] = ()
        if table.kind == "section" and table.type not in above:  # a table may contain tables of the same type
            below = _keys(table.type, registry, value if shape.kind == "section" else None, (*above, table.type))
            default = None if shape.kind == "section" and value is not None else default
        keys.append(KeyDescription(info.name, describe_shape(shape), default, info.doc, below))
    return tuple(keys)


def diagnose(registry: Registry, name: str = "", *, conform: bool = False) -> list[PluginReport]:
    """Loads every plugin (or those with one name) and returns their problems.

    Raises:
        UnknownComponent: no plugin has this name.
    """
    entries = find_everywhere(registry, name) if name else [entry for group in GROUPS for entry in registry.of(group)]
    return [PluginReport(entry, tuple(_problems(entry, registry, conform))) for entry in entries]


def _problems(entry: Entry, registry: Registry, conform: bool) -> list[str]:
    if entry.group == "forge.conformance" and entry.is_forge:  # imports torch, and what it checks, which may not be installed
        return []
    rivals = [other for other in registry.of(entry.group) if other.name == entry.name and other != entry]
    if any(rival.is_forge for rival in (entry, *rivals)):  # Forge's names take precedence, so there is no conflict
        rivals = []
    if entry.group == "forge.conformance":  # its names are groups; several distributions may check the same group
        rivals = []
    before = "torch" in sys.modules
    faults = flaws(entry, registry, conform=conform)
    heavy = not before and faults.loads and "torch" in sys.modules
    return [
        *(f"the name is also claimed by {other.distribution} {other.version}" for other in rivals),
        *(["imports torch at module level; import it inside build"] if heavy else []),
        *faults.messages,
    ]


class Flaws(NamedTuple):
    """Problems of a plugin by itself, and whether it can be loaded."""

    loads: bool
    messages: list[str]


def flaws(entry: Entry, registry: Registry, *, conform: bool = False) -> Flaws:
    """Checks that a plugin can be loaded and has docstrings; with `conform`, also that its description loads again."""
    try:
        loaded = registry.load_entry(entry)
    except BrokenPlugin as error:
        return Flaws(False, [str(error)])
    problems = []
    if inspect.isclass(loaded) and issubclass(loaded, Component):
        problems += _describes_itself(loaded)
        problems += _defaults_fit(loaded)
        if conform:
            problems += _conforms(entry, loaded, registry)
    elif (callable(loaded) or isinstance(loaded, ModuleType)) and not inspect.getdoc(loaded):
        problems.append("has no docstring")
    return Flaws(True, problems)


def _describes_itself(cls: type[Component]) -> list[str]:
    """Checks the requirements on the class of a component."""
    problems = [fault] if (fault := decorator_fault(cls)) else []
    if not cls.__doc__ or cls.__doc__.startswith(f"{cls.__name__}("):  # the docstring that dataclass generates
        problems.append("has no docstring")
    problems += [
        f"field {item.name!r} is not keyword-only" for item in dataclasses.fields(typing.cast(Any, cls)) if not item.kw_only
    ]
    for info in fields_of(cls):
        if info.name == "name":
            problems.append("field 'name' clashes with the key that chooses the component")
        if any(callable(vars(base).get(info.name)) for base in cls.__mro__):
            problems.append(f"field {info.name!r} hides a method; rename it, or build a hook or other object that has the key")
        if not info.doc:
            problems.append(f"field {info.name!r} has no docstring below it")
        if shape_of(info.type).type is Component and shape_of(info.type).slot is None:
            problems.append(f"field {info.name!r} holds a component without a Slot, so its group is unknown")
    return problems


def _defaults_fit(cls: type) -> list[str]:
    """Returns the faults of default values that a recipe could not set: of another type, or out of range."""
    problems = []
    for info in fields_of(cls):
        shape = shape_of(info.type)
        if shape.kind != "leaf" or info.required or (info.default is None and shape.optional):
            continue
        try:
            _, faults = read_leaf(info.name, Leaf(written(info.default, shape.type), DEFAULT), shape)
        except (TypeError, ValueError) as error:  # from pydantic and json, for values that they cannot write
            problems.append(f"default of {info.name!r}: {error}")
        else:
            problems += [f"default of {info.name!r}: {fault.message}" for fault in faults]
    return problems


def _conforms(entry: Entry, cls: type, registry: Registry) -> list[str]:
    """Checks, for any group, that the defaults build an instance, and that its description loads again to an equal instance."""
    name = entry.name if ".py:" in entry.name else entry.qualified
    slot = Annotated[Component, Slot(entry.group, default=name)]
    holder = dataclasses.make_dataclass("Holder", [("plugin", slot, Slot.unset())], frozen=True)
    required = {f"plugin.{info.name}" for info in fields_of(cls) if info.required}
    first = walk(holder, Table({}, DEFAULT), registry)
    missing = {fault.key.removesuffix(".name") for fault in first.faults}
    problems = [f"defaults: {fault}" for fault in first.faults if fault.key.removesuffix(".name") not in required]
    if not missing:
        described = tomllib.loads(to_toml(plain(first.tree)))
        tree = build(described, (), lambda _: "description", Path())
        again = walk(holder, typing.cast(Table, tree), registry)
        if again.faults or again.value != first.value:
            problems.append("its description does not read back as an equal component")
    return problems
