"""How parts are checked: every check on every example, nothing skipped in silence, and one line for a plugin's tests."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_core import conformance
from forge_core.conformance import conforms, examine, problems
from forge_core.errors import BrokenPlugin, UnknownComponent
from forge_core.plugins import describe_plugin, diagnose
from forge_core.registry import Entry, Registry

PARTS = '''
"""Norms."""
from dataclasses import dataclass
from forge_core.component import Component

@dataclass(frozen=True, kw_only=True)
class Good(Component):
    """Doubles."""
    factor: int = 2
    """Factor."""
    def build(self, dim):
        return self.factor

@dataclass(frozen=True, kw_only=True)
class Odd(Good):
    """Several examples, of which the second is odd."""
    @classmethod
    def examples(cls, folder):
        return (cls(factor=4), cls(factor=3), cls(factor=5))

@dataclass(frozen=True, kw_only=True)
class Raises(Good):
    """Raises while it is built."""
    def build(self, dim):
        raise KeyError("lost")

@dataclass(frozen=True, kw_only=True)
class Needs(Component):
    """Has a required key."""
    factor: int
    """Factor."""
    def build(self, dim):
        return self.factor

@dataclass(frozen=True, kw_only=True)
class Helped(Needs):
    """Has a required key, and an example in a file."""
    factor: int
    """Factor."""
    @classmethod
    def examples(cls, folder):
        assert not list(folder.iterdir())
        (folder / "two").write_text("2")
        return [cls(factor=int((folder / "two").read_text()))]

@dataclass(frozen=True, kw_only=True)
class Silent(Good):
    """Gives no example."""
    @classmethod
    def examples(cls, folder):
        return ()

@dataclass(frozen=True, kw_only=True)
class Undocumented(Component):
    """A key says nothing."""
    factor: int = 2
    def build(self, dim):
        return self.factor

@dataclass(frozen=True, kw_only=True)
class Look(Component):
    """Builds a hook."""
    def build(self):
        return None
'''
CHECKS = '''
"""Checks of norms."""
helper = len

def check_even(component):
    assert component.build(1) % 2 == 0, f"{component.build(1)} is odd"

def check_positive(component):
    """Checks that the product is positive."""
    assert component.build(1) > 0
'''
NAMES = ("Good", "Odd", "Raises", "Needs", "Helped", "Silent", "Undocumented")


def entry(group: str, name: str, target: str, distribution: str = "parts") -> Entry:
    return Entry(group, name, distribution, "1.0", target)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    (tmp_path / "kit_parts.py").write_text(PARTS)
    (tmp_path / "kit_checks.py").write_text(CHECKS)
    monkeypatch.syspath_prepend(tmp_path)
    parts = [entry("forge.norms", name.lower(), f"kit_parts:{name}") for name in NAMES]
    home = entry("forge.checks", "home", "kit_checks:check_positive", "forge-models")
    yield Registry([*parts, home, entry(conformance.GROUP, "forge.norms", "kit_checks", "forge-testing")])
    for name in ("kit_parts", "kit_checks"):  # no others: a library that is imported twice may not work
        sys.modules.pop(name, None)


def said(registry: Registry, name: str) -> dict[str, str]:
    return {item.check: item.message for item in examine(registry.find("forge.norms", name), registry).problems}


def test_every_check_runs_on_every_example(registry: Registry) -> None:
    verdict = examine(registry.find("forge.norms", "good"), registry)
    assert (verdict.passed, verdict.problems) == (("check_even", "check_positive"), ())
    assert verdict.lines() == ["forge.norms parts:good: 2 checks passed"]
    odd = examine(registry.find("forge.norms", "odd"), registry)
    assert (odd.passed, [item.check for item in odd.problems]) == (("check_positive",), ["check_even"])
    assert odd.problems[0].message == "3 is odd (Odd(factor=3))", "the first example that fails is named"
    assert said(registry, "helped") == {}


def test_a_class_with_two_names_is_checked_once(registry: Registry) -> None:
    twice = [entry("forge.norms", name, "kit_parts:Odd") for name in ("first", "second")]
    again = Registry([*twice, *(item for item in registry.entries if item.group != "forge.norms")])
    assert [(item.entry.name, item.check) for item in problems(again)] == [("first", "check_even")]


def test_what_cannot_be_checked_is_a_problem(registry: Registry) -> None:
    assert said(registry, "raises") == {"check_even": "KeyError: 'lost'", "check_positive": "KeyError: 'lost'"}
    assert "required keys" in said(registry, "needs")["examples"]
    assert "examples(cls, folder)" in said(registry, "needs")["examples"]
    assert "nothing was checked" in said(registry, "silent")["examples"]
    assert examine(registry.find("forge.norms", "needs"), registry).passed == ()


def test_problems_are_of_descriptions_and_of_checks(registry: Registry) -> None:
    assert {(item.entry.name, item.check) for item in problems(registry)} == {
        ("odd", "check_even"),
        *(("raises", name) for name in ("check_even", "check_positive")),
        ("needs", "examples"),
        ("silent", "examples"),
        ("undocumented", "description"),
    }
    assert problems(registry, "forge_models") == problems(registry, group="forge.optimizers") == []
    assert len(problems(registry, "Parts", "forge.norms")) == 6


def test_checks_of_several_distributions_add_up(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "kit_more.py").write_text(
        '"""More."""\ndef check_even(component):\n    assert component.factor == 3, "not three"\n'
    )
    registry.entries.append(entry(conformance.GROUP, "forge.norms", "kit_more"))
    assert said(registry, "good") == {"check_even": "not three"}
    reports = [report for report in diagnose(registry) if report.entry.group == conformance.GROUP]
    assert [report.problems for report in reports] == [(), ()], "the name of two modules of checks is not a clash"


def test_without_the_checks_a_part_does_not_conform(registry: Registry) -> None:
    whole = registry.entries
    missing = "the checks of forge.norms are not installed: pip install"
    for absent in (["forge-testing"], ["forge-models"], ["forge-models", "forge-testing"]):
        registry.entries = [item for item in whole if item.distribution not in absent]
        assert said(registry, "good") == {"checks": f"{missing} {' '.join(absent)}"}
    registry.entries = [
        *whole,
        entry("forge.hooks", "some", "kit_parts:Look"),
        entry("forge.hooks", "look", "x:y", "forge-interp"),
    ]
    hook = examine(registry.entries[-2], registry).problems
    assert [item.message for item in hook] == ["the checks of forge.hooks are not installed: pip install forge-train"]
    registry.entries = [item for item in whole if item.group != conformance.GROUP]
    registry.entries.append(entry(conformance.GROUP, "forge.mlps", "kit_checks", "forge-testing"))
    assert examine(registry.find("forge.norms", "good"), registry).lines() == ["forge.norms parts:good: no checks"]


@pytest.mark.parametrize("target", ["kit_checks:helper", "kit_parts"])
def test_only_a_module_with_checks_is_accepted(registry: Registry, target: str) -> None:
    wrong = entry(conformance.GROUP, "forge.mlps", target)
    registry.entries.append(wrong)
    with pytest.raises(BrokenPlugin, match="is not a module or class of check_"):
        registry.load_entry(wrong)
    (report,) = [report for report in diagnose(registry) if report.entry == wrong]
    assert "module or class of check_" in report.problems[0]


def test_a_module_of_checks_is_described(registry: Registry) -> None:
    assert describe_plugin(registry.find(conformance.GROUP, "forge.norms"), registry).doc == "Checks of norms."


@pytest.fixture
def everything(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr(conformance, "Registry", lambda: registry)
    return registry


def test_one_line_names_every_problem(everything: Registry) -> None:
    with pytest.raises(AssertionError) as caught:
        conforms("parts")
    assert str(caught.value).splitlines()[1:] == [str(item) for item in problems(everything, "parts")]
    assert "forge.norms parts:odd: check_even: 3 is odd" in str(caught.value)
    everything.entries = [item for item in everything.entries if item.name in ("good", "forge.norms", "home")]
    conforms("parts")
    conforms("parts", "forge.norms")
    with pytest.raises(UnknownComponent, match="'part' is not installed"):
        conforms("part")


def test_one_line_checks_a_file(everything: Registry, tmp_path: Path) -> None:
    conforms(f"{tmp_path / 'kit_parts.py'}:Good", "forge.norms")
    with pytest.raises(AssertionError, match="3 is odd"):
        conforms(f"{tmp_path / 'kit_parts.py'}:Odd", "forge.norms")


def test_doctor_runs_the_checks(registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import forge_core.registry
    from forge_train.cli import main

    monkeypatch.setattr(forge_core.registry, "Registry", lambda: registry)

    def doctor(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["plugins", "doctor", *arguments])
        code: Any = caught.value.code
        return code or 0, capsys.readouterr().out

    code, text = doctor("good", "--conform")
    assert (code, text.splitlines()[0]) == (0, "forge.norms parts:good: 2 checks passed")
    code, text = doctor("odd", "--conform")
    assert code == 1
    assert "forge.norms parts:odd: check_even: 3 is odd" in text
    assert doctor("odd")[0] == 0, "checks run when they are asked for"
    assert doctor("undocumented", "--conform")[0] == 2
    code, text = doctor("odd", "--conform", "--json")
    document = json.loads(text)
    assert (code, document["ok"]) == (1, False)
    assert document["plugins"][0]["passed"] == ["check_positive"]
    assert "3 is odd" in document["plugins"][0]["failed"]["check_even"]
