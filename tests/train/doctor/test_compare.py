"""Two reports: more than three percent worse is told, in the direction that is worse for that number."""

from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import DataError
from forge_train.doctor.report import read_report, regressions
from forge_train.doctor.step import Check, DoctorStep, StepOutcome


def report(*checks: Check) -> dict[str, Any]:
    return {"steps": [StepOutcome.of(DoctorStep("copies", "", 1), 1.0, checks).as_json()]}


@pytest.mark.parametrize(
    ("better", "before", "now", "share"),
    [
        ("higher", 100.0, 96.0, 0.04),
        ("higher", 100.0, 98.0, None),
        ("higher", 100.0, 150.0, None),
        ("lower", 100.0, 104.0, 0.04),
        ("lower", 100.0, 102.0, None),
        ("lower", 100.0, 50.0, None),
        ("", 100.0, 50.0, None),
    ],
)
def test_numbers(better: Any, before: float, now: float, share: float | None) -> None:
    old, new = (report(Check("disk", "PASS", value, "MB/s", better=better)) for value in (before, now))
    found = regressions(old, new)
    assert [one.share for one in found] == ([] if share is None else [pytest.approx(share)])
    assert all("copies: disk" in str(one) and "4.0% worse" in str(one) for one in found)


def test_verdicts_and_checks_of_one_report_only() -> None:
    old = report(
        Check("sums", "PASS", "right"), Check("gone", "PASS", 3.0, better="higher"), Check("new unit", "PASS", 9.0, "GB/s")
    )
    new = report(Check("sums", "FAIL", "wrong"), Check("new unit", "PASS", 1.0, "TB/s", better="higher"))
    (found,) = regressions(old, new)
    assert (found.check, found.before, found.now) == ("sums", "PASS", "FAIL")
    assert regressions(new, old) == [], "better is no regression"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"steps": 3}', '{"steps": [{"name": "a"}]}'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(DataError, match=r"old\.json"):
        read_report(tmp_path / "old.json")
    with pytest.raises(DataError, match=r"absent\.json"):
        read_report(tmp_path / "absent.json")
