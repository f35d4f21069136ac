"""The tables of parts of this tree, read from the sources: what they promise, whatever is installed."""

import ast
from pathlib import Path


def parts_of(project: Path) -> dict[str, dict[str, str]]:
    """`{group: {name: target}}` of a distribution, from the literal in its module `parts`; empty if it has none."""
    file = project / "src" / project.name.replace("-", "_") / "parts.py"
    if not file.exists():
        return {}
    (value,) = (node.value for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign))
    return ast.literal_eval(value)
