"""Converts the merged tree to typed values: walks the dataclasses of the schema, runs the checks across sections
(`forge.checks`), and reports all faults together.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from forge_core.component import Component, FieldInfo
from forge_core.config.fields import Shape, bad_letter, describe_shape, literals, read_leaf, shapes_in, written
from forge_core.config.layers import merge_node
from forge_core.config.tree import DEFAULT, UNSET, Array, Leaf, Node, Table, given_at, join, origin_at, plain
from forge_core.errors import BrokenPlugin, ConfigError, Fault, MissingFile, PluginError, RecipeWarning, did_you_mean
from forge_core.layout import Layout
from forge_core.protocols.run import Job
from forge_core.registry import Entry, FileLoader, Registry, canonical

GROUP = "forge.checks"


class _Missing(Exception):
    """A check needs a section that is invalid and has already been reported."""


class PartialRecipe:
    """The valid fields of a recipe or section with faults; a check that reads an invalid field ends there."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts

    def has(self, names: Iterable[str]) -> bool:
        """Whether all of these fields are valid."""
        return set(names) <= self._parts.keys()

    def __getattr__(self, name: str) -> Any:
        try:
            return self._parts[name]
        except KeyError:
            raise _Missing(name) from None


def run_checks(
    job: Job | PartialRecipe,
    layout: Layout | None,
    registry: Registry,
    tree: Table,
    used: Iterable[tuple[str, str]] = (),
    here: bool | None = False,
) -> tuple[list[Fault], list[str]]:
    """Runs all checks of a recipe, so that all faults are reported together. A check that reads an invalid field ends there;
    the faults that it has yielded before are kept.

    A check that cannot run is a fault only if the recipe uses a component of its distribution: an unrelated broken package
    must not stop a run that does not use it.

    Args:
        job: the typed recipe, or a `PartialRecipe`.
        layout: layout of the run; None if its sizes are invalid.
        registry: has the checks.
        tree: the resolved tree, for the origins of faults.
        used: (group, name) of the chosen components.
        here: True if the run will start on this machine, so that missing files are faults; False makes them warnings; None
            ignores them, for commands that read no files, such as `plan`.

    Returns:
        (faults, warnings). Checks that could not run are warnings, unless they are faults as above.
    """
    used_distributions = {canonical(registry.find(group, name).distribution) for group, name in used}
    faults: list[Fault] = []
    warnings: list[str] = []
    for entry in registry.of(GROUP):
        try:
            for fault in _run(entry, job, layout, registry):
                if here is None and isinstance(fault, MissingFile):
                    continue
                if isinstance(placed := _placed(fault, tree), RecipeWarning) and not (here and isinstance(placed, MissingFile)):
                    warnings.append(str(placed))
                else:
                    faults.append(placed)
        except BrokenPlugin as error:
            if canonical(entry.distribution) in used_distributions:
                faults.append(Fault(entry.qualified, str(error)))
            else:
                warnings.append(str(error))
    return faults, warnings


def _run(entry: Entry, job: Job | PartialRecipe, layout: Layout | None, registry: Registry) -> list[Fault]:
    check, faults = registry.load_entry(entry), []
    try:
        for fault in check(job, PartialRecipe({}) if layout is None else layout):
            faults.append(fault)  # noqa: PERF402 (keeps the faults of a check that raises later)
        return faults
    except _Missing:
        return faults
    except Exception as cause:  # a plugin's check may raise anything; the caller decides what it stops
        if isinstance(job, PartialRecipe):  # perhaps because of a missing field; the check runs again once the recipe is valid
            return faults
        whose = f"check {entry.name!r} of {entry.distribution} {entry.version} ({entry.target})"
        raise BrokenPlugin(f"{whose} failed: {type(cause).__name__}: {cause}") from cause


def _placed(fault: Fault, tree: Table) -> Fault:
    key = re.sub(r"\[(\d+)\]", r".\1", fault.key)  # `hooks[0]` is `hooks.0`, as overrides write it
    return replace(fault, key=key, origin=fault.origin or origin_at(tree, key))


class Invalid:
    """Placeholder for a value that is invalid; its faults have been reported."""


INVALID = Invalid()

UNKNOWN_KEY = "unknown key"
RENAMED = "its name is now"


