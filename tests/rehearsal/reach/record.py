"""Marks, in a process with devices, the lines of the scope that were run: each is written down when it is first run.

Modules are compiled with a call before each of those statements, so every thread counts, those of autograd, too, and what is not
in the scope costs nothing. The compiler of `torch.compile` would see the calls; processes with one are not marked.
"""

import ast
import os
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from rehearsal.reach.scope import Line, lines

DIRECTORY = "FORGE_REHEARSAL_REACHED"
"""The environment variable with the folder that processes write to, a file each; where it is not set, nothing is marked."""

_CALL = "__forge_line_was_run__"


class Marking(MetaPathFinder):
    """Finds modules of Forge as Python does, and has their lines marked.

    Args:
        directory: for the file of this process.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of modules of Forge only."""
        if not name.startswith("forge_"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(name, spec.loader.path, self.write)
        return spec

    def write(self, line: Line) -> None:
        """One line, whole, also where several threads write and where the process ends without a word."""
        file = os.open(self.directory / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{line}\n".encode())
        os.close(file)


class Loader(SourceFileLoader):
    """Loads a module with its lines marked, never from what Python keeps compiled.

    Args:
        fullname: of the module.
        path: of its file.
        write: gets each line of the scope when it is first run.
    """

    def __init__(self, fullname: str, path: str, write: Callable[[Line], None]) -> None:
        super().__init__(fullname, path)
        self.write = write
        self.tree, self.lines = marked(Path(path).read_text(), fullname)

    def get_code(self, fullname: str) -> CodeType:
        """Of the marked file."""
        return compile(self.tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Runs it."""
        told: set[int] = set()

        def was_run(number: int) -> None:
            if number not in told:
                told.add(number)
                self.write(self.lines[number])

        module.__dict__[_CALL] = was_run
        super().exec_module(module)


def marked(text: str, module: str) -> tuple[ast.Module, list[Line]]:
    """The file with a call before each statement of the scope, and the lines by the numbers in those calls."""
    tree = ast.parse(text)
    numbers = {statement: number for number, (statement, _) in enumerate(lines(tree, text, module))}
    found = [line for _, line in lines(tree, text, module)]
    for node in ast.walk(tree):
        for field, block in ast.iter_fields(node):
            if isinstance(block, list) and any(statement in numbers for statement in block):
                setattr(node, field, [made for statement in block for made in _with_call(statement, numbers.get(statement))])
    return tree, found


def _with_call(statement: ast.stmt, number: int | None) -> list[ast.stmt]:
    if number is None:
        return [statement]
    call = ast.parse(f"{_CALL}({number})").body[0]
    for node in ast.walk(call):
        ast.copy_location(node, statement)
    return [call, statement]
