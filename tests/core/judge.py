"""A small JSON Schema validator: the keywords that our schemas use; an unknown one is an error of the test."""

import re
from collections.abc import Callable
from typing import Any

TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
NOTES = {"$schema", "$defs", "title", "description", "default", "format"}


def accepts(schema: Any, value: Any, root: Any = None) -> bool:
    """Whether `value` is valid."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    unknown = set(schema) - set(RULES) - NOTES
    assert not unknown, f"keywords {unknown}"
    return all(rule(schema, value, root) for key, rule in RULES.items() if key in schema)


def number(test: Callable[[Any, Any], bool], key: str) -> Callable[[Any, Any, Any], bool]:
    return lambda schema, value, root: not TYPES["number"](value) or test(value, schema[key])


def members(schema: Any, value: Any, root: Any) -> bool:
    if not isinstance(value, dict):
        return True
    known = schema.get("properties", {})
    other = schema.get("additionalProperties", True)
    return all(accepts(known.get(key, other), item, root) for key, item in value.items())


def elements(schema: Any, value: Any, root: Any) -> bool:
    if not isinstance(value, list):
        return True
    first = schema.get("prefixItems", [])
    rest = schema.get("items", True)
    schemas = [*first, *([rest] * max(0, len(value) - len(first)))]
    return all(accepts(inner, item, root) for inner, item in zip(schemas, value, strict=False))


def reference(schema: Any, value: Any, root: Any) -> bool:
    return accepts(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root)


RULES: dict[str, Callable[[Any, Any, Any], bool]] = {
    "$ref": reference,
    "type": lambda schema, value, root: TYPES[schema["type"]](value),
    "enum": lambda schema, value, root: value in schema["enum"],
    "const": lambda schema, value, root: value == schema["const"],
    "anyOf": lambda schema, value, root: any(accepts(item, value, root) for item in schema["anyOf"]),
    "allOf": lambda schema, value, root: all(accepts(item, value, root) for item in schema["allOf"]),
    "properties": members,
    "additionalProperties": members,
    "items": elements,
    "prefixItems": elements,
    "required": lambda schema, value, root: not isinstance(value, dict) or set(schema["required"]) <= set(value),
    "pattern": lambda schema, value, root: not isinstance(value, str) or bool(re.search(schema["pattern"], value)),
    "minLength": lambda schema, value, root: not isinstance(value, str) or len(value) >= schema["minLength"],
    "maxLength": lambda schema, value, root: not isinstance(value, str) or len(value) <= schema["maxLength"],
    "minItems": lambda schema, value, root: not isinstance(value, list) or len(value) >= schema["minItems"],
    "maxItems": lambda schema, value, root: not isinstance(value, list) or len(value) <= schema["maxItems"],
    "minimum": number(lambda value, bound: value >= bound, "minimum"),
    "exclusiveMinimum": number(lambda value, bound: value > bound, "exclusiveMinimum"),
    "maximum": number(lambda value, bound: value <= bound, "maximum"),
    "exclusiveMaximum": number(lambda value, bound: value < bound, "exclusiveMaximum"),
    "multipleOf": number(lambda value, step: value % step == 0, "multipleOf"),
}
