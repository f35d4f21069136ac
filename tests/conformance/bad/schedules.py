"""Schedules that no run can follow."""

from conformance.part import Part


def counting(steps):
    """Counts its calls instead of looking at the step."""
    calls = []

    def factor(step):
        calls.append(step)
        return 1 / len(calls)

    return factor


def listed(steps):
    return [1.0 / (step + 1) for step in range(steps)].__getitem__


BAD = {
    "check_factors": [
        (Part(make=lambda steps: lambda step: float("nan") if step == 7 else 1.0), "factor of step 7 of 1000 is nan"),
        (Part(make=lambda steps: lambda step: 0.5 - step / steps), "the weights would climb"),
        (Part(make=lambda steps: lambda step: 0.0), "nothing is trained"),
        (Part(make=lambda steps: lambda step: "1"), "factor of step 0 of 1000 is '1'"),
    ],
    "check_resume": [(Part(make=counting), "a run that resumes at step 1 of 1000 has factor 1.0")],
    "check_beyond": [
        (Part(make=lambda steps: lambda step: 1 - 2 * (step == steps)), "the end, is -1"),
        (Part(make=listed), "the end, has no answer"),
    ],
}
