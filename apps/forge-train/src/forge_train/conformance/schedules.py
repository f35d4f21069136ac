"""What every learning-rate schedule has to do: give a usable factor at each step, which depends on the step alone."""

from collections.abc import Callable
from math import isfinite
from typing import Any

from forge_core.errors import ForgeError

STEPS = (1000, 10_000)
"""Lengths of the runs that are tried."""
SHORT = (*range(1, 24), 100, 1000)
"""Lengths that leave no room for what a schedule has to fit in."""


def check_factors(component: Any) -> None:
    """Each step of a run has a finite factor of at least 0, as a float; not all are 0."""
    for steps in STEPS:
        factor = component.build(steps)
        values = [factor(step) for step in range(steps)]
        for step, value in enumerate(values):
            assert isinstance(value, float | int) and isfinite(value), f"factor of step {step} of {steps} is {value!r}"
            assert value >= 0, f"factor of step {step} of {steps} is {value}: the weights would climb"
        assert any(values), f"every factor of {steps} steps is 0: nothing is trained"


def check_resume(component: Any) -> None:
    """A run that resumes at any step has the factors that it would have had: nothing is kept from call to call."""
    for steps in STEPS:
        first = component.build(steps)
        wanted = [first(step) for step in range(steps)]
        for begun in (1, steps // 3, steps - 1):
            _same(component.build(steps), begun, wanted, f"a run that resumes at step {begun} of {steps}")
        _same(first, 0, wanted, f"a second look at a run of {steps} steps")


def check_beyond(component: Any) -> None:
    """What is asked about the step after the last one has an answer: reports and plans draw the whole curve."""
    for steps in STEPS:
        try:
            value = component.build(steps)(steps)
        except Exception as error:
            raise AssertionError(f"factor of step {steps} of {steps}, the end, has no answer: {error!r}") from error
        assert isfinite(value) and value >= 0, f"factor of step {steps} of {steps}, the end, is {value!r}"


def check_fits(component: Any) -> None:
    """Where a part says by `faults(steps)` whether it fits a run, `build` agrees at every length, so that a run that its check
    lets through is not refused later: what has a fault is refused, and what has none gives a factor at each step."""
    faults = getattr(component, "faults", None)
    if faults is None:
        return
    for steps in SHORT:
        found = faults(steps)
        try:
            factor = component.build(steps)
        except ForgeError as error:
            assert found, f"`faults` has nothing against a run of {steps} steps, but `build` refuses it: {error}"
            continue
        assert not found, f"`build` takes a run of {steps} steps, in spite of the fault {found[0]}"
        for step in range(steps):
            value = factor(step)
            assert isfinite(value) and value >= 0, f"factor of step {step} of {steps} is {value!r}"


def _same(factor: Callable[[int], float], begun: int, wanted: list[float], who: str) -> None:
    for step in range(begun, len(wanted)):
        value = factor(step)
        assert value == wanted[step], f"{who} has factor {value} at step {step}, not {wanted[step]}"
