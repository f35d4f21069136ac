"""A hook is its component: it has the keys and what it remembers of a run, and each run has its own."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from annotated_types import Gt

from core import sample
from forge_core.component import Component, fields_of
from forge_core.errors import BrokenPlugin
from forge_core.plugins import diagnose
from forge_core.protocols.run import Hook
from forge_core.registry import Registry


@dataclass(kw_only=True)
class Counts(Hook):
    """Counts steps."""

    every: Annotated[int, Gt(0)] = 1
    """Steps between two counts."""
    labels: list[str] = field(default_factory=list)
    """Names of what is counted."""
    seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.steps: list[int] = []

    def after_step(self, run: Any, result: Any) -> None:
        self.seen += 1
        self.steps.append(self.seen)


@dataclass(frozen=True, kw_only=True)
class Frozen(Hook):
    """A hook that cannot change."""


@dataclass(kw_only=True)
class Thawed(Component):
    """A component that can change."""

    def build(self) -> Hook:
        return Counts()


class Undecorated(Hook):
    """A hook whose author forgot the decorator."""

    every: int = 1
    """Steps between two looks."""


@dataclass(kw_only=True)
class Hides(Hook):
    """A hook with a key that is a method of hooks."""

    start: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]
    """First step."""


def hooks(*classes: type) -> Registry:
    return Registry([sample.entry("hooks", cls.__name__.lower(), f"{__name__}:{cls.__name__}") for cls in classes])


def test_each_run_has_a_hook_of_its_own() -> None:
    component = Counts(every=3, labels=["a"])
    first = component.build()
    for _ in range(2):
        first.after_step(None, None)
    second = component.build()
    assert [(hook.every, hook.labels, hook.seen, hook.steps) for hook in (component, first, second)] == [
        (3, ["a"], 0, []),
        (3, ["a"], 2, [1, 2]),
        (3, ["a"], 0, []),
    ]
    assert first.build().steps == []


def test_a_hook_that_changes_a_list_of_its_keys_changes_its_own() -> None:
    component = Counts(labels=["a"])
    component.build().labels.append("b")
    assert component.build().labels == component.labels == ["a"]


def test_what_a_hook_remembers_is_no_key() -> None:
    assert [info.name for info in fields_of(Counts)] == ["every", "labels"]
    assert not [report.problems for report in diagnose(hooks(Counts), conform=True) if report.problems]


@pytest.mark.parametrize(("cls", "fault"), [(Frozen, "frozen"), (Undecorated, "not a dataclass")])
def test_a_hook_that_is_frozen_or_no_dataclass_is_refused_with_the_right_decorator(cls: type, fault: str) -> None:
    name = cls.__name__.lower()
    with pytest.raises(BrokenPlugin, match=rf"hook '{name}' of sample 1\.0 .*is {fault}: decorate .*@dataclass\(kw_only=True\)"):
        hooks(cls).load("forge.hooks", name)


@pytest.mark.parametrize(
    ("cls", "words"),
    [(Thawed, "is not frozen: decorate it with @dataclass(frozen=True, kw_only=True)"), (Hides, "field 'start' hides a method")],
)
def test_a_component_that_can_change_and_a_key_that_hides_a_method_are_reported(cls: type, words: str) -> None:
    (report,) = diagnose(hooks(cls))
    assert words in " ".join(report.problems)
