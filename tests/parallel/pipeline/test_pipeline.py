"""Pipelines against one process: every schedule, tied and untied, any split, evaluation, and what each rank holds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import Transform
from forge_parallel.model.parallel_model import gathered
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline import schedules, stages
from forge_parallel.pipeline.schedules import DualPipeV, InterleavedZeroBubble, OneForwardOneBackward, ZeroBubbleV
from forge_parallel.step.step import Evaluation, Step
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.parity import Case, Measurement, compare, share, synthetic
from harness.pool import World, WorldFailed
from harness.siblings import fast
from parallel.cuttable import Frozen, PartTiny, Silent, Stray, Strided, Wide
from parallel.one_process import alone as once
from parallel.pipelines import SCHEDULES, decoder_case, measured, piped, realized
from parallel.tiny import VOCAB, cross_entropy


def _equal(world: World, case: Case, layout: str, schedule: str = "1f1b", split: str = "balanced") -> None:
    reference = once(measured, case, "1")
    found = world.run(measured, Layout.parse(layout).world, case, layout, schedule, split)
    for rank in found:
        difference = compare(reference, rank)
        assert difference.accepted("fp64"), difference
        assert (rank.loss, rank.norm, rank.tokens) == (found[0].loss, found[0].norm, found[0].tokens), "bitwise, on every rank"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", fast(True, of=[False, True]), ids=["untied", "tied"])
def test_a_schedule_equals_one_process(world: World, schedule: str, tied: bool) -> None:
    """Packed documents, and the first micro-batch without any label."""
    _equal(world, decoder_case(tied), "pp2", schedule)


@pytest.mark.parametrize(
    ("layout", "schedule", "split"),
    fast(
        ("pp2", "zbv", "1,2,1,1"),
        ("pp4", "1f1b", "1,1,2,1"),
        ("pp4", "gpipe", "balanced"),
        of=[
            ("pp2", "1f1b", "4,1"),
            ("pp2", "zbv", "1,2,1,1"),
            ("pp4", "1f1b", "1,1,2,1"),
            ("pp4", "gpipe", "balanced"),
            ("pp2dp2", "1f1b", "1,4"),
            ("pp2dp2", "interleaved", "2,1,1,1"),
        ],
    ),
)
def test_uneven_splits_and_more_ranks(world: World, layout: str, schedule: str, split: str) -> None:
    _equal(world, decoder_case(True, rows=16 if "dp" in layout else 8), layout, schedule, split)


def _evaluate(case: Case, layout: str, schedule: str) -> tuple[Evaluation, dict[str, float], Evaluation]:
    """Before and after a step, on batches of different sizes, one more than the pipeline has stages."""
    model = realized(case, layout, schedule)
    step = Step(model, case.objective)
    topology = model.topology

    def held_out() -> Any:
        for index, rows in enumerate((2, 1, 3, 1, 2)):
            yield from share(
                synthetic(replace(case, rows=rows * topology.data_size), 7 + index), topology.data_rank, topology.data_size, rows
            )

    before = step.evaluate(held_out())
    optimizer = case.optimizer(model)
    result = step(share(synthetic(case, 0), topology.data_rank, topology.data_size, case.micro_batch))
    between = step.evaluate(held_out())
    assert between == before, "the weights are the same, and gradients of a step do not matter"
    optimizer.step(result.skip)
    optimizer.zero_grad()
    assert all(part.training for part in model.parts)
    return before, result.numbers(), step.evaluate(held_out())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_and_metrics_equal_one_process(world: World, schedule: str) -> None:
    """No schedule takes part in an evaluation, so any number of batches of any size goes through; every rank has the loss."""
    case = decoder_case()
    expected = _evaluate(case, "1", schedule)
    assert expected[0].loss != expected[2].loss
    assert len(expected[1]) > 5, "the objective has metrics, which only the last stage sees"
    for before, numbers, after in world.run(_evaluate, 2, case, "pp2", schedule):
        assert before.tokens == expected[0].tokens
        assert before.loss == pytest.approx(expected[0].loss, rel=1e-12)
        assert numbers == pytest.approx(expected[1], rel=1e-12)
        assert after.loss == pytest.approx(expected[2].loss, rel=1e-10)


def test_evaluation_equals_one_process_on_more_ranks(world: World) -> None:
    case = decoder_case(rows=16)
    held = [found[0] for found in world.run(_evaluate, 4, case, "pp2dp2", "zbv")]
    assert len(set(held)) == 1


def _held(
    case: Case, layout: str, schedule: str
) -> tuple[dict[str, int], list[str], dict[str, torch.Tensor], int, dict[str, bool]]:
    """Elements of what this rank owns; what it follows; weights gathered over ranks; parameters; whether all is filled."""
    model = realized(case, layout, schedule)
    mine = {name: tensor.numel() for name, tensor in model.tensors()}
    whole = gathered(model, {name: tensor for name, tensor, _ in model.trainable()})
    every = [named for part in model.parts for named in (*part.named_parameters(), *part.named_buffers())]
    follows = sorted(set(model.everything) - set(mine))
    return mine, follows, whole, model.parameter_count(), {name: bool(torch.isfinite(t).all()) for name, t in every}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_no_rank_holds_the_model_and_all_together_hold_it_once(world: World, schedule: str) -> None:
    case = decoder_case()
    whole, _, weights, count, _ = _held(case, "1", schedule)
    ranks = world.run(_held, 2, case, "pp2", schedule)
    together: dict[str, int] = {}
    for mine, _, found, counted, filled in ranks:
        assert 0 < sum(mine.values()) < sum(whole.values())
        assert not together.keys() & mine.keys(), "a tensor belongs to one stage"
        together |= mine
        assert counted == count
        assert all(filled.values())
        assert all(torch.equal(weights[name], tensor) for name, tensor in found.items())
    assert together == whole
    assert [name for rank in ranks for name in rank[1]] == ["head.weight"], "the tied copy is on one rank, and nobody's own"


class Gathers(TorchDispatchMode):
    """Counts how often parameters are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.fsdp.all_gather_copy_in.default
        return func(*args, **(kwargs or {}))


