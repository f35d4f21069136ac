"""The fronts of the distributions: packages from which users import, found by their call of `lazy_exports`."""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

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
