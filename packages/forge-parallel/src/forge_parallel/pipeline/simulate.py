"""How long ranks of a pipeline wait for each other: a simulation of a schedule with given costs. No torch.

Sending is free here, so what is measured is the schedule alone. For M micro-batches on p ranks, forward 1 and backward 2,
GPipe and 1F1B idle for (p - 1) / M of the time in which they work, interleaved 1F1B with v stages per rank for
(p - 1) / (v M) (Narayanan et al., 2021).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from forge_core.errors import PlanError
from forge_parallel.pipeline.schedules import Action

UNIT = MappingProxyType({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})
"""Cost of one piece of work on one stage: the matrices of a block are multiplied once forward and twice backward."""


@dataclass(frozen=True)
class Timeline:
    """`length`: when the last rank is done. `busy`: time in which each rank works. `ends`: when each action is over."""

    length: float
    busy: tuple[float, ...]
    ends: Mapping[Action, float]

    @property
    def bubble(self) -> float:
        """Idle time of all ranks, relative to the time in which they work."""
        return len(self.busy) * self.length / sum(self.busy) - 1


def simulate(table: Sequence[Sequence[Action]], stages: int, costs: Mapping[str, float] = UNIT) -> Timeline:
    """Runs a table of actions, per rank in order, as soon as what they need is there.

    Raises:
        PlanError: ranks wait for each other forever.
    """
    ends: dict[Action, float] = {}
    at = [0] * len(table)
    clock = [0.0] * len(table)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(table):
            while at[rank] < len(order) and all(any(one in ends for one in either) for either in _needs(order[at[rank]], stages)):
                action = order[at[rank]]
                ready = [min(ends[one] for one in either if one in ends) for either in _needs(action, stages)]
                clock[rank] = max([clock[rank], *ready]) + costs[action.kind]
                ends[action] = clock[rank]
                at[rank] += 1
                moved = True
    stuck = {rank: order[at[rank]] for rank, order in enumerate(table) if at[rank] < len(order)}
    if stuck:
        raise PlanError(f"the schedule deadlocks; ranks wait at {stuck}")
    return Timeline(max(clock), tuple(sum(costs[action.kind] for action in order) for order in table), ends)


def _needs(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """For each thing that an action waits for, the actions of which one must be over."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [(Action("F", stage - 1, micro_batch),)] if stage > 0 else []
    if kind == "W":
        return [(Action("I", stage, micro_batch),)]
    after = [(Action("B", stage + 1, micro_batch), Action("I", stage + 1, micro_batch))] if stage < stages - 1 else []
    return [(Action("F", stage, micro_batch),), *after]