@dataclass(frozen=True)
class Resolution:
    """Result of the validation of a tree.

    Attributes:
        value: instance of the schema, or `INVALID` if there are faults.
        parts: valid fields of the schema by name; an invalid section is a `PartialRecipe`.
        tree: every key with its value and origin, including defaults and chosen names; loads again to an equal value.
        chosen: (group, name) of each component, by the dotted key of its table.
        fields: field of each dotted key.
        faults: all faults.
    """

    value: Any
    parts: Mapping[str, Any]
    tree: Table
    chosen: Mapping[str, tuple[str, str]]
    fields: Mapping[str, FieldInfo]
    faults: tuple[Fault, ...]

    @property
    def used(self) -> tuple[tuple[str, str], ...]:
        """(group, name) of every chosen component, for `Registry.used`."""
        return tuple(self.chosen.values())


def resolve(schema: type, tree: Table, registry: Registry) -> Resolution:
    """Validates a merged tree; returns a `Resolution` without faults.

    Raises:
        ConfigError: the tree has faults; the error lists all of them.
    """
    outcome = walk(schema, tree, registry)
    if outcome.faults:
        raise ConfigError(outcome.faults)
    return outcome


def walk(schema: type, tree: Table, registry: Registry) -> Resolution:
    """Validates a merged tree like `resolve`, but returns faults together with the valid parts."""
    walker = _Walker(registry)
    value, resolved = walker.section("", tree, schema, component=False)
    faults = tuple(_with_its_table(fault, walker.fields) for fault in walker.faults)
    if faults:
        from forge_core.redaction import redacted_fault  # imported here, because compiling its patterns takes milliseconds

        faults = tuple(map(redacted_fault, faults))
    return Resolution(INVALID if faults else value, walker.parts, resolved, walker.chosen, walker.fields, faults)


def _with_its_table(fault: Fault, known: Iterable[str]) -> Fault:
    """Adds a hint to the fault of an unknown key that exists in another table."""
    name = fault.key.rpartition(".")[2]
    if fault.message != UNKNOWN_KEY or fault.hint.startswith(("did you mean", RENAMED)):
        return fault
    if name == "base":
        return replace(fault, hint="base belongs at the top of the file, above the first [table]")
    if name == "plugins":
        return replace(fault, hint="plugins belongs at the top of the user's file, above the first [table]")
    places = [key for key in known if key.rpartition(".")[2] == name]
    return replace(fault, hint=f"did you mean {' or '.join(map(repr, places))}?") if 0 < len(places) <= 3 else fault


def default_of(value: Any, shape: Shape, registry: Registry) -> Any:
    """Returns the default value of a field as plain values, as a recipe would contain it."""
    return plain(_Walker(registry).defaults("", value, shape))


