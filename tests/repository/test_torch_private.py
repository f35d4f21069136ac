"""Names that torch does not promise to keep stand in one file a package, `torch_private.py`: each with why, and a test."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {path.name: path for path in sorted(ROOT.glob("*/*/src/*")) if path.is_dir()}
OTHERS = {
    **dict.fromkeys((f"forge_models/hf/{name}.py" for name in ("causal_lm", "causal_lm_anatomy", "converter")), "transformers"),
    "forge_data/tokenizers/tiktoken.py": "tiktoken",
}
"""Files about one other library, of which they read what it has no public name for."""

MODULE = frozenset({"_parameters", "_buffers", "_modules"})
"""What every `nn.Module` has had from the first version on, and what modules of others rely on."""
PYTHON = frozenset({"_replace", "_asdict", "_fields", "_make", "_exit", "_current_frames"})
"""Of named tuples, `os` and `sys`."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: Iterable[ast.AST]) -> set[str]:
    """Private names that a package gives itself: functions, classes, variables, and attributes that it sets."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                found.add(node.attr)
            elif (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "object.__setattr__"
                and ast.unparse(node.args[0]) == "self"
            ):
                found.add(ast.literal_eval(node.args[1]))
    return found


def strangers(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names of torch in one file: in imports, and as attributes of what is not the package's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("torch") and "._" in alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in names if any(private(word) for word in name.split(".")))
        elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own | MODULE | PYTHON:
            yield f"{ast.unparse(node.value)}.{node.attr}"


@pytest.mark.parametrize("package", SOURCES)
def test_private_names_of_torch_stand_in_one_file(package: str) -> None:
    folder = SOURCES[package]
    trees = {str(file.relative_to(folder.parent)): ast.parse(file.read_text()) for file in sorted(folder.rglob("*.py"))}
    own = own_names(trees.values())
    found = {file: sorted(set(strangers(tree, own))) for file, tree in trees.items() if not file.endswith("/torch_private.py")}
    named = {file: names for file, names in found.items() if names}
    assert {file: names for file, names in named.items() if file not in OTHERS} == {}
    assert {file for file in OTHERS if file.startswith(f"{package}/")} <= named.keys(), "one that no longer does leaves the list"


def test_the_walk_finds_them_in_imports_and_on_objects() -> None:
    text = "import torch._guards\nfrom torch.utils._pytree import tree_map\nfrom torch.x import _y\nz = tensor._local_tensor\n"
    assert set(strangers(ast.parse(text), set())) == {
        "torch._guards",
        "torch.utils._pytree.tree_map",
        "torch.x._y",
        "tensor._local_tensor",
    }
    fine = "from torch import nn\nself._mine = module._parameters\nother._mine()\n"
    assert list(strangers(ast.parse(fine), own_names([ast.parse(fine)]))) == []
