"""The time of a window by the parts of a step, with what the step waits for apart: communication that is exposed, and the host.

    data, forward, backward, reduce, optimizer, ...   something is computed or copied, and this part asked for it
    other                                             the same, outside of all parts
    exposed                                           a collective runs and nothing is computed
    host                                              nothing runs

They sum to the window. On a device, work belongs to the part in which the host launched it, however late it runs.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from forge_parallel.step.timing import PREFIX
from forge_train.profiling.host_waits import CLOSING
from forge_train.profiling.lanes import innermost
from forge_train.profiling.sweep import Stretch
from forge_train.profiling.trace import WINDOW, Event, Trace

OTHER, EXPOSED, HOST = "other", "exposed", "host"
_LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime")


class Parts:
    """Which part of a step work belongs to."""

    def __init__(self, trace: Trace) -> None:
        named = (event for event in trace.of("user_annotation") if event.name.startswith(PREFIX))
        self._pieces = innermost(event for event in named if event.name not in (WINDOW, CLOSING))
        self._starts = [start for start, _, _ in self._pieces]
        self._launched = {event.args["correlation"]: event.start for event in trace.of(*_LAUNCHES) if "correlation" in event.args}
        self._called = {event.args["External id"]: event.start for event in trace.of("cpu_op") if "External id" in event.args}

    def of_launch(self, work: Event) -> str:
        """The part in which the host asked for work of a device, as far as the trace tells."""
        launched = self._launched.get(work.args.get("correlation"), self._called.get(work.args.get("External id")))
        return OTHER if launched is None else self.at(launched)

    def at(self, instant: int) -> str:
        """The part that runs on the host; of nested ones the innermost."""
        place = bisect_right(self._starts, instant) - 1
        if place < 0 or self._pieces[place][1] <= instant:
            return OTHER
        return self._pieces[place][2].name.removeprefix(PREFIX)


def split(stretches: Sequence[Stretch]) -> dict[str, int]:
    """Nanoseconds of each part, of exposed communication and of the host, the parts in the order in which they come first."""
    waits = {"exposed": EXPOSED, "idle": HOST}
    found = Counter[str](dict.fromkeys(_order(stretches), 0))
    for stretch in stretches:
        found[waits.get(stretch.label, stretch.part)] += stretch.end - stretch.start
    return dict(found)


def has_parts(found: Mapping[str, int]) -> bool:
    """Whether the trace names parts of a step; those of other programs do not."""
    return bool(found.keys() - {OTHER, EXPOSED, HOST})


def _order(stretches: Iterable[Stretch]) -> list[str]:
    parts = dict.fromkeys(stretch.part for stretch in stretches if stretch.part)
    return [*(part for part in parts if part != OTHER), OTHER, EXPOSED, HOST]
