"""Forge's own parts conform, and each check has a part that fails it: a check that cannot fail says nothing."""

import importlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forge_core.conformance import GROUP, Check, checks_in, implementation_faults, problems
from forge_core.errors import ForgeError
from forge_core.registry import GROUPS, Registry

REGISTRY = Registry()
CHECKED = [entry.name for entry in REGISTRY.of(GROUP) if entry.distribution.startswith("forge-")]
CHECKS = [
    (entry.name, name, check)
    for entry in REGISTRY.of(GROUP)
    if entry.distribution.startswith("forge-")
    for name, check in checks_in(REGISTRY.load_entry(entry)).items()
]


def bad(group: str) -> dict[str, list[tuple[Any, str]]]:
    """check -> (part that fails it, what its message has to say)."""
    return importlib.import_module(f"conformance.bad.{group.removeprefix('forge.')}").BAD


@pytest.mark.parametrize("group", CHECKED)
def test_our_parts_conform(group: str) -> None:
    assert group in GROUPS
    names = {entry.distribution for entry in REGISTRY.of(group)} & {path.name for path in projects()}
    assert names, "there is something to check"
    found = [str(problem) for name in sorted(names) for problem in problems(REGISTRY, name, group)]
    if find_spec("mlflow") is None:  # tests/train/hooks/test_mlflow.py runs the checks with a stand-in
        found = [problem for problem in found if 'pip install "forge-train[mlflow]"' not in problem]
    if group == "forge.pipeline_schedules":  # an old torch refuses schedules that split the backward, whatever the numbers
        schedules = {entry.name: REGISTRY.load_entry(entry)().build() for entry in REGISTRY.of(group)}
        refused = {name for name, schedule in schedules.items() if "update torch" in (schedule.refusal(2, 4) or "")}
        assert not refused or version("torch") < "2.13", "a torch with which they are proven"
        found = [problem for problem in found if not any(f":{name}: " in problem for name in refused)]
    assert found == []


def test_every_implementation_takes_the_arguments_of_its_group_and_the_fields_of_its_component() -> None:
    components = [entry for entry in REGISTRY.entries if GROUPS[entry.group].build is not None]
    faults = {
        entry.qualified: implementation_faults(REGISTRY.load_entry(entry), GROUPS[entry.group].build or ())
        for entry in components
        if entry.is_forge
    }
    assert {name: found for name, found in faults.items() if found} == {}
    assert len(faults) > 90


def test_every_group_of_components_has_checks() -> None:
    ours = {path.name for path in projects()}
    offered = {entry.group for entry in REGISTRY.entries if entry.distribution in ours}
    assert {name for name in offered & set(GROUPS) if GROUPS[name].build is not None} == set(CHECKED)


def projects() -> list[Path]:
    root = Path(__file__).parents[2]
    return [path.parent for folder in ("packages", "apps") for path in root.glob(f"{folder}/*/pyproject.toml")]


@pytest.mark.parametrize(("group", "name", "check"), CHECKS, ids=[f"{group}-{name}" for group, name, _ in CHECKS])
def test_every_check_can_fail(group: str, name: str, check: Check) -> None:
    examples = bad(group).get(name, [])
    assert examples, f"{group} {name} has no part that fails it"
    for part, why in examples:
        with pytest.raises((AssertionError, ForgeError), match=why):
            check(part)


@pytest.mark.parametrize("group", CHECKED)
def test_every_bad_part_is_of_a_check(group: str) -> None:
    assert set(bad(group)) <= {name for its, name, _ in CHECKS if its == group}
