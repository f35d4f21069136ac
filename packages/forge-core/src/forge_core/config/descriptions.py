"""Describes the keys of a recipe (type, range, default, docstring, value, origin), for terminals and as JSON Schema 2020-12.

In the schema, each component is an alternative that its `name` selects, so editors can complete and check recipes.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.errors import PydanticUserError

from forge_core.component import Slot, fields_of
from forge_core.config.fields import Shape, describe_shape, schema_of, shape_of, written
from forge_core.config.tree import UNSET, Array, Leaf, Node, Table, join, leaves, plain
from forge_core.config.validation import Resolution
from forge_core.errors import ConfigError, Fault, PluginError, did_you_mean
from forge_core.registry import Registry


@dataclass(frozen=True)
class Explanation:
    """One key. `default` is None for a required key; `names` are the available names of a component; `key_class` is how a
    resume treats another value (`forge_core.component.KeyClass`)."""

    key: str
    expected: str
    default: Any
    doc: str
    value: Any
    origin: str
    names: tuple[str, ...] = ()
    key_class: str = ""


def explain(outcome: Resolution, registry: Registry, key: str = "") -> list[Explanation]:
    """Explains a key, all keys of a section, or the whole recipe.

    Raises:
        ConfigError: the recipe does not have this key.
    """
    known = list(outcome.fields)
    explanations = [_one(outcome, registry, at) for at in known if not key or at == key or at.startswith(f"{key}.")]
    if not explanations:
        shown = key.removesuffix(".name")
        if shown != key and shown in outcome.fields:
            return [_one(outcome, registry, shown)]
        raise ConfigError([Fault(key, "unknown key in this recipe", hint=did_you_mean(key, known))])
    return explanations


def origins(outcome: Resolution) -> Iterator[tuple[str, Any, str]]:
    """Yields (key, value, origin) of every value of a resolved recipe."""
    yield from leaves(outcome.tree)


def _one(outcome: Resolution, registry: Registry, key: str) -> Explanation:
    info = outcome.fields[key]
    shape = shape_of(info.type)
    node = _at(outcome.tree, key)
    default: Any = None
    names: tuple[str, ...] = ()
    doc = info.doc
    slot = shape.slot or (shape.inner.slot if shape.inner is not None else None)
    if slot is not None:
        names = tuple(registry.names(slot.group))
    if shape.kind == "leaf" and not info.required:
        default = UNSET if info.default is None else written(info.default, shape.type)
    elif shape.kind == "component" and slot is not None:
        default = slot.default
        doc = " ".join(text for text in (doc, _chosen(node, slot.group, registry)) if text)
    return Explanation(
        key, describe_shape(shape), default, doc, _value(node), node.origin if node else "", names, info.key_class.value
    )


def _chosen(node: Node | None, group: str, registry: Registry) -> str:
    """Returns name and first docstring line of the component that a table names."""
    name = node.items.get("name") if isinstance(node, Table) else None
    if not isinstance(name, Leaf):
        return ""
    try:
        doc = inspect.getdoc(registry.load(group, name.value)) or ""
    except PluginError:
        return ""
    return f"{name.value}: {doc.splitlines()[0]}" if doc else ""


def _value(node: Node | None) -> Any:
    return None if node is None else plain(node)


def _at(node: Node, key: str, path: str = "") -> Node | None:
    if path == key:
        return node
    below: list[tuple[str, Node]] = []
    if isinstance(node, Table):
        below = list(node.items.items())
    elif isinstance(node, Array):
        below = [(str(index), item) for index, item in enumerate(node.items)]
    for part, item in below:
        at = join(path, part)
        if key == at or key.startswith(f"{at}."):
            return _at(item, key, at)
    return None


DRAFT = "https://json-schema.org/draft/2020-12/schema"
_FILE = r"(\.py:[A-Za-z_]|^[A-Z])[A-Za-z0-9_]*$"
"""A class with its file, or the name of a class in a file of `plugins`."""


def json_schema(schema: type, registry: Registry, title: str = "Forge recipe") -> dict[str, Any]:
    """Returns the JSON Schema of recipes with the dataclass `schema`; leaves out plugins that cannot be loaded."""
    maker = _Maker(registry)
    root = maker.section(schema)
    base = {"type": "string", "description": "The recipe that this one extends: a TOML file, relative to this one, or a preset."}
    doc = "Python files, relative to this one, whose classes may be named without their file."
    plugins = {"type": "array", "items": {"type": "string", "pattern": r"\.py$"}, "description": doc}
    root["properties"] = {"base": base, "plugins": plugins, **root["properties"]}
    return {"$schema": DRAFT, "title": title, **root, "$defs": dict(sorted(maker.definitions.items()))}


class _Maker:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.definitions: dict[str, dict[str, Any]] = {}

    def section(self, cls: type, names: list[str] | None = None) -> dict[str, Any]:
        """Returns the schema of a table; `names` are the names of a component."""
        properties: dict[str, Any] = {}
        if names is not None:
            properties["name"] = {"enum": names}
        for info in fields_of(cls):
            shape = shape_of(info.type)
            value = self.value(shape)
            doc = f"{info.doc} (At a resume: {info.key_class.value}.)".lstrip()
            value = {**value, "description": doc} if "$ref" not in value else {"allOf": [value], "description": doc}
            if shape.kind == "leaf" and not info.required:
                value["default"] = UNSET if info.default is None else written(info.default, shape.type)
            properties[info.name] = value
        doc = inspect.getdoc(cls) or ""
        return {"type": "object", "description": doc, "properties": properties, "additionalProperties": False}

    def value(self, shape: Shape) -> dict[str, Any]:
        made = self._value(shape)
        if shape.optional and shape.kind != "leaf":
            return {"anyOf": [made, {"const": UNSET}]}
        return made

    def _value(self, shape: Shape) -> dict[str, Any]:
        if shape.kind == "leaf":
            return self.leaf(shape.type)
        if shape.kind == "section":
            return self.section(shape.type)
        if shape.slot is not None:
            return self.slot(shape.slot)
        inner = shape.inner
        assert inner is not None
        if shape.kind == "dict":
            return self.dictionary(inner)
        item = self.value(inner)
        return {"type": "array", "items": {"allOf": [item], "required": ["name"]} if inner.slot else item}

    def dictionary(self, inner: Shape) -> dict[str, Any]:
        slot = inner.slot
        if slot is None or not slot.named_by_key:
            return {"type": "object", "additionalProperties": {"anyOf": [self.value(inner), {"const": UNSET}]}}
        known = {name: {"anyOf": [{"$ref": f"#/$defs/{key}"}, {"const": UNSET}]} for name, key in self.offered(slot).items()}
        other = {"anyOf": [{"allOf": [self.slot(slot)], "required": ["name"]}, {"const": UNSET}]}
        return {"type": "object", "properties": known, "additionalProperties": other}

    def slot(self, slot: Slot) -> dict[str, Any]:
        """Returns one alternative per registered component, and one for classes in files."""
        key = f"slot {slot.group}".replace(" ", "-")
        if key not in self.definitions:
            self.definitions[key] = {}  # a component may hold a slot of the same group
            choices = [{"$ref": f"#/$defs/{name}"} for name in dict.fromkeys(self.offered(slot).values())]
            file = {"type": "object", "properties": {"name": {"type": "string", "pattern": _FILE}}, "required": ["name"]}
            self.definitions[key] = {"anyOf": [*choices, file]}
        return {"$ref": f"#/$defs/{key}"}

    def offered(self, slot: Slot) -> Mapping[str, str]:
        """Returns the definition of each loadable component of a group, by name."""
        definitions: dict[str, str] = {}
        for name in self.registry.names(slot.group):
            key = f"{slot.group}.{name.replace(':', '.')}"
            try:
                entry = self.registry.find(slot.group, name)
                cls = self.registry.load_entry(entry)
            except PluginError:  # unused by the recipe; `plugins doctor` reports it
                continue
            if key not in self.definitions:
                self.definitions[key] = {}
                self.definitions[key] = self.section(cls, list(dict.fromkeys([name, entry.qualified])))
            definitions[name] = key
        return definitions

    def leaf(self, annotation: Any) -> dict[str, Any]:
        try:
            made = schema_of(annotation)
        except PydanticUserError:
            return {}
        definitions = made.pop("$defs", {})
        return _inline(made, definitions)


def _inline(node: Any, definitions: Mapping[str, Any]) -> Any:
    """Returns Pydantic's schema with local definitions inlined, without titles, and with the text for unset instead of null."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("$ref"), str):
        return _inline(definitions.get(node["$ref"].rpartition("/")[2], {}), definitions)
    if node.get("type") == "null":
        return {"const": UNSET}
    return {key: _inline(item, definitions) for key, item in node.items() if key != "title"}
