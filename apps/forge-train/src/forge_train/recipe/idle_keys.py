"""Keys that say how something is done, in a recipe that does not ask for it: they would be read and change nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from forge_core.errors import Fault
from forge_core.layout import Layout
from forge_train.recipe.schema import Job


@dataclass(frozen=True)
class Switch:
    """What turns keys on.

    Attributes:
        key: of the recipe, as a person sets it.
        is_on: whether a recipe does.
        section: where the keys are.
        keys: of that section; None for all of them but `key`.
    """

    key: str
    is_on: Callable[[Job], bool]
    section: str
    keys: tuple[str, ...] | None = None


SWITCHES = (
    Switch("checkpoint.mode = 'async'", lambda job: job.checkpoint.mode == "async", "checkpoint", ("saver", "busy")),
    Switch("train.rollback_after", lambda job: job.train.rollback_after is not None, "train", ("max_rollbacks", "rollback_lr")),
    Switch("data.packing = 'best_fit'", lambda job: job.data.packing == "best_fit", "data", ("items_per_row",)),
    Switch("start.weights", lambda job: job.start.weights is not None, "start"),
)


def keys_have_a_part(job: Job, layout: Layout | None) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Keys with another value than their default, where what they are about is not asked for."""
    for switch in SWITCHES:
        if switch.is_on(job):
            continue
        section = getattr(job, switch.section)
        for field in fields(section):
            name = f"{switch.section}.{field.name}"
            is_meant = name != switch.key and (switch.keys is None or field.name in switch.keys)
            if is_meant and getattr(section, field.name) != field.default:
                yield Fault(name, f"has no effect without {switch.key}", hint=f"set {switch.key}, or leave this key out")
