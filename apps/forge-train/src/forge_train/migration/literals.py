"""Reads Python configurations with `ast`: literal values only, never by running the file.

Numbers may be computed from numbers and from names that the file has set before (`5 * 8`). Everything else is `Unread`.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from forge_train.migration.engine import SourceSetting, Unread

LARGEST = 10**30
"""Largest magnitude of a computed number: a file must not make the reader compute for long."""

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
    }
)


class NotLiteral(Exception):
    """An expression has no literal value."""


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Returns the value of an expression of literals, names of literals, and arithmetic of numbers.

    Raises:
        NotLiteral: the expression would need to be executed.
    """
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [value_of(item, names) for item in items]
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            pairs = [
                (value_of(key, names), value_of(item, names)) for key, item in zip(keys, values, strict=True) if key is not None
            ]
            if all(isinstance(key, str) for key, _ in pairs):
                return dict(pairs)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = value_of(operand, names)
            if _is_number(number):
                return -number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            one, two = value_of(left, names), value_of(right, names)
            if _is_number(one) and _is_number(two):
                return _computed(_BINARY[type(op)], one, two)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = value_of(left, names), value_of(right, names)
            if _is_number(base) and isinstance(exponent, int) and abs(base) <= 1024 and abs(exponent) <= 100:
                return _computed(operator.pow, base, exponent)
        case _:
            pass
    raise NotLiteral(ast.unparse(node))


def _computed(function: Callable[[Any, Any], Any], one: Any, two: Any) -> Any:
    try:
        result = function(one, two)
    except (ArithmeticError, ValueError) as error:
        raise NotLiteral(str(error)) from error
    if not _is_number(result) or abs(result) > LARGEST:
        raise NotLiteral("the number is too large")
    return result


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def unread(node: ast.AST, why: str) -> Unread:
    """Returns a part of a file that is not read."""
    text = " ".join(ast.unparse(node).split())
    return Unread(text if len(text) <= 80 else f"{text[:77]}...", getattr(node, "lineno", None), why)


CODE = "is code, which is not executed; set the value in the recipe yourself"
NOT_LITERAL = "is not a literal value, and code is not executed; set the value in the recipe yourself"


def assignments(module: ast.Module) -> tuple[dict[str, SourceSetting], list[Unread]]:
    """Reads assignments of literals at the top of a file, in their order; the last one counts.

    Imports, docstrings and `if __name__ == "__main__"` are no settings. Other statements are not read.
    """
    settings: dict[str, SourceSetting] = {}
    rest: list[Unread] = []
    names: dict[str, Any] = {}
    for node in module.body:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(value=ast.Constant()):
                continue
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                try:
                    names[name] = value_of(value, names)
                    settings[name] = SourceSetting(names[name], node.lineno)
                except NotLiteral:
                    rest.append(unread(node, NOT_LITERAL))
                    names.pop(name, None)
                    settings.pop(name, None)
            case _:
                rest.append(unread(node, CODE))
                for name in _assigned(node):  # its value may differ from what was read
                    if name in settings:
                        del settings[name], names[name]
                        rest.append(Unread(name, node.lineno, "may be changed by code that is not executed; set it yourself"))
    return settings, rest


def _assigned(node: ast.AST) -> Iterator[str]:
    """Yields names that a statement may assign, each once."""
    inner = (item for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store | ast.Del))
    yield from dict.fromkeys(item.id for item in inner)


def callee(node: ast.expr) -> str:
    """Returns the dotted name that a call calls, or "" for anything else."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) else ""
