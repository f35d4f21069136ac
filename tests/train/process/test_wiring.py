"""How a start connects the parts of a run: by plain data and objects, never by functions that are stored in fields."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import forge_train.run as package
from forge_train.run.checkpoints import Checkpoints, RunContent
from forge_train.run.health import Health
from forge_train.run.run import Run
from forge_train.run.saves import Saves
from forge_train.run.training import Clock, Requests, State

FILES = sorted(Path(package.__file__).parent.glob("*.py"))
PARTS = (Run, Saves, Health, Checkpoints, RunContent, Requests, Clock, State)


def nested_functions(tree: ast.Module) -> Iterator[str]:
    """Names of functions inside of functions; generators of context managers with one inside are listed too."""
    for outer in ast.walk(tree):
        if isinstance(outer, ast.FunctionDef):
            yield from (inner.name for inner in ast.walk(outer) if isinstance(inner, ast.FunctionDef) and inner is not outer)


def stored_functions(tree: ast.Module) -> Iterator[str]:
    """Attributes of other objects that are set to a function: a lambda, or a name that the file defines as a function."""
    methods = {node for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef) for node in kind.body}
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node not in methods}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for target in node.targets:
            for place in target.elts if isinstance(target, ast.Tuple) else [target]:
                of_another = isinstance(place, ast.Attribute) and not (
                    isinstance(place.value, ast.Name) and place.value.id == "self"
                )
                if of_another and any(
                    isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions) for value in values
                ):
                    yield ast.unparse(place)


def test_the_parts_of_a_run_hold_no_functions() -> None:
    held = {f"{part.__name__}.{item.name}": str(item.type) for part in PARTS for item in fields(part)}
    assert [name for name, kind in held.items() if "Callable" in kind] == []
    assert len(fields(Run)) <= 18


def test_nothing_is_connected_by_functions_that_are_set_afterwards() -> None:
    trees = {path.name: ast.parse(path.read_text()) for path in FILES}
    assert {name: found for name, tree in trees.items() if (found := list(stored_functions(tree)))} == {}
    # What is left: the function that `periodic_gc` gives to the loop, and a read on rank 0 for all.
    closures = {name: found for name, tree in trees.items() if (found := list(nested_functions(tree)))}
    assert closures == {"loop.py": ["collect"], "micro_batch.py": ["read"]}


def test_the_checks_see_what_they_forbid() -> None:
    tree = ast.parse("def f(run):\n    def g(): pass\n    run.save, run.x = lambda: 1, 2\n    run.check = g\n    self.a = g\n")
    assert list(stored_functions(tree)) == ["run.save", "run.x", "run.check"]
    assert list(nested_functions(tree)) == ["g"]
