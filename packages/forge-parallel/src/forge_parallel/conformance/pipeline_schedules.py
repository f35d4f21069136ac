"""Checks for every pipeline schedule: it does all of the work, each action once and on its rank, without a deadlock."""

from collections import Counter
from typing import Any

from forge_parallel.conformance.transforms import check_options as check_options

RANKS = (2, 3, 4)
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12)


def check_order(component: Any) -> None:
    """Every stage runs one forward and one backward per micro-batch, the backward whole or in two halves, on the stage's rank."""
    from forge_parallel.pipeline.schedules import placement

    for schedule, ranks, count in _accepted(component):
        where, table = placement(schedule, ranks), schedule.actions(ranks, count)
        given = f"{count} micro-batches on {ranks} ranks"
        assert len(table) == ranks, f"actions({ranks}, {count}) are of {len(table)} ranks"
        wrong = [(rank, action) for rank, order in enumerate(table) for action in order if where[action.stage] != rank]
        assert not wrong, f"{given}: rank {wrong[0][0]} does {wrong[0][1]}, a stage of rank {where[wrong[0][1].stage]}"
        done = Counter((kind, stage, index) for order in table for kind, stage, index in order)
        for stage in range(len(where)):
            for index in range(count):
                forward, whole, inputs, weights = (done[kind, stage, index] for kind in "FBIW")
                found = f"{given}: stage {stage} runs micro-batch {index}"
                assert forward == 1, f"{found} forward {forward} times"
                assert (whole, inputs, weights) in ((1, 0, 0), (0, 1, 1)), (
                    f"{found} backward {whole} times whole, {inputs} times for inputs and {weights} times for weights"
                )
        assert schedule.splits_backward or not any(done[key] for key in done if key[0] in "IW"), (
            "splits backward, but splits_backward is False"
        )


def check_ends(component: Any) -> None:
    """The schedule does not deadlock, and its bubble is not larger than GPipe's."""
    from forge_parallel.pipeline.schedules import placement
    from forge_parallel.pipeline.timeline import simulate

    for schedule, ranks, count in _accepted(component):
        bubble = simulate(schedule.actions(ranks, count), len(placement(schedule, ranks))).bubble
        limit = (ranks - 1) / count + 1e-9  # that of GPipe (Narayanan et al., 2021)
        assert bubble <= limit, f"{count} micro-batches on {ranks} ranks: bubble {bubble:.2f}, more than GPipe's {limit:.2f}"


def check_refusals(component: Any) -> None:
    """`refusal` accepts one micro-batch per stage, and refuses zero micro-batches."""
    schedule = component.build()
    for ranks in RANKS:
        count = ranks * schedule.stages_per_rank
        why = schedule.refusal(ranks, count)
        assert why is None, f"refuses one micro-batch per stage, {count} on {ranks} ranks: {why}"
        assert schedule.refusal(ranks, 0), f"does not refuse 0 micro-batches on {ranks} ranks"


def _accepted(component: Any) -> list[tuple[Any, int, int]]:
    schedule = component.build()
    cases = [(schedule, ranks, count) for ranks in RANKS for count in MICRO_BATCHES if schedule.refusal(ranks, count) is None]
    assert cases, f"refuses {MICRO_BATCHES} micro-batches on {RANKS} ranks"
    return cases
