"""Simulates a pipeline schedule with given costs: how long ranks wait for each other. Does not import torch.

Communication costs nothing here, so only the schedule matters. For M micro-batches on p ranks, forward cost 1 and backward cost
2, the idle time relative to the working time is (p - 1) / M for GPipe and 1F1B, and (p - 1) / (v M) for interleaved 1F1B with v
stages per rank (Narayanan et al., 2021).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from forge_core.errors import PlanError
from forge_parallel.pipeline.schedules import Action

UNIT = MappingProxyType({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})
"""Kind of action -> cost on one stage; the backward of a block has twice as many matrix products as its forward."""


@dataclass(frozen=True)
class PipelineTimeline:
    """`length`: end time of the last rank. `busy`: working time of each rank. `ends`: end time of each action."""

    length: float
    busy: tuple[float, ...]
    ends: Mapping[Action, float]

    @property
    def bubble(self) -> float:
        """Idle time of all ranks, relative to their working time."""
        return len(self.busy) * self.length / sum(self.busy) - 1


def simulate(table: Sequence[Sequence[Action]], stages: int, costs: Mapping[str, float] = UNIT) -> PipelineTimeline:
    """Runs a table of actions, for each rank in order, as early as their inputs are available.

    Raises:
        PlanError: the schedule deadlocks.
    """
    ends: dict[Action, float] = {}
    at = [0] * len(table)
    clock = [0.0] * len(table)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(table):
            while at[rank] < len(order) and all(any(a in ends for a in either) for either in _needs(order[at[rank]], stages)):
                action = order[at[rank]]
                ready = [min(ends[a] for a in either if a in ends) for either in _needs(action, stages)]
                clock[rank] = max([clock[rank], *ready]) + costs[action.kind]
                ends[action] = clock[rank]
                at[rank] += 1
                moved = True
    stuck = {rank: order[at[rank]] for rank, order in enumerate(table) if at[rank] < len(order)}
    if stuck:
        raise PlanError(f"the schedule deadlocks; ranks wait at {stuck}")
    return PipelineTimeline(max(clock), tuple(sum(costs[action.kind] for action in order) for order in table), ends)


def _needs(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """Returns, for each input of an action, the actions that can produce it, one of which must have ended."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [(Action("F", stage - 1, micro_batch),)] if stage > 0 else []
    if kind == "W":
        return [(Action("I", stage, micro_batch),)]
    after = [(Action("B", stage + 1, micro_batch), Action("I", stage + 1, micro_batch))] if stage < stages - 1 else []
    return [(Action("F", stage, micro_batch),), *after]
