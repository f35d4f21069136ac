"""The rows of `forge_parallel.verify.proofs`: every strategy, in any composition that is offered, against one process.

A tiny decoder with grouped-query attention, packed documents, rows with very different numbers of labels, and one micro-batch
without any. In fp64 a layout has to give one process's loss, norm, gradients and weights to 1e-10; in float8 with fp32 sums those
of one process in float8 to 2e-6. In bf16 sums are rounded at other places, in fp32 by some strategies, after which a number may
become the neighboring float8: there a layout may be twice as far from the exact numbers as one process in that precision is, and
no farther. A sum that is missing, or made twice, is ten to a hundred times farther.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
import torch

from forge_core.component import Component, fields_of
from forge_core.features import Feature, Neutral, declared, interact, undeclared, used, values_of
from forge_core.layout import SIZES, Layout
from forge_core.registry import Registry
from forge_parallel.checks import compositions_are_proven, options_are_declared
from forge_parallel.pipeline.schedules import Interleaved, ZeroBubbleV
from forge_parallel.sections import Parallel, PipelineConfig, Precision
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify import proofs
from forge_parallel.verify.parity import Measurement, compare
from forge_parallel.verify.proofs import features
from forge_train.recipe.load import load_recipe
from harness.closeness import below
from harness.pool import World
from harness.siblings import fast
from parallel.compositions import generate
from parallel.compositions.rows import LOW, case_of, job_of, layout_of, measured, names
from parallel.one_process import alone as once

ROWS = proofs.proven_rows()


def equals_one_process(
    world: World, row: frozenset[str], measured: Callable[..., Measurement] = measured, group: bool = True, steps: int = 3
) -> None:
    case, layout = replace(case_of(row), steps=steps), layout_of(row)
    exact = once(measured, case, "1", frozenset())
    if row.isdisjoint(LOW):
        for found in world.run(measured, layout.world, case, str(layout), row, timeout=400, group=group):
            difference = compare(exact, found)
            assert difference.accepted("fp64"), difference
        return
    compute = "bf16" if "bf16" in row else "fp32"
    case = replace(case, compute=compute, state="bf16" if "bf16_state" in row else "fp32", steps=1)
    alone = once(measured, case, "1", row & {"float8", "float8_rowwise", "float8_experts"})
    for found in world.run(measured, layout.world, case, str(layout), row, timeout=400, group=group):
        difference = compare(alone, found)
        # Whether the same numbers are rounded to float8: experts on several ranks add theirs in another order.
        if compute == "fp32" and row.isdisjoint({"compile", "tp_whole", "float8_rowwise", "experts"}):
            assert difference.accepted("fp32"), difference
        else:
            assert difference.initial
            _is_as_near_as(exact, alone, found)


def _is_as_near_as(exact: Measurement, alone: Measurement, found: Measurement) -> None:
    assert found.tokens == alone.tokens
    for name, gradient in exact.gradients.items():
        allowed, least = 2 * _distance(gradient, alone.gradients[name]), 1e-3
        if gradient.numel() == 1:  # such as a gate: its error is not an average, so those of its module show what is usual
            module = name.rpartition(".")[0]
            others = [other for other in exact.gradients if other.rpartition(".")[0] == module]
            least = min(0.25, max(2e-2, *(_distance(exact.gradients[other], alone.gradients[other]) for other in others)))
        assert below(_distance(gradient, found.gradients[name]), max(allowed, least)), name
    assert found.loss == pytest.approx(alone.loss, rel=2e-3)
    assert found.norm == pytest.approx(alone.norm, rel=2e-2)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    whole = float(a.double().norm())
    difference = float((a.double() - b.double()).norm())
    return difference / whole if whole else difference  # closed gates let nothing through


def _name(row: frozenset[str]) -> str:
    return generate.text_of(row).replace(" ", "+")


@pytest.mark.parametrize("row", ROWS["fast"], ids=_name)
def test_a_run_equals_one_process(world: World, row: frozenset[str]) -> None:
    """The second step shows gradients that were not cleared, and the state of the optimizer."""
    equals_one_process(world, row, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS["slow"], ids=_name)
def test_the_remaining_pairs_equal_one_process(world: World, row: frozenset[str]) -> None:
    equals_one_process(world, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS["large"], ids=_name)
def test_three_axes_and_more_equal_one_process(world: World, row: frozenset[str]) -> None:
    equals_one_process(world, row)


@pytest.mark.usefixtures("newer_torch")
def test_every_row_is_a_recipe_with_just_its_features() -> None:
    base = load_recipe("debug", ["--hooks=[]"], 1, Registry()).job
    for kind, rows in ROWS.items():
        for row in rows:
            assert {use.name for use in features(job_of(row, base), layout_of(row))} == row
            assert layout_of(row).world <= {"fast": 4, "large": 16}.get(kind, 8)
            assert kind == "gpu" or generate.legal(row), "a check refuses it"
    for test in proofs.TESTS.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[3] / file).read_text()


@pytest.mark.parametrize("part", fast(0, of=range(6)))
def test_every_pair_that_is_offered_is_proven(part: int) -> None:
    """What no row has is refused by a check, or named with its reason; what fp64 can show is shown in fp64. Each part looks for
    rows of a sixth of the pairs that no row has."""
    base = load_recipe("debug", ["--hooks=[]"], 1, Registry()).job
    shown = {pair for kind in proofs.TESTS for row in ROWS[kind] for pair in generate.pairs_of(row)}
    names = generate.declared_features() - generate.ON_GPUS
    assert {frozenset([name]) for name in names} <= shown
    planes = {
        use.name: use.plane for rows in ROWS.values() for row in rows for use in features(job_of(row, base), layout_of(row))
    }
    missing = [
        frozenset(pair)
        for pair in combinations(sorted(names), 2)
        if interact(planes[pair[0]], planes[pair[1]]) and frozenset(pair) not in shown
    ]
    offered = generate.offered(missing[part::6])
    assert not offered, "run parallel.compositions.generate"
    assert not shown & generate.NOT_OFFERED.keys()


def test_features_that_no_row_proves_are_refused() -> None:
    never = {name for name in generate.declared_features() if not proofs.is_proven([name])}
    assert never == generate.ON_GPUS, "they need GPUs"


def test_all_axes_meet() -> None:
    """Each three of the axes on eight ranks, and all that a model can have at once on sixteen."""
    axes = ("dp_shard", "dp_replicate", "tp", "cp", "pp")
    met = [{axis for axis in axes if any(name == axis or name.startswith(f"{axis}_") for name in row)} for row in ROWS["large"]]
    assert all(any(set(three) <= found for found in met) for three in combinations(axes, 3))
    whole = [row for row in ROWS["large"] if layout_of(row).world == 16]
    assert any({"dp_shard", "tp"} < row and "experts" not in row and layout_of(row).size("cp") == 2 for row in whole)
    assert any({"experts", "dp_shard", "tp"} < row and layout_of(row).size("ep") > 1 and layout_of(row).pp == 2 for row in whole)


def optioned() -> Iterator[tuple[str, type]]:
    """Everything with options that a layout depends on: installed transforms and schedules, and our sections."""
    registry = Registry()
    for group in ("forge.transforms", "forge.pipeline_schedules"):
        yield from ((f"{group} {name}", registry.load(group, name)) for name in registry.names(group))
    yield from (("[parallel]", Parallel), ("[parallel.pipeline]", PipelineConfig), ("[precision]", Precision))


def test_e1_every_option_of_every_strategy_is_a_feature_or_says_why_not() -> None:
    silent = {where: list(undeclared(cls)) for where, cls in optioned()}
    assert {where: fields for where, fields in silent.items() if fields} == {}
    said = [item for _, cls in optioned() for info in fields_of(cls) for item in declared(info)]
    assert all(len(item.why) > 10 for item in said if isinstance(item, Neutral))


def job(schedule: Any = None, **transforms: Any) -> SimpleNamespace:
    """Eight sequences, one at a time, in fp32."""
    return SimpleNamespace(
        model=SimpleNamespace(),
        train=SimpleNamespace(global_batch=8, micro_batch=1),
        precision=Precision(compute="fp32"),
        parallel=Parallel(pipeline=PipelineConfig(schedule=schedule or ZeroBubbleV())),
        transforms=transforms,
    )


def test_e1_resharding_in_a_pipeline_is_a_feature() -> None:
    at = Layout.parse("dp2pp2")
    assert "reshard" in names(job(shard=FullyShard(reshard=True)), at)
    assert "reshard" not in names(job(shard=FullyShard(reshard=True)), Layout.parse("dp4")), "it is what every row does there"
    assert "keep_gathered" in names(job(shard=FullyShard(reshard=False)), Layout.parse("dp4"))
    assert list(compositions_are_proven(job(shard=FullyShard(reshard=True)), at)) == []


def test_e1_values_other_than_the_default_count_where_their_axis_does() -> None:
    assert names(job(expert=ExpertParallel(overlap=False)), Layout.parse("dp2ep2")) >= {"ep_in_turn", "ep_all_to_all"}
    assert "ep_in_turn" not in names(job(expert=ExpertParallel(overlap=False)), Layout.parse("dp2"))
    assert "recompute_full" in names(job(recompute=Recompute(policy="full")), Layout.parse("dp2"))
    assert "more_stages" in names(job(Interleaved(stages_per_rank=3)), Layout.parse("pp2"))
    assert "more_stages" not in names(job(Interleaved(stages_per_rank=3)), Layout.parse("dp2"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Component):
    """A plugin with options of all kinds; some say nothing."""

    told: Annotated[Literal["a", "b", "c"], Feature("mine_b", when="b"), Neutral("only a name", when="c")] = "a"
    half: Annotated[bool | None, Feature("mine_half", when=True)] = None
    silent: int = 3
    number: Annotated[int, Feature("mine_number", unless=1, axis="tp")] = 1

    def build(self) -> Any:
        raise NotImplementedError


def test_e1_an_option_of_a_plugin_that_says_nothing_is_refused_in_a_layout() -> None:
    given = job(mine=Mine())
    faults = {fault.key: fault for fault in options_are_declared(given, Layout.parse("dp2"))}
    assert faults.keys() == {"transforms.mine.half", "transforms.mine.silent"}
    assert "for False" in faults["transforms.mine.half"].message
    assert "Mine" in faults["transforms.mine.silent"].hint and "Neutral" in faults["transforms.mine.silent"].hint
    assert list(options_are_declared(given, Layout())) == [], "on one process there is no collective"
    scheduled = job(schedule=Mine())
    assert {f.key for f in options_are_declared(scheduled, Layout.parse("pp2"))} == {
        "parallel.pipeline.schedule.half",
        "parallel.pipeline.schedule.silent",
    }
    assert list(options_are_declared(scheduled, Layout.parse("dp2"))) == []


def test_values_are_told_apart_by_type_and_axis() -> None:
    sizes = dict.fromkeys(SIZES, 1)
    assert [use.name for use in used(Mine, {"told": "b", "half": 1, "number": 2}, sizes)] == ["mine_b"], "1 is not True"
    found = used(Mine, {"told": "c", "half": True, "number": 2}, sizes | {"tp": 2}, "transforms.mine")
    assert [(use.name, use.key) for use in found] == [
        ("mine_half", "transforms.mine.half = true"),
        ("mine_number", "transforms.mine.number = 2 (parallel.tp = 2)"),
    ]
    assert used(Mine, {"number": 1}, sizes | {"tp": 2}) == []
    assert values_of(Annotated[Literal["x"] | bool | None, "note"]) == ("x", False, True, None)
    assert values_of(int) == ()
