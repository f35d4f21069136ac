"""What a step is, and what it finds: plain data that goes from one process to another as JSON. No torch."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["PASS", "SLOW", "FAIL", "SKIPPED"]

_GRAVITY: tuple[Verdict, ...] = ("SKIPPED", "PASS", "SLOW", "FAIL")


class Skip(Exception):
    """A step does not apply here; the message says why, `remedy` how to have it."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: unique within its step.
        verdict: PASS right, SLOW right but slower than it should be, FAIL wrong, SKIPPED not looked at.
        measured: a number in `unit`, or text.
        unit: such as "GB/s"; empty for text.
        expected: what was hoped for, in words.
        remedy: what to do, for anything but PASS.
        better: which direction of `measured` is better; "" where two runs are not to be compared by it.
    """

    name: str
    verdict: Verdict
    measured: float | str = ""
    unit: str = ""
    expected: str = ""
    remedy: str = ""
    better: Literal["", "higher", "lower"] = ""

    def value(self) -> str:
        """`measured` with its unit, in four digits."""
        if isinstance(self.measured, str):
            return self.measured
        return f"{self.measured:.4g} {self.unit}".rstrip()


@dataclass(frozen=True)
class Step:
    """What to run: `target` (`module:function`) takes `Settings` and gives checks; it is ended after `seconds`.

    `needs` names steps that come before: where one of them fails, this one says nothing about the machine and is skipped.
    """

    name: str
    target: str
    seconds: float
    needs: tuple[str, ...] = ()
    what: str = ""


@dataclass(frozen=True)
class Settings:
    """What every step is told.

    Attributes:
        recipe: a preset or a TOML file.
        overrides: `--section.key=value`, as of a run.
        directory: an existing folder on the disk that runs write to.
        minutes: how long the endurance step trains; 0 skips it.
        acceptance: whether a whole run is meant, so that room for checkpoints of the recipe is asked for.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    directory: str = "."
    minutes: float = 0.0
    acceptance: bool = False


@dataclass(frozen=True)
class Result:
    """What a step found.

    Attributes:
        blocked: it failed, or was skipped because a step that it needs did; its dependents are skipped too.
        log: the end of what it printed, where it did not end as it should.
    """

    name: str
    what: str
    verdict: Verdict
    seconds: float
    checks: tuple[Check, ...]
    blocked: bool = False
    log: str = ""

    @classmethod
    def of(cls, step: Step, seconds: float, checks: Iterable[Check], *, blocked: bool = False, log: str = "") -> "Result":
        """The verdict is the gravest of the checks'."""
        checks = tuple(checks)
        verdict = _GRAVITY[max((_GRAVITY.index(check.verdict) for check in checks), default=0)]
        return cls(step.name, step.what, verdict, seconds, checks, blocked or verdict == "FAIL", log)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def checks_of(found: Iterable[Mapping[str, Any]]) -> tuple[Check, ...]:
    """Checks from what another process wrote."""
    return tuple(Check(**one) for one in found)


def exit_code(results: Iterable[Result]) -> int:
    """0 where all is right, 1 where something is slow, 2 where something is wrong. What was skipped does not count."""
    verdicts = {result.verdict for result in results}
    return 2 if "FAIL" in verdicts else 1 if "SLOW" in verdicts else 0
