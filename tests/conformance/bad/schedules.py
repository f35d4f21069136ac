"""Schedules that no run can follow."""

from conformance.part import Part
from forge_core.errors import ConfigError, Fault


def counting(steps):
    """Counts its calls instead of looking at the step."""
    calls = []

    def factor(step):
        calls.append(step)
        return 1 / len(calls)

    return factor


def listed(steps):
    return [1.0 / (step + 1) for step in range(steps)].__getitem__


def refuses(steps):
    raise ConfigError([Fault("schedule", f"{steps} steps are too few")])


def needs(least, make):
    """Says that it needs a run of so many steps, whatever `make` does."""
    return Part(make=make, says=(("faults", lambda steps: [Fault("schedule", "too short")] if steps < least else []),))


BAD = {
    "check_factors": [
        (Part(make=lambda steps: lambda step: float("nan") if step == 7 else 1.0), "factor of step 7 of 1000 is nan"),
        (Part(make=lambda steps: lambda step: 0.5 - step / steps), "the weights would move uphill"),
        (Part(make=lambda steps: lambda step: 0.0), "nothing is trained"),
        (Part(make=lambda steps: lambda step: "1"), "factor of step 0 of 1000 is '1'"),
    ],
    "check_fits": [
        (needs(0, refuses), "accepts a run of 1 steps, but `build` refuses it"),
        (needs(5, lambda steps: lambda step: 1.0), "accepts a run of 1 steps, but `faults` reports"),
        (needs(0, lambda steps: lambda step: 1 - 2.0 * (step == 22)), "factor of step 22 of 23 is -1.0"),
    ],
    "check_resume": [(Part(make=counting), "a run that resumes at step 1 of 1000 has factor 1.0")],
    "check_beyond": [
        (Part(make=lambda steps: lambda step: 1 - 2 * (step == steps)), "the step after the last one, [0-9]+, is -1"),
        (Part(make=listed), "the step after the last one, [0-9]+, has no factor"),
    ],
}
