"""Checks of hooks, learning-rate schedules and trackers."""

import json
import math
from collections.abc import Callable
from math import isfinite
from typing import Any

from forge_core.errors import ForgeError


class HookChecks:
    """Checks of hooks: they use only what the protocol offers, their state is JSON, and they do not change training."""

    @staticmethod
    def check_state(component: Any) -> None:
        """Checks that after a run `state()` is plain JSON, and that a new hook has the same state after `load_state`."""
        from forge_testing.runs import run_with

        state = run_with(component).state
        try:
            read = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise AssertionError(f"state() is not JSON: {error}") from error
        assert read == state, f"state() {state} reads back from JSON as {read}"
        other = component.build()
        other.load_state(read)
        assert dict(other.state()) == state, f"after load_state({state}), state() returns {dict(other.state())}"

    @staticmethod
    def check_protocol(component: Any) -> None:
        """Checks that `observes` is a bool, that a run of a few steps works, and that the hook uses only attributes that
        `forge_core.protocols.run.Run` declares."""
        from forge_testing.runs import run_with

        observes = getattr(component.build(), "observes", False)
        assert type(observes) is bool, f"observes is {observes!r}; set True if the hook only reads the run, else False"
        beyond = run_with(component).beyond
        assert not beyond, f"uses {', '.join(sorted(beyond))} of the run, which forge_core.protocols.run.Run does not declare"

    @staticmethod
    def check_result(component: Any) -> None:
        """Checks that the trained weights equal those of a run without the hook, bit for bit."""
        from forge_testing.runs import run_alone, run_with

        with_it, without = run_with(component).weights, run_alone().weights
        differ = sorted(name for name, value in without.items() if not bool((value == with_it[name]).all()))
        assert not differ, f"changes what is trained: {', '.join(differ[:3])} differ after the run"


STEPS = (1000, 10_000)
"""Lengths of the runs that are tried."""
SHORT = (*range(1, 24), 100, 1000)
"""Lengths that leave no room for what a schedule has to fit in."""


class ScheduleChecks:
    """Checks of learning-rate schedules: the factor of each step is usable, and depends on the step alone."""

    @staticmethod
    def check_factors(component: Any) -> None:
        """Checks that each step of a run has a finite factor of at least 0, and that not all factors are 0."""
        for steps in STEPS:
            factor = component.build(steps)
            values = [factor(step) for step in range(steps)]
            for step, value in enumerate(values):
                assert isinstance(value, float | int) and isfinite(value), f"factor of step {step} of {steps} is {value!r}"
                assert value >= 0, f"factor of step {step} of {steps} is {value}, so the weights would move uphill"
            assert any(values), f"every factor of {steps} steps is 0: nothing is trained"

    @staticmethod
    def check_resume(component: Any) -> None:
        """Checks that a run that resumes at any step has the same factors: no call depends on earlier calls."""
        for steps in STEPS:
            first = component.build(steps)
            wanted = [first(step) for step in range(steps)]
            for begun in (1, steps // 3, steps - 1):
                _same(component.build(steps), begun, wanted, f"a run that resumes at step {begun} of {steps}")
            _same(first, 0, wanted, f"a second look at a run of {steps} steps")

    @staticmethod
    def check_beyond(component: Any) -> None:
        """Checks that the step after the last one has a factor, because reports and plans draw the whole curve."""
        for steps in STEPS:
            try:
                value = component.build(steps)(steps)
            except Exception as error:
                raise AssertionError(f"the step after the last one, {steps}, has no factor: {error!r}") from error
            assert isfinite(value) and value >= 0, f"the factor of the step after the last one, {steps}, is {value!r}"

    @staticmethod
    def check_fits(component: Any) -> None:
        """Checks that `faults(steps)`, if defined, and `build` agree at every length: `build` refuses what has a fault, and
        returns a factor for each step otherwise, so that a run that `check` accepts is not refused later."""
        faults = getattr(component, "faults", None)
        if faults is None:
            return
        for steps in SHORT:
            found = faults(steps)
            try:
                factor = component.build(steps)
            except ForgeError as error:
                assert found, f"`faults` accepts a run of {steps} steps, but `build` refuses it: {error}"
                continue
            assert not found, f"`build` accepts a run of {steps} steps, but `faults` reports {found[0]}"
            for step in range(steps):
                value = factor(step)
                assert isfinite(value) and value >= 0, f"factor of step {step} of {steps} is {value!r}"


def _same(factor: Callable[[int], float], begun: int, wanted: list[float], who: str) -> None:
    for step in range(begun, len(wanted)):
        value = factor(step)
        assert value == wanted[step], f"{who} has factor {value} at step {step}, not {wanted[step]}"


VALUES = {"loss": 2.5, "grad_norm": math.inf, "bad": math.nan, "tokens": 4096, "source/web/loss": -1.0}


class TrackerChecks:
    """Checks of trackers: they write nothing before the run owns its directory, accept any number, and can resume."""

    @staticmethod
    def check_before_rewind(component: Any) -> None:
        """Checks that nothing is written before `rewind`, because an older job may still use the run's directory."""
        from forge_testing.runs import unstarted_run

        with unstarted_run() as run:
            tracker = component.build(run)
            left = sorted(path.name for path in run.directory.rglob("*"))
            assert not left, f"writes {', '.join(left)} before rewind"
            tracker.close()
            left = sorted(path.name for path in run.directory.rglob("*"))
            assert not left, f"writes {', '.join(left)} at close, although `rewind` was never called"

    @staticmethod
    def check_numbers(component: Any) -> None:
        """Checks that integers, fractions, infinities and NaN are accepted, and that the caller's values do not change."""
        from forge_testing.runs import unstarted_run

        with unstarted_run() as run:
            tracker = component.build(run)
            tracker.rewind(0)
            for step in (1, 2, 3):
                given = dict(VALUES)
                tracker.write(step, given)
                assert repr(given) == repr(VALUES), f"changes the values that it is given to {given}"
            tracker.close()

    @staticmethod
    def check_resume(component: Any) -> None:
        """Checks that a later start in the same directory continues after steps that were written already."""
        from forge_testing.runs import unstarted_run

        with unstarted_run() as run:
            for after in (0, 2):
                tracker = component.build(run)
                tracker.rewind(after)
                for step in range(after + 1, after + 4):
                    tracker.write(step, VALUES)
                tracker.close()

    @staticmethod
    def check_protocol(component: Any) -> None:
        """Checks that the tracker uses only attributes of the run that `forge_core.protocols.run.Run` declares."""
        from forge_testing.runs import unstarted_run

        with unstarted_run() as run:
            tracker = component.build(run)
            tracker.rewind(0)
            tracker.write(1, VALUES)
            tracker.close()
            beyond = run.beyond
            assert not beyond, f"uses {', '.join(sorted(beyond))} of the run, which forge_core.protocols.run.Run does not declare"
