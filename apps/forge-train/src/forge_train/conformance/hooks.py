"""What every hook has to do: work in a run through what the protocol offers, and keep its state as JSON."""

import json
from typing import Any


def check_state(component: Any) -> None:
    """After a run `state()` is plain JSON, and a new hook that is given it has the same state."""
    from forge_train.conformance.trial import trained_with

    state = trained_with(component).state
    try:
        read = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state() is not JSON: {error}") from error
    assert read == state, f"state() {state} reads back from JSON as {read}"
    other = component.build()
    other.load_state(read)
    assert dict(other.state()) == state, f"a hook that is given the state {state} has the state {dict(other.state())}"


def check_protocol(component: Any) -> None:
    """It says whether it only observes, works in a run of a few steps, and uses of the run only what
    `forge_core.protocols.run.Run` offers."""
    from forge_train.conformance.trial import trained_with

    observes = getattr(component.build(), "observes", False)
    assert type(observes) is bool, f"observes is {observes!r}; say True of a hook that only looks, else False"
    beyond = trained_with(component).beyond
    assert not beyond, f"uses {', '.join(sorted(beyond))} of the run, which forge_core.protocols.run.Run does not offer"


def check_result(component: Any) -> None:
    """The trained weights are those of a run without it, and so is the order of data: a hook looks on."""
    from forge_train.conformance.trial import trained_alone, trained_with

    with_it, without = trained_with(component).weights, trained_alone().weights
    differ = sorted(name for name, value in without.items() if not bool((value == with_it[name]).all()))
    assert not differ, f"changes what is trained: {', '.join(differ[:3])} differ after the run"
