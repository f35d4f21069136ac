"""The fronts of the distributions: packages from which users import, found by their call of `lazy_exports`.

`PYTHONPATH=tests python -m harness.fronts` writes their names and signatures into `tests/repository/public_names.txt`, and with
`--release 2.0.0` also into `public_names_released.txt`, with which later changes are compared.
"""

import ast
import sys
import textwrap
from collections.abc import Iterator
from enum import EnumType
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, get_origin

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = sorted(path.parent.name for place in ("packages", "apps") for path in ROOT.glob(f"{place}/*/pyproject.toml"))


def front_files() -> Iterator[tuple[str, Path]]:
    """Yields (dotted name, `__init__.py`) of every front, a package before its folders."""
    for name in DISTRIBUTIONS:
        (source,) = (path / "src" for place in ("packages", "apps") if (path := ROOT / place / name).is_dir())
        for file in sorted(source.rglob("__init__.py"), key=lambda file: (len(file.parts), file)):
            if "lazy_exports(" in file.read_text():
                yield ".".join(file.parent.relative_to(source).parts), file


FRONTS = dict(front_files())


def example_of(front: str) -> str:
    """Returns the code in the docstring of a front: its indented lines."""
    lines = (ast.get_docstring(ast.parse(FRONTS[front].read_text())) or "").splitlines()
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))


def described(value: Any) -> str:
    """Returns the signature of a public object as text that is the same for all versions of Python: names, kinds and defaults of
    parameters without annotations. Empty for protocols, and for classes that take the arguments of a class of another library."""
    if get_origin(value) is not None:
        return ": type"
    if isinstance(value, EnumType):
        return f" = {' | '.join(value.__members__)}"
    if isinstance(value, type):
        makers = [owner for owner in value.__mro__ if {"__init__", "__new__"} & vars(owner).keys()]
        if getattr(value, "_is_protocol", False) or not makers[0].__module__.startswith("forge_"):
            return ""
    elif not callable(value):
        return f": {type(value).__name__}"
    parameters = [
        parameter.replace(annotation=Parameter.empty, default=parameter.default if plain(parameter.default) else ...)
        for parameter in signature(value).parameters.values()
    ]
    return str(Signature(parameters)).replace("Ellipsis", "...")


def plain(value: Any) -> bool:
    """Whether the text of a default is the same everywhere."""
    if isinstance(value, tuple) and type(value) is tuple:
        return all(map(plain, value))
    return value is Parameter.empty or value is None or type(value) in (bool, int, float, str)


def public_names() -> str:
    """Returns every name of every front with its signature."""
    sections = []
    for front in sorted(FRONTS):
        module = import_module(front)
        names = sorted(module.__all__)
        sections.append("\n".join([f"[{front}]", *(name + described(getattr(module, name)) for name in names)]))
    return "\n\n".join(sections) + "\n"


RECORD = ROOT / "tests/repository/public_names.txt"
RELEASED = ROOT / "tests/repository/public_names_released.txt"
"""The record of the newest release, whose version is in its first line."""

if __name__ == "__main__":
    RECORD.write_text(public_names())
    if sys.argv[1:2] == ["--release"]:
        RELEASED.write_text(f"# {sys.argv[2]}\n\n{public_names()}")
