"""Checks that components conform to their groups. One line in a plugin's tests:

    def test_my_plugin():
        conforms("forge-lionize")

The checks of a group are functions `check_<what>(component) -> None` that raise if a component does not conform. They are static
methods of a class, or functions of a module, registered in the group `forge.conformance` under the name of the group that they
check. Forge's own checks are in the distribution forge-testing. This module does not import torch.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import isclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from forge_core.component import Component, fields_of, implementation_of, misfit
from forge_core.errors import BrokenPlugin, ForgeError, UnknownComponent
from forge_core.plugins import flaws
from forge_core.registry import GROUPS, HOMES, Entry, Registry, canonical
from forge_core.trust import trust_name

GROUP = "forge.conformance"

CHECKS = "forge-testing"
"""The distribution with Forge's own checks."""

Check = Callable[[Any], None]


class Problem(NamedTuple):
    """One failure of a component.

    Attributes:
        check: name of the check that failed; `description` for a fault in the component's keys or docstrings, `examples` or
            `checks` if these are missing, `implementation` if it does not match the component's fields.
    """

    entry: Entry
    check: str
    message: str

    def __str__(self) -> str:
        return f"{self.entry.group} {self.entry.qualified}: {self.check}: {self.message}"


@dataclass(frozen=True)
class ConformanceResult:
    """Result of the checks of one component.

    Attributes:
        passed: names of the checks that all examples passed.
        problems: one problem per failed check.
    """

    entry: Entry
    passed: tuple[str, ...]
    problems: tuple[Problem, ...]

    def as_json(self) -> dict[str, Any]:
        return {"passed": list(self.passed), "failed": {problem.check: problem.message for problem in self.problems}}

    def lines(self) -> list[str]:
        """Returns lines for a terminal: each problem, or the number of passed checks."""
        if self.problems:
            return [str(problem) for problem in self.problems]
        count = len(self.passed)
        said = f"{count} check{'s' if count > 1 else ''} passed" if count else "no checks"
        return [f"{self.entry.group} {self.entry.qualified}: {said}"]


def checks_in(holder: Any) -> dict[str, Check]:
    """Returns the checks of a class or module by name, in source order."""
    names = [name for name in vars(holder) if name.startswith("check_")]
    return {name: getattr(holder, name) for name in names if callable(getattr(holder, name))}


def checks_of(registry: Registry, group: str) -> list[tuple[str, Check]]:
    """Returns (name, check) of all checks of a group, from all distributions. Skips checks of other distributions than Forge's
    that cannot be loaded.

    Raises:
        BrokenPlugin: checks of Forge cannot be loaded.
    """
    checks: list[tuple[str, Check]] = []
    for entry in registry.of(GROUP):
        try:
            checks += checks_in(registry.load_entry(entry)).items() if entry.name == group else ()
        except BrokenPlugin:
            if entry.is_forge:
                raise
    return checks


def examine(entry: Entry, registry: Registry) -> ConformanceResult:
    """Runs the checks of a component's group on each of its examples.

    Raises:
        BrokenPlugin: the component cannot be loaded.
    """
    cls = registry.load_entry(entry)
    if not (isclass(cls) and issubclass(cls, Component)):
        return ConformanceResult(entry, (), ())
    if faults := implementation_faults(cls, GROUPS[entry.group].build or ()):
        return ConformanceResult(entry, (), tuple(Problem(entry, "implementation", fault) for fault in faults))
    if missing := _missing(entry.group, registry):
        fault = f"the checks of {entry.group} are not installed: pip install {missing}"
        return ConformanceResult(entry, (), (Problem(entry, "checks", fault),))
    checks = checks_of(registry, entry.group)
    if not checks:
        return ConformanceResult(entry, (), ())
    with TemporaryDirectory(prefix="forge-conformance-") as folder:
        try:
            examples = list(cls.examples(Path(folder)))
        except Exception as error:  # noqa: BLE001 - a component may raise anything
            needed = "has required keys; " if isinstance(error, TypeError) else ""
            why = f"{needed}add a method examples(cls, folder) to the class: {_described(error)}"
            return ConformanceResult(entry, (), (Problem(entry, "examples", why),))
        if not examples:
            return ConformanceResult(entry, (), (Problem(entry, "examples", "returns no example, so nothing was checked"),))
        results = [(name, _failure(check, examples)) for name, check in checks]
    failed = tuple(Problem(entry, name, message) for name, message in results if message is not None)
    return ConformanceResult(entry, tuple(name for name, message in results if message is None), failed)


