"""Splits and schedules as numbers: no process, no model. Splits against brute force, bubbles against the closed forms."""

import random
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel.checks import compositions_are_proven, pipeline_fits
from forge_parallel.pipeline import schedules as orders
from forge_parallel.pipeline.definition import balanced, refusal, split
from forge_parallel.pipeline.schedules import UNIT, Action, TorchSchedule, fake_stages, placement, simulate
from forge_parallel.sections import PipelineConfig as Section
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.recompute import Recompute
from parallel.compositions.rows import names

SCHEDULES = (
    orders.GPipe(),
    orders.OneForwardOneBackward(),
    orders.Interleaved(),
    orders.Interleaved(stages_per_rank=3),
    orders.InterleavedZeroBubble(),
    orders.ZeroBubbleV(),
    orders.DualPipeV(),
)


def _stage_costs(sizes: tuple[int, ...], costs: list[float], before: float, after: float) -> list[float]:
    ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
    found = [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    found[0] += before
    found[-1] += after
    return found


def _brute_force(costs: list[float], before: float, after: float, stages: int) -> list[tuple[int, ...]]:
    every = []
    for cuts in combinations(range(1, len(costs)), stages - 1):
        borders = (0, *cuts, len(costs))
        every.append(tuple(high - low for low, high in pairwise(borders)))
    return every


@pytest.mark.parametrize("blocks", range(1, 13))
def test_a_balanced_split_is_as_good_as_any(blocks: int) -> None:
    """The largest cost of a stage is the least of all splits; and of the splits that reach it, none is more even."""
    draw = random.Random(blocks)
    for stages in range(1, blocks + 1):
        costs = [float(draw.choice([1, 1, 2, 7])) for _ in range(blocks)]
        before, after = draw.choice([0.0, 3.0]), draw.choice([0.0, 2.0, 9.0])
        sizes = balanced(costs, before, after, stages)
        found = _stage_costs(sizes, costs, before, after)
        others = [_stage_costs(other, costs, before, after) for other in _brute_force(costs, before, after, stages)]
        assert sum(sizes) == blocks
        assert len(sizes) == stages
        assert max(found) == min(map(max, others))
        assert sum(c * c for c in found) == min(sum(c * c for c in other) for other in others if max(other) == max(found))


def test_a_heavy_head_takes_blocks_off_the_last_stage() -> None:
    assert balanced([1.0] * 16, 0.0, 0.0, 4) == (4, 4, 4, 4)
    assert balanced([1.0] * 14, 0.0, 2.0, 4) == (4, 4, 4, 2)


def test_an_explicit_split_is_taken_at_its_word() -> None:
    assert split("5,4,4,3", [1.0] * 16, 0.0, 100.0, 4) == (5, 4, 4, 3)


@pytest.mark.parametrize(
    ("text", "blocks", "stages", "message"),
    [
        ("balanced", 3, 4, "3 blocks cannot be split over 4 stages"),
        ("5,4", 9, 4, "for 2 stages, but there are 4"),
        ("5,4,4,4", 16, 4, "has 17 blocks, but the model has 16"),
    ],
)
def test_a_split_that_does_not_fit_says_why(text: str, blocks: int, stages: int, message: str) -> None:
    assert message in str(refusal(text, blocks, stages))
    with pytest.raises(PlanError, match=message):
        split(text, [1.0] * blocks, 0.0, 0.0, stages)


@pytest.mark.parametrize("text", ["", "4,0,4", "4;4", "even", "4,,4", "-1,5"])
def test_a_split_that_cannot_be_read_is_a_fault_of_the_recipe(text: str) -> None:
    with pytest.raises(ValueError, match=r"the split .* is not valid"):
        Section(schedule=orders.GPipe(), split=text)


@pytest.mark.parametrize("component", SCHEDULES, ids=lambda component: component.build().name)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.usefixtures("newer_torch")
def test_refusals_are_those_of_torch(component: Any, ranks: int) -> None:
    """A number of micro-batches is refused exactly where torch's schedule would raise, and a number that is offered works."""
    schedule: TorchSchedule = component.build()
    for micro_batches in range(1, 18):
        why = schedule.refusal(ranks, micro_batches)
        if why is None:
            schedule(fake_stages(schedule, ranks), micro_batches, lambda output, _: output)
            continue
        with pytest.raises(ValueError, match=r"micro-?batches"):
            schedule(fake_stages(schedule, ranks), micro_batches, lambda output, _: output)
        if ", or " in why:
            assert schedule.refusal(ranks, int(why.split()[-1])) is None
    assert schedule.refusal(ranks, 0) is not None


@pytest.mark.parametrize("component", SCHEDULES, ids=lambda component: component.build().name)
def test_every_stage_meets_every_micro_batch_once(component: Any) -> None:
    schedule: TorchSchedule = component.build()
    where = placement(schedule, 3)
    table = schedule.actions(3, 6)
    for rank, order in enumerate(table):
        assert all(where[action.stage] == rank for action in order)
        assert len(set(order)) == len(order)
        for stage in (stage for stage, its in enumerate(where) if its == rank):
            for micro_batch in range(6):
                kinds = {action.kind for action in order if action[1:] == (stage, micro_batch)}
                assert kinds in ({"F", "B"}, {"F", "I", "W"})
    assert any(action.kind == "I" for order in table for action in order) == schedule.splits_backward


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 16, 32])
@pytest.mark.usefixtures("newer_torch")
def test_bubbles_have_the_closed_form(ranks: int, micro_batches: int) -> None:
    """Forward 1, backward 2 = 1 + 1: (p - 1) / M for GPipe and 1F1B, divided by the stages per rank when interleaved
    (Narayanan et al., 2021); what zero-bubble schedules leave is the way of the first forward to the last rank, p - 1 units
    of the 6 M that a rank works (Qi et al., 2024)."""

    def bubble(component: Any) -> float:
        schedule = component.build()
        assert schedule.refusal(ranks, micro_batches) is None
        return simulate(schedule.actions(ranks, micro_batches), len(placement(schedule, ranks)), UNIT).bubble

    assert bubble(orders.GPipe()) == pytest.approx((ranks - 1) / micro_batches)
    assert bubble(orders.OneForwardOneBackward()) == pytest.approx((ranks - 1) / micro_batches)
    if micro_batches % ranks == 0:
        for stages in (2, 3):
            interleaved = orders.Interleaved(stages_per_rank=stages)
            assert bubble(interleaved) == pytest.approx((ranks - 1) / (stages * micro_batches))
        assert bubble(orders.InterleavedZeroBubble()) == pytest.approx((ranks - 1) / (6 * micro_batches))
    if micro_batches >= 2 * ranks:
        assert bubble(orders.ZeroBubbleV()) == pytest.approx((ranks - 1) / (6 * micro_batches))
        assert bubble(orders.DualPipeV()) == pytest.approx((ranks - 1) / (6 * micro_batches))