@dataclass
class _Walker:
    registry: Registry
    faults: list[Fault] = field(default_factory=list)
    chosen: dict[str, tuple[str, str]] = field(default_factory=dict)
    fields: dict[str, FieldInfo] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    right: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The valid fields of each invalid section."""
    owner: str = ""
    """The distribution of the component whose defaults are filled in; its components take precedence for names in them."""

    def section(self, key: str, node: Table, cls: type, *, component: bool) -> tuple[Any, Table]:
        """Builds an instance of a section or component class from its table; also returns the table with all defaults."""
        fields, removed = shapes_in(cls), getattr(cls, "removed", {})
        values: dict[str, Any] = {}
        resolved: dict[str, Node] = {"name": node.items["name"]} if component else {}
        for name, item in node.items.items():
            if name not in fields and not (component and name == "name"):
                new = getattr(cls, "renamed", {}).get(name)
                hint = f"{RENAMED} {join(key, new)!r}" if new else did_you_mean(name, list(fields))
                self.fault(join(key, name), UNKNOWN_KEY, item.origin, hint)
        for name, (info, shape) in fields.items():
            if component and name == "name":
                continue
            at = join(key, name)
            self.fields[at] = info
            given = node.items.get(name)
            if given is None:
                value, made = self.absent(at, info, shape, node.origin)
            else:
                value, made = self.value(at, self.over_default(at, info, shape, given), shape)
                if value is INVALID and isinstance(given, Leaf) and (hint := removed.get((name, given.value))):
                    self.faults[-1] = replace(self.faults[-1], hint=hint)
                value = self.placed(at, given, value) if info.is_place else value
            values[name] = value
            if made is not None:
                resolved[name] = made
            if not key and value is not INVALID:
                self.parts[name] = value  # also if the table has an unknown key
            elif not key and at in self.right:
                self.parts[name] = PartialRecipe(self.right[at])
        whole = Table(resolved, node.origin)
        if any(value is INVALID for value in values.values()):
            if not component:
                self.right[key] = {name: value for name, value in values.items() if value is not INVALID}
            if broken := _rule_of_the_rest(cls, values):
                self.rule(key, cls, whole, broken)
            return INVALID, whole
        try:
            return cls(**values), whole
        except ValueError as error:
            self.rule(key, cls, whole, str(error))
            return INVALID, whole

    def placed(self, key: str, node: Node, value: Any) -> Any:
        """Refuses empty paths: an unset shell variable results in empty text, which would mean the working directory."""
        items = {join(key, str(index)): item for index, item in enumerate(node.items)} if isinstance(node, Array) else {key: node}
        texts = {at: item.value for at, item in items.items() if isinstance(item, Leaf) and isinstance(item.value, str)}
        empty = [at for at, text in texts.items() if not text.strip()]
        for at in empty:
            self.fault(at, "is empty", node.origin, 'is a variable unset? "." is the working directory')
        return INVALID if empty else value

    def over_default(self, key: str, info: FieldInfo, shape: Shape, given: Node) -> Node:
        """Merges a table over the default instance of its field, which may differ from the defaults of its class."""
        if shape.kind not in ("section", "component") or info.default is None or not isinstance(given, Table):
            return given
        default = self.defaults(key, info.default, shape)
        assert isinstance(default, Table)
        return merge_node(key, default, given, shape, self.registry)

    def rule(self, key: str, cls: type, whole: Table, message: str) -> None:
        """Reports a `ValueError` of `__post_init__` for the field that the message names first, else for the section."""
        first = message.split(maxsplit=1)[0].strip("`'\":,") if message else ""
        at = join(key, first) if first in shapes_in(cls) else key
        origin = origin_at(whole, first) if at != key else given_at(whole)
        self.fault(at or cls.__name__, message or f"refused by {cls.__name__}", origin)

    def absent(self, key: str, info: FieldInfo, shape: Shape, origin: str) -> tuple[Any, Node | None]:
        """Returns the default of a key that no layer sets."""
        if shape.kind == "component" and info.default is None and shape.slot is not None and shape.slot.default is not None:
            return self.component(key, Table({}, DEFAULT), shape)
        if shape.kind == "section" and info.required:
            return self.section(key, Table({}, origin), shape.type, component=False)
        if info.required or (info.default is None and shape.kind == "component" and not shape.optional):
            names = self.registry.names(shape.slot.group) if shape.slot is not None else []
            self.fault(key, f"is missing; expected {describe_shape(shape)}", origin, did_you_mean("", names))
            return INVALID, None
        made = self.defaults(key, info.default, shape)
        if shape.kind == "leaf":
            return info.default, made
        return self.value(key, made, shape)

    def defaults(self, key: str, value: Any, shape: Shape) -> Node:
        """Returns the tree of a default value, as if a layer had set it."""
        inner = shape.inner
        if value is None:
            return Leaf(UNSET, DEFAULT)
        if shape.kind == "leaf":
            return _leaf(written(value, shape.type))
        if shape.kind in ("list", "tuple") and inner is not None:
            return Array([self.defaults(join(key, str(i)), item, inner) for i, item in enumerate(value)], DEFAULT)
        if shape.kind == "dict" and inner is not None:
            return Table({name: self.defaults(join(key, name), item, inner) for name, item in value.items()}, DEFAULT)
        items: dict[str, Node] = {}
        if shape.slot is not None:
            items["name"] = Leaf(self.name_of(shape.slot.group, type(value)), DEFAULT)
        for name, (_, below) in shapes_in(type(value)).items():
            item = getattr(value, name)
            if item is not None or below.kind != "component":  # an unset slot gets its default, as if the key were absent
                items[name] = self.defaults(join(key, name), item, below)
        return Table(items, DEFAULT)

    def name_of(self, group: str, cls: type) -> str:
        """Returns the registered name of a class, or file and class name for a class in a plugin file."""
        loader = getattr(sys.modules.get(cls.__module__), "__loader__", None)
        if isinstance(loader, FileLoader):
            return f"{loader.path}:{cls.__qualname__}"
        target = f"{cls.__module__}:{cls.__qualname__}"
        return next((self.registry.spelled(e) for e in self.registry.of(group) if e.target == target), target)

    def value(self, key: str, node: Node, shape: Shape) -> tuple[Any, Node]:
        """Validates a value that a layer sets."""
        if shape.optional and isinstance(node, Leaf) and node.value == UNSET and UNSET not in literals(shape.type):
            return None, node
        if shape.kind == "leaf":
            value, faults = read_leaf(key, node, shape)
            self.faults += faults
            return (INVALID, node) if faults else (value, node)
        if shape.kind in ("list", "tuple"):
            return self.items(key, node, shape)
        if not isinstance(node, Table):
            hint = ""
            if shape.kind == "component" and isinstance(node, Leaf) and isinstance(node.value, str):
                hint = f"write {key}.name = {node.value!r}"
            self.fault(key, f"expected {describe_shape(shape)}, not {_shown(node)}", node.origin, hint)
            return INVALID, node
        if shape.kind == "section":
            return self.section(key, node, shape.type, component=False)
        if shape.kind == "component":
            return self.component(key, node, shape)
        for name, item in node.items.items():
            if wrong := bad_letter(name, is_name=True):
                self.fault(join(key, name), f"a key that {wrong}", item.origin)
        made = {name: self.entry(join(key, name), name, item, shape) for name, item in node.items.items()}
        made = {name: pair for name, pair in made.items() if pair is not None}
        whole = Table({name: pair[1] for name, pair in made.items()}, node.origin)
        bad = any(pair[0] is INVALID for pair in made.values())
        return INVALID if bad else {name: pair[0] for name, pair in made.items()}, whole

    def entry(self, key: str, name: str, node: Node, shape: Shape) -> tuple[Any, Node] | None:
        """Validates one item of a dictionary; `none` removes an item of a lower layer."""
        if isinstance(node, Leaf) and node.value == UNSET:
            return None
        inner = cast(Shape, shape.inner)
        if isinstance(node, Table) and inner.slot is not None and inner.slot.named_by_key:
            node = Table({"name": Leaf(name, node.origin), **node.items}, node.origin)
        return self.value(key, node, inner)

    def items(self, key: str, node: Node, shape: Shape) -> tuple[Any, Node]:
        if not isinstance(node, Array):
            self.fault(key, f"expected {describe_shape(shape)}, not {_shown(node)}", node.origin)
            return INVALID, node
        inner = cast(Shape, shape.inner)
        pairs = [self.value(join(key, str(index)), item, inner) for index, item in enumerate(node.items)]
        whole = Array([pair[1] for pair in pairs], node.origin)
        if any(pair[0] is INVALID for pair in pairs):
            return INVALID, whole
        values = [pair[0] for pair in pairs]
        return (tuple(values) if shape.kind == "tuple" else values), whole

    def component(self, key: str, node: Table, shape: Shape) -> tuple[Any, Node]:
        slot = shape.slot
        assert slot is not None
        given = node.items.get("name", Leaf(slot.default, DEFAULT))
        at = join(key, "name")
        if not isinstance(given, Leaf) or not isinstance(given.value, str):
            names = did_you_mean("", self.registry.names(slot.group))
            what = "is missing" if given == Leaf(None, DEFAULT) else f"expected text, not {_shown(given)}"
            self.fault(at, what, node.origin, names)
            return INVALID, node
        try:
            entry = self.registry.find(slot.group, given.value, self.owner if given.origin == DEFAULT else "")
            cls = self.registry.load_entry(entry)
        except PluginError as error:
            self.fault(at if "name" in node.items else key, str(error), given.origin if "name" in node.items else node.origin)
            return INVALID, node
        if shape.type is not Component and not issubclass(cls, shape.type):
            self.fault(at, f"{given.value!r} is not a {shape.type.__name__}", given.origin)
            return INVALID, node
        if ":" not in given.value:
            given = Leaf(self.registry.spelled(entry), given.origin)
        self.chosen[key] = (slot.group, given.value)
        before, self.owner = self.owner, entry.distribution
        try:
            return self.section(key, Table({**node.items, "name": given}, node.origin), cls, component=True)
        finally:
            self.owner = before

    def fault(self, key: str, message: str, origin: str, hint: str = "") -> None:
        self.faults.append(Fault(key, message, origin, hint))


def _rule_of_the_rest(cls: type, values: Mapping[str, Any]) -> str:
    """Returns the error of `__post_init__` if it needs only the valid fields; "" if it succeeds or reads an invalid field."""
    check = getattr(cls, "__post_init__", None)
    if check is None:
        return ""

    def is_wrong(_: Any) -> Any:
        raise LookupError

    wrong = {name: property(is_wrong) for name, value in values.items() if value is INVALID}
    instance = object.__new__(type(cls.__name__, (cls,), wrong))
    for name in values.keys() - wrong.keys():
        object.__setattr__(instance, name, values[name])
    try:
        check(instance)
    except ValueError as error:
        return str(error) or f"refused by {cls.__name__}"
    except Exception:  # noqa: BLE001 (it reads an invalid field, or fails without it)
        return ""
    return ""


def _leaf(value: Any) -> Node:
    if isinstance(value, dict):
        return Table({str(name): _leaf(item) for name, item in value.items()}, DEFAULT)
    if isinstance(value, list):
        return Array([_leaf(item) for item in value], DEFAULT)
    return Leaf(value, DEFAULT)


def _shown(node: Node) -> str:
    if isinstance(node, Table):
        return "a table"
    return "a list" if isinstance(node, Array) else repr(node.value)
