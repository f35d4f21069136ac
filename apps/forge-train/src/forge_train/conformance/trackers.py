"""What every tracker has to do: write nothing before the run owns its directory, take any number, and go on after a resume."""

import math
from typing import Any

VALUES = {"loss": 2.5, "grad_norm": math.inf, "bad": math.nan, "tokens": 4096, "source/web/loss": -1.0}


def check_before_rewind(component: Any) -> None:
    """Until `rewind` an older job may still work in the run's directory: nothing is written there."""
    from forge_train.conformance.trial import place

    with place() as run:
        tracker = component.build(run)
        left = sorted(path.name for path in run.directory.rglob("*"))
        assert not left, f"writes {', '.join(left)} before rewind"
        tracker.close()
        left = sorted(path.name for path in run.directory.rglob("*"))
        assert not left, f"writes {', '.join(left)} at close, although it was never told to begin"


def check_numbers(component: Any) -> None:
    """Whole numbers, fractions, infinities and NaN are taken, and the caller's values stay as they are."""
    from forge_train.conformance.trial import place

    with place() as run:
        tracker = component.build(run)
        tracker.rewind(0)
        for step in (1, 2, 3):
            given = dict(VALUES)
            tracker.write(step, given)
            assert repr(given) == repr(VALUES), f"changes the values that it is given to {given}"
        tracker.close()


def check_resume(component: Any) -> None:
    """A later start in the same directory goes on after a step that was written already."""
    from forge_train.conformance.trial import place

    with place() as run:
        for after in (0, 2):
            tracker = component.build(run)
            tracker.rewind(after)
            for step in range(after + 1, after + 4):
                tracker.write(step, VALUES)
            tracker.close()


def check_protocol(component: Any) -> None:
    """It uses of the run only what `forge_core.protocols.run.Run` offers."""
    from forge_train.conformance.trial import place

    with place() as run:
        tracker = component.build(run)
        tracker.rewind(0)
        tracker.write(1, VALUES)
        tracker.close()
        beyond = run.beyond
        assert not beyond, f"uses {', '.join(sorted(beyond))} of the run, which forge_core.protocols.run.Run does not offer"
