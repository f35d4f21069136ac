"""Whether parts keep the promises of their groups. One line in a plugin's tests:

    def test_my_plugin():
        conforms("forge-lionize")

The checks of a group are functions `check_<what>(component) -> None` that raise where a part does not conform. They live in
modules that entry points of the group `forge.conformance` name; the name of such an entry point is the group that it checks.
Neither the modules nor this one import torch before a check runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import isclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

from forge_core.component import Component
from forge_core.errors import BrokenPlugin, ForgeError, UnknownComponent
from forge_core.plugins import flaws
from forge_core.registry import GROUPS, HOMES, Entry, Registry, canonical
from forge_core.trust import trust_name

GROUP = "forge.conformance"

Check = Callable[[Any], None]


class Problem(NamedTuple):
    """What is wrong with one part.

    Attributes:
        check: name of the function that found it; `description` for what every component must say about itself, `examples`
            or `checks` where one of these is missing.
    """

    entry: Entry
    check: str
    message: str

    def __str__(self) -> str:
        return f"{self.entry.group} {self.entry.qualified}: {self.check}: {self.message}"


@dataclass(frozen=True)
class ConformanceResult:
    """What the checks say of one part.

    Attributes:
        passed: names of the checks that all examples passed.
        problems: one for each check that an example failed.
    """

    entry: Entry
    passed: tuple[str, ...]
    problems: tuple[Problem, ...]

    def as_json(self) -> dict[str, Any]:
        return {"passed": list(self.passed), "failed": {problem.check: problem.message for problem in self.problems}}

    def lines(self) -> list[str]:
        """For people: each problem, or how many checks passed."""
        if self.problems:
            return [str(problem) for problem in self.problems]
        count = len(self.passed)
        said = f"{count} check{'s' if count > 1 else ''} passed" if count else "no checks"
        return [f"{self.entry.group} {self.entry.qualified}: {said}"]


def checks_in(module: ModuleType) -> dict[str, Check]:
    """The checks of a module by name, in the order in which they are written."""
    found: dict[str, Any] = vars(module)
    return {name: found[name] for name in found if name.startswith("check_") and callable(found[name])}


def checks_of(registry: Registry, group: str) -> list[tuple[str, Check]]:
    """(name, check) of a group, of all distributions that bring some. Those of another distribution than Forge that cannot be
    loaded are left out, which is a problem of theirs.

    Raises:
        BrokenPlugin: a module of Forge's checks cannot be loaded.
    """
    found: list[tuple[str, Check]] = []
    for entry in registry.of(GROUP):
        try:
            found += checks_in(registry.load_entry(entry)).items() if entry.name == group else ()
        except BrokenPlugin:
            if entry.is_forge:
                raise
    return found


def examine(entry: Entry, registry: Registry) -> ConformanceResult:
    """Runs the checks of a part's group on each of its examples. A part that cannot be loaded raises BrokenPlugin."""
    checks = checks_of(registry, entry.group)
    cls = registry.load_entry(entry)
    if not (isclass(cls) and issubclass(cls, Component)):
        return ConformanceResult(entry, (), ())
    if not checks:
        return ConformanceResult(entry, (), tuple(_absent(entry, registry)))
    with TemporaryDirectory(prefix="forge-conformance-") as folder:
        try:
            examples = list(cls.examples(Path(folder)))
        except Exception as error:  # noqa: BLE001 - a part may raise anything
            needed = "has required keys and no default for them; " if isinstance(error, TypeError) else ""
            why = f"{needed}give its class a method examples(cls, folder): {_described(error)}"
            return ConformanceResult(entry, (), (Problem(entry, "examples", why),))
        if not examples:
            return ConformanceResult(entry, (), (Problem(entry, "examples", "gives no example, so nothing was checked"),))
        found = [(name, _failure(check, examples)) for name, check in checks]
    failed = tuple(Problem(entry, name, message) for name, message in found if message is not None)
    return ConformanceResult(entry, tuple(name for name, message in found if message is None), failed)


def problems(registry: Registry, distribution: str | None = None, group: str | None = None) -> list[Problem]:
    """What is wrong with the registered parts: with what they say about themselves, and what the checks of their groups find.

    Args:
        registry: the parts, and the checks.
        distribution: only parts of this one.
        group: only parts of this group, such as `forge.optimizers`.
    """
    chosen = [
        entry
        for name in (GROUPS if group is None else (group,))
        for entry in registry.of(name)
        if distribution is None or canonical(entry.distribution) == canonical(distribution)
    ]
    return [problem for entry in chosen for problem in problems_of(entry, registry)]


def problems_of(entry: Entry, registry: Registry) -> Iterator[Problem]:
    """What is wrong with one part."""
    said = flaws(entry, registry, conform=True)
    yield from (Problem(entry, "description", message) for message in said.messages)
    if said.loads:
        yield from examine(entry, registry).problems


def conforms(name: str, group: str | None = None) -> None:
    """For a test: raises where a distribution's parts do not conform.

    Args:
        name: of the distribution; with a group also `mine.py:Thing`, a class in a file.
        group: only parts of this group.

    Raises:
        AssertionError: lists every problem.
        UnknownComponent: the distribution offers nothing, so nothing would have been checked.
    """
    registry = Registry()
    if group is not None and ".py:" in name:
        trust_name(name)
        found = list(problems_of(registry.find(group, name), registry))
    else:
        if not any(canonical(entry.distribution) == canonical(name) for entry in registry.entries):
            raise UnknownComponent(f"distribution {name!r} is not installed or offers no plugin; install it, then test")
        found = problems(registry, name, group)
    if found:
        raise AssertionError("\n".join(["parts do not conform:", *map(str, found)]))


def _absent(entry: Entry, registry: Registry) -> Iterator[Problem]:
    """A group's checks come with the distribution that has the group: without it a test would pass and have checked nothing."""
    homes = [home for home, groups in HOMES.items() if entry.group in groups]
    if homes and not any(canonical(other.distribution) in homes for other in registry.entries):
        yield Problem(entry, "checks", f"the checks of {entry.group} are not installed: pip install {homes[0]}")


def _failure(check: Check, examples: list[Any]) -> str | None:
    """Why the first example that fails does; None when all pass."""
    for example in examples:
        try:
            check(example)
        except Exception as error:  # noqa: BLE001 - a part may raise anything
            return _described(error) + (f" ({example})" if len(examples) > 1 else "")
    return None


def _described(error: Exception) -> str:
    if isinstance(error, AssertionError | ForgeError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
