"""Every fault of `docs/faults.toml` has a test that carries its number, or says that it is open; none is open that has one."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))
import forge_faults


def test_every_fault_has_a_test_or_is_open() -> None:
    found, faults = forge_faults.tests(), forge_faults.listed("fault")
    assert [fault["number"] for fault in faults] == list(range(1, 52))
    silent = [fault["number"] for fault in faults if fault["number"] not in found and "open" not in fault]
    assert silent == [], "no test carries these numbers: name one test_fault_N_..., or say in docs/faults.toml why it is `open`"
    stale = {fault["number"]: found[fault["number"]] for fault in faults if "open" in fault and fault["number"] in found}
    assert stale == {}, "these have tests now: leave `open` out of docs/faults.toml"
    assert found.keys() <= set(range(1, 52)), "tests carry numbers of faults that are not in docs/faults.toml"


def test_every_promise_is_made_of_faults_that_are_listed() -> None:
    promises = forge_faults.listed("promise")
    assert [promise["name"] for promise in promises] == [f"P{number}" for number in range(1, 8)]
    assert {number for promise in promises for number in promise["faults"]} <= set(range(1, 52))
    assert all(promise["faults"] for promise in promises)


def test_the_walk_finds_tests_by_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "deep"
    folder.mkdir(parents=True)
    (folder / "test_one.py").write_text(
        "def test_fault_5_w5_a(): ...\nclass TestA:\n    def test_fault_2_and_31_b(self): ...\n"
        "def test_default_1(): ...\ndef helper_test_fault_9_c(): ...\n# def test_fault_8_c(): ...\n"
    )
    (folder / "faults.py").write_text("def test_fault_6_not_collected(): ...\n")
    file = "tests/deep/test_one.py"
    assert forge_faults.tests(tmp_path / "tests") == {
        5: [(file, "test_fault_5_w5_a")],
        2: [(file, "test_fault_2_and_31_b")],
        31: [(file, "test_fault_2_and_31_b")],
    }


@pytest.mark.parametrize("name", ["test_w5_fault_5_a", "test_fault_5", "test_fault5_a", "test_fault_5_6_a"])
def test_a_number_in_another_place_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        forge_faults.numbers_of(name)


def test_both_tables_name_every_fault_and_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    found, faults = forge_faults.tests(), forge_faults.listed("fault")
    rows = "\n".join(forge_faults.table_of_faults(found))
    for fault in faults:
        assert f"| {fault['number']} | {fault['what']} | {fault['then']} | " in rows
        assert all(forge_faults.said(test.name) in rows for test in found.get(fault["number"], []))
    (row,) = (row for row in forge_faults.table_of_promises(found) if row.startswith("| P5 "))
    assert "fault 45: `ckpt/test_damage.py`: a pickle in any file executes nothing" in row
    some = {number: tests for number, tests in found.items() if number != 30}
    faults[29]["open"] = "not yet"
    monkeypatch.setattr(forge_faults, "listed", lambda key: {"fault": faults}[key])
    assert f"| {faults[29]['then']} | open: not yet |" in "\n".join(forge_faults.table_of_faults(some))
