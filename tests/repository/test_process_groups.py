"""Where Forge opens groups, those of gloo get one thread: with torch's two their heap breaks (docs/adr/0036)."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

OPENING = frozenset(
    {"init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "init_device_mesh"}
)
"""What makes groups: of torch's functions, and of its classes."""

OTHERS = {
    "forge_parallel/dryrun/fake_world.py": "its groups move nothing",
    "forge_ckpt/world.py": "depends on no other package, and gathers with the plain functions, whose names are short",
    "forge_train/doctor/correctness.py": "calls the plain functions",
}
"""Files that need none, and why."""


def opened(tree: ast.AST, inside: bool = False) -> Iterator[tuple[int, bool]]:
    """Lines that open groups, and whether that is inside `with one_gloo_thread()`."""
    if isinstance(tree, ast.With):
        inside = inside or any(ast.unparse(item.context_expr) == "one_gloo_thread()" for item in tree.items)
    if isinstance(tree, ast.Call) and ast.unparse(tree.func).rpartition(".")[2] in OPENING:
        yield tree.lineno, inside
    for child in ast.iter_child_nodes(tree):
        yield from opened(child, inside)


def test_groups_are_opened_with_one_thread() -> None:
    found = {
        str(file.relative_to(package)): list(opened(ast.parse(file.read_text())))
        for package in sorted(ROOT.glob("*/*/src"))
        for file in sorted(package.rglob("*.py"))
    }
    without = {file: [line for line, inside in lines if not inside] for file, lines in found.items()}
    assert {file: lines for file, lines in without.items() if lines and file not in OTHERS} == {}
    assert all(without[file] for file in OTHERS), "one that no longer opens any leaves the list"
    assert sum(inside for lines in found.values() for _, inside in lines) >= 6


def test_the_walk_sees_calls_in_and_out() -> None:
    text = "with one_gloo_thread(), other():\n    if x:\n        dist.new_group()\nmesh = init_device_mesh('cpu', (2,))\n"
    assert list(opened(ast.parse(text))) == [(3, True), (4, False)]
