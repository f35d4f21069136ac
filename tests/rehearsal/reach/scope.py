"""Lines that depend on the device: the statements of rooms for devices, and of functions that ask what kind of device there is.

A question is a comparison of a device's type with that of a CPU, or the use of something from a room. Functions inside of a
function that asks belong to it.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROOMS = ("forge_ckpt.format.tensor_bytes", "forge_data.accelerator", "forge_models.accelerator", "forge_parallel.accelerator")
HOSTS = ("'cpu'", "CPU.type", "HOSTS", "COLLECTIVES")
"""What a device's type is compared with, as it is written."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Line:
    """One statement.

    Attributes:
        module: that it is in.
        function: with its class, such as `Fast.load`.
        text: its first line, with a number where a function has several such lines.
    """

    module: str
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}: {self.text}"


def modules() -> dict[str, Path]:
    """Every module of Forge, by name."""
    files = [file for folder in ("packages", "apps") for file in ROOT.glob(f"{folder}/*/src/**/*.py")]
    sources = {file: next(up for up in file.parents if up.name == "src") for file in files}
    return {".".join(file.relative_to(source).with_suffix("").parts): file for file, source in sources.items()}


def functions(tree: ast.Module, module: str) -> Iterator[tuple[str, Function]]:
    """Those of a file whose lines are in the scope, with their names."""
    rooms = set(_rooms(tree))
    for name, node in _outermost(tree, ""):
        if module in ROOMS or any(_asks(inner, rooms) for inner in ast.walk(node)):
            yield name, node


def statements(node: Function) -> Iterator[ast.stmt]:
    """All that a call may run, those of inner functions included; a docstring runs nothing."""
    blocks = [node.body]
    for inner in ast.walk(node):
        if inner is not node:
            blocks += [block for _, block in ast.iter_fields(inner) if _is_block(block)]
    yield from (statement for block in blocks for statement in block if not _is_string(statement))


def lines(tree: ast.Module, text: str, module: str) -> Iterator[tuple[ast.stmt, Line]]:
    """The scope's statements of a file, which is given parsed and as it is written."""
    written = text.splitlines()
    for name, node in functions(tree, module):
        seen = Counter[str]()
        for statement in sorted(statements(node), key=lambda found: (found.lineno, found.col_offset)):
            said = written[statement.lineno - 1].strip()
            seen[said] += 1
            yield statement, Line(module, name, said if seen[said] == 1 else f"{said} ({seen[said]})")


@cache
def every_line() -> tuple[Line, ...]:
    """Of all modules, in the order of the files."""
    texts = {module: file.read_text() for module, file in sorted(modules().items())}
    return tuple(line for module, text in texts.items() for _, line in lines(ast.parse(text), text, module))


def _outermost(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, Function):
            yield prefix + inner.name, inner
        else:
            yield from _outermost(inner, f"{prefix}{inner.name}." if isinstance(inner, ast.ClassDef) else prefix)


def _rooms(tree: ast.Module) -> Iterator[str]:
    """Names under which a file knows rooms, or what is in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = node.module in ROOMS
            yield from (a.asname or a.name for a in node.names if inside or f"{node.module}.{a.name}" in ROOMS)


def _asks(node: ast.AST, rooms: set[str]) -> bool:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        types = any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)
        return types and any(ast.unparse(side).endswith(HOSTS) for side in sides)
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in rooms


def _is_block(found: object) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(item, ast.stmt) for item in found)


def _is_string(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    )