def _gathers(case: Case, schedule: str, reshard: bool | None) -> tuple[int, int]:
    """(groups of parameters on this rank, how often one was gathered in a step)"""
    model = realized(case, "pp2dp2", schedule, shard=FullyShard(reshard=reshard))
    step = Step(model, case.objective)
    batches = share(synthetic(case, 0), model.topology.data_rank, 2, 1)
    step(batches)
    with Gathers() as gathers:
        step(batches)
    sharded = (module for part in model.parts for module in part.modules() if isinstance(module, FSDPModule))
    # A stage in the middle has no parameters but those of its blocks.
    return sum(module._get_fsdp_state()._fsdp_param_group is not None for module in sharded), gathers.count


@pytest.mark.parametrize("schedule", fast("1f1b", of=["1f1b", "zbv"]))
def test_gathered_parameters_are_kept_for_the_whole_step(world: World, schedule: str) -> None:
    case = decoder_case(rows=16)
    for groups, count in world.run(_gathers, 4, case, schedule, None):
        assert count == groups, "each once a step, whatever the number of micro-batches"
    for groups, count in world.run(_gathers, 4, case, schedule, True):
        assert count > groups, "a recipe may choose otherwise"


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("build", [PartTiny, Strided])
def test_any_model_that_describes_its_parts_can_be_cut(world: World, build: Any, schedule: str) -> None:
    """A list of blocks keeps its numbers, a buffer is filled, hidden states and their gradients may have any strides."""
    _equal(world, Case(build, cross_entropy, AdamWConfig(lr=1e-2).build, VOCAB, rows=4, steps=2), "pp2", schedule)


