"""Steps that hang, abort or raise are verdicts, and the report is never missing."""

import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from forge_core.errors import ForgeError
from forge_train.doctor.report import Report
from forge_train.doctor.runner import ACCEPTANCE, QUICK, chosen, examine_all, run_step
from forge_train.doctor.step import DoctorSettings, DoctorStep, exit_code

STEPS = "train.doctor.steps_of_tests"


def step(name: str, *needs: str, seconds: float = 60.0) -> DoctorStep:
    return DoctorStep(name, f"{STEPS}:{name}", seconds, needs)


def alive(pid: int) -> bool:
    """Not counting one that has ended and waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_step_that_hangs_fails_keeps_what_it_found_and_leaves_no_process(tmp_path: Path) -> None:
    found = run_step(step("hangs", seconds=5.0), DoctorSettings("debug", directory=str(tmp_path)))
    assert [check.verdict for check in found.checks] == ["PASS", "FAIL"] and found.verdict == "FAIL"
    assert "5 s" in found.checks[1].value() and "'before'" in found.checks[1].value()
    deadline = time.monotonic() + 10
    while alive(int((tmp_path / "grandchild").read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int((tmp_path / "grandchild").read_text()))


@pytest.mark.parametrize(
    ("name", "said", "before"),
    [
        ("aborts", "SIGABRT", 1),
        ("is_killed", "SIGKILL", 0),
        ("raises", "raised ValueError: three is not a number, after the check 'before'", 1),
        ("compiles", "raised RuntimeError: no kernel for heads of 8, before its first check", 0),
        ("mute", "raised AssertionError, before its first check", 0),
        ("leaves", "", 1),
    ],
)
def test_a_step_that_ends_otherwise_fails_and_says_how(name: str, said: str, before: int) -> None:
    found = run_step(step(name), DoctorSettings("debug"))
    assert [check.verdict for check in found.checks] == ["PASS"] * before + ["FAIL"]
    assert said in found.checks[-1].value() and found.checks[-1].remedy
    if name == "aborts":
        assert "about to abort" in found.log


def test_dependents_of_what_failed_are_skipped_and_others_run() -> None:
    steps = [
        step("wrong"),
        DoctorStep("child", f"{STEPS}:right", 60, ("wrong",)),
        DoctorStep("grandchild", f"{STEPS}:right", 60, ("child",)),
        step("absent"),
        DoctorStep("of_absent", f"{STEPS}:right", 60, ("absent",)),
    ]
    found = {result.name: result for result in examine_all(steps, DoctorSettings("debug"), lambda _: None)}
    assert {name: result.verdict for name, result in found.items()} == {
        "wrong": "FAIL",
        "child": "SKIPPED",
        "grandchild": "SKIPPED",
        "absent": "SKIPPED",
        "of_absent": "PASS",
    }
    assert "wrong" in found["child"].checks[0].value() and found["child"].seconds == 0
    assert found["absent"].checks[0].remedy == "buy one"


@pytest.mark.parametrize(("names", "code"), [("right", 0), ("right absent", 0), ("right slow", 1), ("slow wrong", 2)])
def test_exit_codes(names: str, code: int) -> None:
    assert exit_code(examine_all([step(name) for name in names.split()], DoctorSettings("debug"), lambda _: None)) == code


def test_needs_name_earlier_steps() -> None:
    seen: set[str] = set()
    for one in ACCEPTANCE:
        assert set(one.needs) <= seen, one.name
        seen.add(one.name)
    assert len(seen) == len(ACCEPTANCE) and set(QUICK) <= set(ACCEPTANCE)


def test_only_keeps_the_order_and_refuses_unknown_names() -> None:
    assert [one.name for one in chosen(ACCEPTANCE, "matmul, disk")] == ["disk", "matmul"]
    with pytest.raises(ForgeError, match="matmul"):
        chosen(ACCEPTANCE, "matmuls")


BROKEN_OFF = f"""
import sys
from pathlib import Path
from forge_train.doctor.report import Report
from forge_train.doctor.runner import examine_all
from forge_train.doctor.step import DoctorSettings, DoctorStep
folder = sys.argv[1]
report = Report("debug", Path(folder))
steps = [DoctorStep(name, "{STEPS}:" + name, 600) for name in ("right", "hangs")]
examine_all(steps, DoctorSettings("debug", directory=folder), report.write)
"""


def test_the_json_of_a_runner_that_was_killed_has_every_step_before(tmp_path: Path) -> None:
    runner = subprocess.Popen([sys.executable, "-c", BROKEN_OFF, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "grandchild").is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        runner.kill()
        runner.wait()
    try:
        document = json.loads((tmp_path / "doctor.json").read_text())
        assert [(one["name"], one["verdict"]) for one in document["steps"]] == [("right", "PASS")]
        assert document["ended"] is False
    finally:
        os.kill(int((tmp_path / "grandchild").read_text()), signal.SIGKILL)


class Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.fetches: list[str] = []

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetches += [str(value) for name, value in attrs if name in ("src", "href")]


def test_the_page_has_every_verdict_and_fetches_nothing(tmp_path: Path) -> None:
    report = Report("<debug>", tmp_path)
    names = ("right", "slow", "wrong", "absent", "aborts")
    results = examine_all([step(name) for name in names], DoctorSettings("debug"), report.write)
    report.end()
    parsed = Text()
    parsed.feed((tmp_path / "doctor.html").read_text())
    for result in results:
        assert f"{result.name}: {result.verdict}" in parsed.words
        for check in result.checks:
            assert {check.name, check.verdict, check.value()} <= set(parsed.words)
            assert not check.remedy or check.remedy in parsed.words
    assert any("about to abort" in word for word in parsed.words)
    assert any("recipe <debug>" in word for word in parsed.words)
    assert parsed.fetches == []
