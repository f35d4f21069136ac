"""Steps of the doctor and their results: plain data, exchanged between processes as JSON. No torch."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["PASS", "SLOW", "FAIL", "SKIPPED"]

_GRAVITY: tuple[Verdict, ...] = ("SKIPPED", "PASS", "SLOW", "FAIL")


class Skip(Exception):
    """A step does not apply here; the message says why, and `remedy` how to enable it."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: unique within its step.
        verdict: PASS: correct; SLOW: correct but slower than expected; FAIL: wrong; SKIPPED: not checked.
        measured: a number in `unit`, or text.
        unit: such as "GB/s"; empty for text.
        expected: the expected value, as text.
        remedy: what to do, for verdicts other than PASS.
        better: which direction of `measured` is better; "" if reports are not compared by it.
    """

    name: str
    verdict: Verdict
    measured: float | str = ""
    unit: str = ""
    expected: str = ""
    remedy: str = ""
    better: Literal["", "higher", "lower"] = ""

    def value(self) -> str:
        """Returns `measured` with its unit, with four significant digits."""
        if isinstance(self.measured, str):
            return self.measured
        return f"{self.measured:.4g} {self.unit}".rstrip()


@dataclass(frozen=True)
class DoctorStep:
    """A step to run: `target` (`module:function`) takes `DoctorSettings` and yields checks; it is killed after `seconds`.

    `needs` names earlier steps; if one of them fails, this step is skipped, because its result would be meaningless.
    """

    name: str
    target: str
    seconds: float
    needs: tuple[str, ...] = ()
    what: str = ""


@dataclass(frozen=True)
class DoctorSettings:
    """Settings of all steps.

    Attributes:
        recipe: a preset or a TOML file.
        overrides: `--section.key=value`, as for a run.
        directory: an existing folder on the disk that runs write to.
        minutes: minutes of training of the endurance step; 0 skips it.
        acceptance: True to require disk space for the checkpoints of a whole run.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    directory: str = "."
    minutes: float = 0.0
    acceptance: bool = False


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step.

    Attributes:
        blocked: True if the step failed, or was skipped because a step that it needs is blocked; blocks its dependents.
        log: the end of its output, if it did not end properly.
    """

    name: str
    what: str
    verdict: Verdict
    seconds: float
    checks: tuple[Check, ...]
    blocked: bool = False
    log: str = ""

    @classmethod
    def of(
        cls, step: DoctorStep, seconds: float, checks: Iterable[Check], *, blocked: bool = False, log: str = ""
    ) -> "StepOutcome":
        """Returns the result of a step with the worst verdict of its checks."""
        checks = tuple(checks)
        verdict = _GRAVITY[max((_GRAVITY.index(check.verdict) for check in checks), default=0)]
        return cls(step.name, step.what, verdict, seconds, checks, blocked or verdict == "FAIL", log)

    def as_json(self) -> dict[str, Any]:
        """Returns the result as plain data."""
        return asdict(self)


def checks_of(found: Iterable[Mapping[str, Any]]) -> tuple[Check, ...]:
    """Returns checks from the plain data of another process."""
    return tuple(Check(**one) for one in found)


def exit_code(results: Iterable[StepOutcome]) -> int:
    """Returns 0 if no check failed, 1 if something is slow, 2 if something is wrong. Skipped checks do not count."""
    verdicts = {result.verdict for result in results}
    return 2 if "FAIL" in verdicts else 1 if "SLOW" in verdicts else 0
