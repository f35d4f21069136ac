"""Whether parts keep the promises of their groups. One line in a plugin's tests:

    def test_my_plugin():
        conforms("forge-lionize")

The checks of a group are functions `check_<what>(component) -> None` that raise where a part does not conform. They live in
modules that the group `forge.conformance` registers; the name of such an entry is the group that it checks.
Neither the modules nor this one import torch before a check runs.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import isclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from forge_core.component import Component, fields_of, implementation_of, misfit
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
            or `checks` where one of these is missing, `implementation` where it does not fit the component's fields.
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
    if faults := implementation_faults(cls, GROUPS[entry.group].build or ()):
        return ConformanceResult(entry, (), tuple(Problem(entry, "implementation", fault) for fault in faults))
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


def implementation_faults(cls: type[Component], given: tuple[str, ...]) -> list[str]:
    """Why the implementation of a component does not fit; empty if it does, or if the component defines `build`.

    Its signature must take the group's arguments and every field, and a parameter's type must allow the values of its field.
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
    """The type that an annotation means; Any where it is missing or exists for type checkers only."""
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        return eval(annotation, names) if isinstance(annotation, str) else annotation  # noqa: S307 - code of the same module
    except NameError:
        return Any


def _allows(taken: Any, given: Any) -> bool:
    """Whether every value of the type `given` is one of the type `taken`; True where that cannot be known."""
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
