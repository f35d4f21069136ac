"""The JSON Schema (draft 2020-12) of a recipe, for editors: every component as an alternative by its `name`.

It accepts every recipe that Forge accepts and refuses most mistakes. Keys are never required, since a recipe may take
them from its base; only the items of an array, which replace the base's, must carry a `name`.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic.errors import PydanticUserError

from forge_core.component import Slot, fields_of
from forge_core.config.leaf import schema_of, written
from forge_core.config.shape import Shape, shape_of
from forge_core.config.tree import UNSET
from forge_core.errors import PluginError
from forge_core.registry import Registry

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_FILE = r"\.py:[A-Za-z_][A-Za-z0-9_]*$"


def json_schema(schema: type, registry: Registry, title: str = "Forge recipe") -> dict[str, Any]:
    """The schema of a recipe whose tree is the dataclass `schema`; plugins that cannot be loaded are left out."""
    maker = _Maker(registry)
    root = maker.section(schema)
    base = {"type": "string", "description": "A recipe below this one: a TOML file relative to this one, or a preset's name."}
    root["properties"] = {"base": base, **root["properties"]}
    return {"$schema": DRAFT, "title": title, **root, "$defs": dict(sorted(maker.definitions.items()))}


class _Maker:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.definitions: dict[str, dict[str, Any]] = {}

    def section(self, cls: type, names: list[str] | None = None) -> dict[str, Any]:
        """An object schema; `names` are those of a component."""
        properties: dict[str, Any] = {}
        if names is not None:
            properties["name"] = {"enum": names}
        for info in fields_of(cls):
            shape = shape_of(info.type)
            made = self.value(shape)
            doc = f"{info.doc} (At a resume: {info.key_class.value}.)".lstrip()
            made = {**made, "description": doc} if "$ref" not in made else {"allOf": [made], "description": doc}
            if shape.kind == "leaf" and not info.required:
                made["default"] = UNSET if info.default is None else written(info.default, shape.type)
            properties[info.name] = made
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
        """One alternative per registered component, and any class in a file."""
        key = f"slot {slot.group}".replace(" ", "-")
        if key not in self.definitions:
            self.definitions[key] = {}  # a component may hold a slot of the same group
            choices = [{"$ref": f"#/$defs/{name}"} for name in dict.fromkeys(self.offered(slot).values())]
            file = {"type": "object", "properties": {"name": {"type": "string", "pattern": _FILE}}, "required": ["name"]}
            self.definitions[key] = {"anyOf": [*choices, file]}
        return {"$ref": f"#/$defs/{key}"}

    def offered(self, slot: Slot) -> Mapping[str, str]:
        """Name -> definition of each component of a group that can be loaded."""
        found: dict[str, str] = {}
        for name in self.registry.names(slot.group):
            key = f"{slot.group}.{name.replace(':', '.')}"
            try:
                entry = self.registry.find(slot.group, name)
                cls = self.registry.load_entry(entry)
            except PluginError:  # `plugins doctor` reports it; the recipe does not use it
                continue
            if key not in self.definitions:
                self.definitions[key] = {}
                self.definitions[key] = self.section(cls, list(dict.fromkeys([name, entry.qualified])))
            found[name] = key
        return found

    def leaf(self, annotation: Any) -> dict[str, Any]:
        try:
            made = schema_of(annotation)
        except PydanticUserError:
            return {}
        definitions = made.pop("$defs", {})
        return _inline(made, definitions)


def _inline(node: Any, definitions: Mapping[str, Any]) -> Any:
    """Pydantic's schema with its local definitions put in place, its titles dropped and null written as TOML can."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("$ref"), str):
        return _inline(definitions.get(node["$ref"].rpartition("/")[2], {}), definitions)
    if node.get("type") == "null":
        return {"const": UNSET}
    return {key: _inline(item, definitions) for key, item in node.items() if key != "title"}