def test_a_stage_that_does_not_learn_takes_part(world: World) -> None:
    _equal(world, Case(Frozen, cross_entropy, AdamWConfig(lr=1e-2).build, VOCAB, rows=4, steps=2), "pp2", "1f1b", "1,3")


@pytest.mark.parametrize(
    ("build", "message"),
    [(Silent, "the modules after them"), (Stray, "cannot assign gain to a stage"), (Wide, r"stage 0 returned \(1, 16, 8\)")],
)
def test_what_cannot_be_cut_is_refused_by_name(world: World, build: Any, message: str) -> None:
    case = Case(build, cross_entropy, AdamWConfig(lr=1e-2).build, VOCAB, rows=4, steps=1)
    with pytest.raises(WorldFailed, match=message):
        world.run(measured, 2, case, "pp2")


def test_a_step_that_the_schedule_cannot_run_is_refused(world: World) -> None:
    with pytest.raises(WorldFailed, match="1f1b needs at least as many micro-batches as stages, 2, but a rank has 1 per step"):
        world.run(measured, 2, decoder_case(rows=8, micro_batch=8), "pp2")


@pytest.mark.parametrize("component", [InterleavedZeroBubble(), ZeroBubbleV(), DualPipeV()], ids=lambda one: type(one).__name__)
def test_halves_of_a_backward_are_refused_where_no_test_has_compared_them(
    component: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = component.build()
    monkeypatch.setattr(schedules, "_torch_release", lambda: (2, 11))
    assert "is proven from torch 2.13 on, and this is torch 2.11; update torch, or use" in (schedule.refusal(2, 8) or "")
    assert OneForwardOneBackward().build().refusal(2, 8) is None
    monkeypatch.setattr(schedules, "_torch_release", lambda: (2, 13))
    assert schedule.refusal(2, 8) is None


def _ragged(case: Case) -> None:
    model = realized(case, "pp2", "gpipe")
    batch = synthetic(case, 0)
    Step(model, case.objective)([*share(batch, 0, 2, 4), *share(batch, 1, 2, 2)])


def test_micro_batches_of_several_shapes_are_refused(world: World) -> None:
    with pytest.raises(WorldFailed, match="a pipeline needs micro-batches of equal shapes"):
        world.run(_ragged, 2, decoder_case())


def _without_objects(case: Case) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("an object was pickled and sent")

    names = [name for name in dir(dist) if name.endswith(("object_list", "gather_object")) or name == "all_gather_object"]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, never)
        model = realized(case, "pp2", "interleaved")
        step = Step(model, case.objective)
        step(share(synthetic(case, 0), 0, 1, 1))
        step.evaluate(share(synthetic(case, 0), 0, 1, 1))


def test_no_object_is_ever_pickled_between_stages(world: World) -> None:
    world.run(_without_objects, 2, decoder_case())


def _forgetful(case: Case, what: str) -> Measurement:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, what, lambda *_: None)
        return measured(case, "pp2")


@pytest.mark.parametrize("what", ["add_gradients", "refresh"])
def test_the_gate_sees_a_tie_that_is_forgotten(world: World, what: str) -> None:
    case = decoder_case()
    assert not compare(measured(case, "1"), world.run(_forgetful, 2, case, what)[0]).accepted("fp64")