def test_1f1b_keeps_fewer_activations_than_gpipe() -> None:
    """Forwards that wait for their backward: all M for GPipe, at most the stages from here to the end for 1F1B."""

    def kept(component: Any) -> list[int]:
        most = []
        for order in component.build().actions(4, 16):
            sizes = [0]
            for action in order:
                sizes.append(sizes[-1] + (1 if action.kind == "F" else -1))
            most.append(max(sizes))
        return most

    assert kept(orders.GPipe()) == [16] * 4
    assert kept(orders.OneForwardOneBackward()) == [4, 3, 2, 1]


def test_an_order_that_never_ends_is_found() -> None:
    table = ([Action("F", 0, 0), Action("B", 0, 0)], [Action("B", 1, 0), Action("F", 1, 0)])
    with pytest.raises(PlanError, match="ranks wait at"):
        simulate(table, 2)


def _job(component: Any, split: str = "balanced", rows: int = 16, layers: int | None = 8, **transforms: Any) -> Any:
    return SimpleNamespace(
        train=SimpleNamespace(global_batch=rows, micro_batch=2),
        precision=SimpleNamespace(compute="fp32", state="fp32"),
        parallel=SimpleNamespace(pipeline=Section(schedule=component, split=split)),
        model=SimpleNamespace(layers=layers),
        transforms=transforms,
    )


@pytest.mark.usefixtures("newer_torch")
def test_faults_of_a_recipe_name_their_keys() -> None:
    layout = Layout.parse("pp4dp2")
    assert list(pipeline_fits(_job(orders.GPipe()), layout)) == []
    assert list(pipeline_fits(_job(orders.DualPipeV(), layers=1), Layout())) == []
    faults = list(pipeline_fits(_job(orders.DualPipeV(), "1,1", layers=7), layout))
    assert [fault.key for fault in faults] == ["parallel.pipeline.split", "parallel.pipeline.schedule"]
    assert "7 blocks cannot be split over 8 stages" in faults[0].message
    assert "at least as many micro-batches as stages, 8, but a rank has 4" in faults[1].message
    assert list(pipeline_fits(_job(orders.GPipe(), layers=None), layout)) == [], "what is not known is not judged"


def test_compositions_that_no_run_proves_are_refused() -> None:
    layout = Layout.parse("pp2dp2")
    assert names(_job(orders.ZeroBubbleV()), layout) == {"pp_zbv", "dp_shard", "accumulate"}
    assert list(compositions_are_proven(_job(orders.OneForwardOneBackward(), compile=Compile()), layout)) == []
    assert list(compositions_are_proven(_job(orders.ZeroBubbleV(), recompute=Recompute()), layout)) == []
    (fault,) = compositions_are_proven(_job(orders.ZeroBubbleV(), compile=Compile()), layout)
    assert "'zbv'" in fault.message
    assert "transforms.compile" in fault.message