def implementation_faults(cls: type[Component], given: tuple[str, ...]) -> list[str]:
    """Returns why the implementation of a component does not fit; empty if it does, or if the component defines `build`.

    Its signature must accept the group's arguments and every field, and a parameter's type must allow all values of its field.
    Types that exist for type checkers only are not compared.

    Args:
        given: names of the arguments of the component's group.
    """
    if cls.implementation is None or cls.build is not Component.build:
        return []
    try:
        implementation = implementation_of(cls)
    except (BrokenPlugin, ImportError) as error:
        return [_described(error)]
    if why := misfit(cls, implementation, given):
        return [why]
    try:
        parameters = inspect.signature(implementation).parameters
    except (NameError, ValueError):
        return []
    names = vars(inspect.getmodule(implementation) or inspect)
    fields = {info.name: info.type for info in fields_of(cls)}
    return [
        f"field {name!r} is {fields[name]}, and {cls.implementation} takes {parameters[name].annotation}"
        for name in cls.passed()
        if name in parameters and name in fields and not _allows(_resolved(parameters[name].annotation, names), fields[name])
    ]


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    """Returns the type of an annotation; Any if it is missing or exists for type checkers only."""
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        return eval(annotation, names) if isinstance(annotation, str) else annotation  # noqa: S307 - code of the same module
    except NameError:
        return Any


def _allows(taken: Any, given: Any) -> bool:
    """Whether every value of type `given` is also of type `taken`; True if unknown."""
    taken, given = (get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in (taken, given))
    if get_origin(given) in (Union, UnionType):
        return all(_allows(taken, kind) for kind in get_args(given))
    if get_origin(taken) in (Union, UnionType):
        return any(_allows(kind, given) for kind in get_args(taken))
    if get_origin(given) is Literal:
        if get_origin(taken) is Literal:
            return set(get_args(given)) <= set(get_args(taken))
        return all(_allows(taken, type(value)) for value in get_args(given))
    wide, narrow = (get_origin(kind) or (type(None) if kind is None else kind) for kind in (taken, given))
    if not isclass(wide) or not isclass(narrow) or wide in (Any, object) or issubclass(narrow, Component):
        return wide is not Literal
    if not issubclass(narrow, wide) and not (narrow is int and wide is float):
        return False
    parts, others = get_args(taken), get_args(given)
    return len(parts) != len(others) or all(map(_allows, parts, others))


def problems(registry: Registry, distribution: str | None = None, group: str | None = None) -> list[Problem]:
    """Returns the problems of registered components: faults in their keys and docstrings, and failed checks.

    A class with several names in a group is checked under the first of them.

    Args:
        registry: registry with the components and the checks.
        distribution: only components of this distribution.
        group: only components of this group, such as `forge.optimizers`.
    """
    chosen = [
        entry
        for name in (GROUPS if group is None else (group,))
        for entry in registry.of(name)
        if distribution is None or canonical(entry.distribution) == canonical(distribution)
    ]
    return _problems_of(chosen, registry)


def _problems_of(entries: Iterable[Entry], registry: Registry) -> list[Problem]:
    first: dict[tuple[str, Any], Entry] = {}
    found: list[Problem] = []
    for entry in entries:
        faults = flaws(entry, registry, conform=True)
        found += [Problem(entry, "description", message) for message in faults.messages]
        if faults.loads and first.setdefault((entry.group, registry.load_entry(entry)), entry) is entry:
            found += examine(entry, registry).problems
    return found


def conforms(name: str, group: str | None = None) -> None:
    """Asserts in a test that the components of a distribution conform.

    Args:
        name: name of the distribution; with a group also `mine.py:Thing`, a class in a file.
        group: only components of this group.

    Raises:
        AssertionError: a component does not conform; the message lists every problem.
        UnknownComponent: the distribution registers no component, so nothing would be checked.
    """
    registry = Registry()
    if group is not None and ".py:" in name:
        trust_name(name)
        faults = _problems_of([registry.find(group, name)], registry)
    else:
        if not any(canonical(entry.distribution) == canonical(name) for entry in registry.entries):
            raise UnknownComponent(f"distribution {name!r} is not installed or has no plugins; install it, then test")
        faults = problems(registry, name, group)
    if faults:
        raise AssertionError("\n".join(["components do not conform:", *map(str, faults)]))


def _missing(group: str, registry: Registry) -> str:
    """Returns the distributions of Forge that the checks of a group need and that are not installed, since a test would pass
    without checking; empty if there is none, or if the group is not Forge's."""
    home = next((home for home, groups in HOMES.items() if group in groups), None)
    installed = {canonical(entry.distribution) for entry in registry.entries}
    return "" if home is None else " ".join(name for name in (home, CHECKS) if name not in installed)


def _failure(check: Check, examples: list[Any]) -> str | None:
    """Returns why the first failing example fails; None if all pass."""
    for example in examples:
        try:
            check(example)
        except Exception as error:  # noqa: BLE001 - a component may raise anything
            return _described(error) + (f" ({example})" if len(examples) > 1 else "")
    return None


def _described(error: Exception) -> str:
    if isinstance(error, AssertionError | ForgeError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