class Halved(Transform):
    """Cuts the head in half and nothing else."""

    name, order, axes = "halved", 0, frozenset[str]()

    def apply(self, part: Any, context: Any) -> Any:
        if part.head is not None:
            part.head.weight = torch.nn.Parameter(part.head.weight[: VOCAB // 2])
        return part


def _halved(case: Case, schedule: str) -> None:
    realized(case, "pp2", schedule, Halved())


def test_in_bf16_only_a_table_that_stages_share_differs(world: World) -> None:
    """Its two uses are added in fp32 here and in bf16 by one process: by half a unit of bf16 a micro-batch, and to the better."""
    exact, low = decoder_case(layers=2, steps=1), decoder_case(layers=2, steps=1, compute="bf16", state="fp32")
    right, alone = measured(exact, "1").gradients, measured(low, "1").gradients
    for found in world.run(measured, 2, low, "pp2"):
        table = found.gradients.pop("embed.weight")
        assert all(torch.equal(gradient, alone[name]) for name, gradient in found.gradients.items())
        off, alone_off = ((one.double() - right["embed.weight"]).norm() for one in (table, alone["embed.weight"]))
        assert off < alone_off
        assert (table - alone["embed.weight"]).abs().max() <= 8 * 2**-9 * table.abs().max()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_tied_tensors_that_are_cut_differently_are_refused(world: World, schedule: str) -> None:
    with pytest.raises(WorldFailed, match=r"head\.weight and embed\.weight are tied, but a transform sharded them differently"):
        world.run(_halved, 2, decoder_case(), schedule)


def test_parts_have_no_single_module(world: World) -> None:
    with pytest.raises(WorldFailed, match=r"2 pipeline stages, so no rank holds the whole model; use \.parts"):
        world.run(_part, 2, decoder_case())


def _part(case: Case) -> None:
    _ = realized(case, "pp2", "1f1b").part


def test_a_plan_refuses_what_does_not_fit() -> None:
    layout = Layout.parse("pp2")
    with pytest.raises(PlanError, match=r"parallel\.pp = 2 but the plan has no pipeline"):
        Plan.of([], layout)
    assert Plan.of([], layout, piped("1f1b")).pipeline is not None
    assert Plan.of([], Layout(), piped("1f1b")).pipeline is None, "with one rank there is nothing to cut"
    for name, made in SCHEDULES.items():
        for transform in (Compile(), Recompute(keep=["matmul"])):
            if made.build().splits_backward:
                with pytest.raises(PlanError, match=f"pipeline schedule '{name}' splits the backward pass"):
                    Plan.of([transform], layout, piped(name))
            else:
                Plan.of([transform], layout, piped(name))
    Plan.of([Recompute(policy="full")], layout, piped("zbv"))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "packed"), [("1f1b", True), ("zbv", True), ("1f1b", False)])
def test_hidden_states_that_are_cut_along_the_sequence_travel_as_they_are(world: World, schedule: str, packed: bool) -> None:
    """Tensor parallelism leaves each rank a part of the sequence; the rest of what stages read, and the ties, are whole."""
    case = decoder_case()
    reference = _stepped(case, "1", schedule, packed)
    for found in world.run(_stepped, 4, case, "pp2tp2", schedule, packed):
        assert found == pytest.approx(reference, rel=1e-10)


def _stepped(case: Case, layout: str, schedule: str, packed: bool) -> dict[str, float]:
    """Numbers of the second step, which depend on the update of the first."""
    model = realized(case, layout, schedule, TensorParallel())
    step, optimizer = Step(model, case.objective), case.optimizer(model)
    numbers: dict[str, float] = {}
    for number in range(2):
        batches = share(synthetic(case, number), model.topology.data_rank, model.topology.data_size, case.micro_batch)
        result = step(batches if packed else [replace(batch, positions=None, documents=None) for batch in batches])
        optimizer.step(result.skip)
        optimizer.zero_grad()
        numbers = result.numbers()
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("layout", ["pp2dp2tp2", "pp2hsdp2x2", "pp2dp2cp2", "pp2cp2tp2", "pp2tp4", "pp4dp2"])
def test_three_axes_equal_one_process(world: World, layout: str, schedule: str) -> None:
    """On eight processes; four ranks with two stages each need as many blocks."""
    case = decoder_case(rows=16, layers=8)
    reference = measured(case, "1")
    for found in world.run(
        measured, Layout.parse(layout).world, case, layout, schedule, features=frozenset({"cp_ring"}), timeout=300
    ):
        difference = compare(reference, found)
        assert difference.accepted("fp64"), difference
