"""Components: one that names its implementation, when that is imported and called; and a hook, which is its component."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
from annotated_types import Gt

from core import sample
from forge_core.component import Component, fields_of
from forge_core.conformance import examine, implementation_faults
from forge_core.errors import BrokenPlugin
from forge_core.plugins import diagnose
from forge_core.protocols.run import Hook
from forge_core.registry import Registry

SHELF = """
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal
from annotated_types import Gt
from forge_core.component import Component, Slot


@dataclass(frozen=True, kw_only=True)
class Reader(Component):
    '''Base of components with a field that is for the caller.'''

    label: str = ""
    '''For the caller.'''

    @classmethod
    def passed(cls):
        return tuple(name for name in super().passed() if name != "label")


@dataclass(frozen=True, kw_only=True)
class ShelfConfig(Reader):
    '''A shelf.'''

    books: Annotated[int, Gt(0)] = 3
    '''Number of books.'''
    wood: Literal["oak", "pine"] = "oak"
    '''Kind of wood.'''
    inner: Annotated[Component | None, Slot("forge.norms")] = None
    '''A component.'''
    implementation: ClassVar[str] = "furniture:Shelf"


@dataclass(frozen=True, kw_only=True)
class Wider(ShelfConfig):
    '''Has a field of its own, and the implementation of its base.'''

    width: int = 1
    '''Width.'''
"""

FURNITURE = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nowhere import Inner

class Shelf:
    def __init__(self, size: int, *, books: int, wood: str, inner: "Inner" = None, feet: int = 4):
        self.all = (size, books, wood, inner, feet)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path with both modules; what was imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shelves.py").write_text(SHELF)
    (tmp_path / "furniture.py").write_text(FURNITURE)
    yield tmp_path
    for name, module in list(sys.modules.items()):  # no others: a library that is imported twice may not work
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}/"):
            del sys.modules[name]


def load(name: str = "ShelfConfig", group: str = "norms") -> type:
    return Registry([sample.entry(group, "shelf", f"shelves:{name}", "wood_works", "2.5")]).load(f"forge.{group}", "shelf")


def test_build_imports_the_implementation_and_passes_the_fields(modules: Path) -> None:
    component = load()(books=5, inner=sample.Adam(), label="mine")
    assert "furniture" not in sys.modules
    assert component.build(7).all == (7, 5, "oak", sample.Adam(), 4)


def test_an_implementation_may_need_none_of_the_arguments_of_its_group(modules: Path) -> None:
    (modules / "furniture.py").write_text(FURNITURE.replace("size: int, *", "*").replace("(size", "(None"))
    assert implementation_faults(load(), ("dim",)) == []
    assert load()().build(7).all == (None, 3, "oak", None, 4)


def test_a_subclass_passes_what_the_class_with_the_implementation_has(modules: Path) -> None:
    assert load("Wider")(width=9).build(7).all == (7, 3, "oak", None, 4)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("books: int", "pages: int", "'pages'"),
        ("feet: int = 4", "feet: int", "'feet'"),
        ("size: int, *", "size: int, depth: int, *", "'depth'"),
        ("size: int", "books2: int, size: int", "'size'"),
        ("class Shelf", "class Table", "furniture has no 'Shelf'"),
    ],
)
def test_an_implementation_that_does_not_fit_is_refused(modules: Path, old: str, new: str, words: str) -> None:
    """When it is built, and by the conformance checks; both say who offers it and what to change."""
    (modules / "furniture.py").write_text(FURNITURE.replace(old, new))
    info = modules / "wood_works-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wood_works\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text("[forge.norms]\nshelf = shelves:ShelfConfig\n")
    with pytest.raises(BrokenPlugin) as caught:
        load()().build(7)
    for word in (words, "furniture", "shelves:ShelfConfig of wood_works 2.5", "`"):
        assert word in str(caught.value)
    registry = Registry()
    verdict = examine(registry.find("forge.norms", "shelf"), registry)
    assert [problem.check for problem in verdict.problems] == ["implementation"]
    assert words in verdict.problems[0].message


def test_a_module_that_does_not_exist_is_named(modules: Path) -> None:
    (modules / "shelves.py").write_text(SHELF.replace("furniture:Shelf", "cabinets:Shelf"))
    with pytest.raises(BrokenPlugin, match=r"shelves:ShelfConfig.*'cabinets:Shelf', but there is no module 'cabinets'"):
        load()().build(7)


def test_a_library_that_is_missing_is_not_blamed_on_the_component(modules: Path) -> None:
    (modules / "furniture.py").write_text("import furniture_tools")
    with pytest.raises(ModuleNotFoundError, match="furniture_tools"):
        load()().build(7)
    (modules / "furniture.py").write_text("import sys\nsys.no_such_attribute")
    with pytest.raises(AttributeError, match="no_such_attribute"):
        load()().build(7)


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [
        ("books: int", "books: float", False),
        ("books: int", "books: int | None", False),
        ("books: int", "books: str", True),
        ("books: int", "books", False),
        ("wood: str", "wood: 'str | None'", False),
        ("wood: str", "wood: 'Oak'", False),  # a name for type checkers
        ("wood: str", "wood: bytes", True),
        ("wood: str", "wood: tuple[str, ...]", True),
    ],
)
def test_types_of_fields_and_parameters_agree(modules: Path, old: str, new: str, refused: bool) -> None:
    (modules / "furniture.py").write_text(FURNITURE.replace(old, new))
    faults = implementation_faults(load(), ("dim",))
    assert [old.partition(":")[0] in fault and "furniture:Shelf" in fault for fault in faults] == [True] * refused


def test_a_component_may_be_the_thing_itself_where_its_group_takes_that(modules: Path) -> None:
    source = SHELF.replace('    implementation: ClassVar[str] = "furniture:Shelf"\n', "")
    (modules / "shelves.py").write_text(source)
    with pytest.raises(BrokenPlugin, match=r"wood_works 2\.5 .*has no build method; define build\(self, dim\)"):
        load()
    with pytest.raises(BrokenPlugin, match=r"it is no Objective itself, because it has no __call__"):
        load(group="objectives")
    with pytest.raises(BrokenPlugin, match=r"has no build method; define build\(self\)"):
        load(group="encoders")
    (modules / "shelves.py").write_text(source + "\n    def __call__(self, head, hidden, labels): ...\n")
    del sys.modules["shelves"]
    component = load("Wider", group="objectives")()
    assert component.build() is component


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
