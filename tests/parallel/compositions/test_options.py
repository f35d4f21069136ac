"""Every option of every strategy says whether it is a feature, and those that are equal one process."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest

from forge_core.component import Component, fields_of
from forge_core.features import Feature, Neutral, declared, undeclared, used, values_of
from forge_core.layout import SIZES, Layout
from forge_core.registry import Registry
from forge_parallel.checks import compositions_are_proven, features, options_are_declared
from forge_parallel.components.pipeline import Interleaved, ZeroBubbleV
from forge_parallel.components.sections import Parallel, Pipeline, Precision
from forge_parallel.experts.transform import Expert
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import Shard
from forge_parallel.verify.proven import FEATURES, OPTION_TEST, is_proven
from forge_parallel.verify.proven_options import (
    EXPERT_OPTION_RUNS,
    LARGE_EXPERT_OPTION_RUNS,
    LARGE_OPTION_RUNS,
    MTP_OPTION_RUNS,
    OPTION_RUNS,
)
from harness.pool import World
from parallel.compositions.test_compositions import _name, equals_one_process, layout_of

ROWS = (*OPTION_RUNS, *LARGE_OPTION_RUNS, *MTP_OPTION_RUNS, *EXPERT_OPTION_RUNS, *LARGE_EXPERT_OPTION_RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("run", ROWS, ids=_name)
def test_an_option_equals_one_process(world: World, run: frozenset[str]) -> None:
    equals_one_process(world, run, tied=ROWS.index(run) % 2 == 0)


def test_the_rows_are_what_they_say() -> None:
    for run in ROWS:
        assert run <= FEATURES.keys()
        assert layout_of(run).world <= (8 if run in (*LARGE_OPTION_RUNS, *LARGE_EXPERT_OPTION_RUNS) else 4)
        assert "accumulate" in run or layout_of(run).pp == 1, "a pipeline always has several micro-batches"
    file, _, name = OPTION_TEST.partition("::")
    assert Path(__file__).match(file)
    assert name in globals()


def optioned() -> Iterator[tuple[str, type]]:
    """Everything with options that a layout depends on: installed transforms and schedules, and our sections."""
    registry = Registry()
    for group in ("forge.transforms", "forge.pipeline_schedules"):
        yield from ((f"{group} {name}", registry.load(group, name)) for name in registry.names(group))
    yield from (("[parallel]", Parallel), ("[parallel.pipeline]", Pipeline), ("[precision]", Precision))


def test_e1_every_option_of_every_strategy_is_a_feature_or_says_why_not() -> None:
    silent = {where: list(undeclared(cls)) for where, cls in optioned()}
    assert {where: fields for where, fields in silent.items() if fields} == {}
    said = [item for _, cls in optioned() for info in fields_of(cls) for item in declared(info)]
    assert {item.name for item in said if isinstance(item, Feature)} <= FEATURES.keys()
    assert all(len(item.why) > 10 for item in said if isinstance(item, Neutral))


def test_e1_every_feature_is_declared_by_an_option_or_is_a_component_itself() -> None:
    of_options = {i.name for _, cls in optioned() for f in fields_of(cls) for i in declared(f) if isinstance(i, Feature)}
    registry = Registry()
    schedules = {f"pp_{name}" for name in registry.names("forge.pipeline_schedules")}
    of_models = {"accumulate", "mtp", "experts"}
    assert of_options | schedules | set(registry.names("forge.transforms")) | of_models >= FEATURES.keys()


def test_e1_features_that_no_row_proves_are_refused() -> None:
    never = {name for name in FEATURES if not is_proven([name])}
    assert never == {"tp_asynchronous", "offload"}, "they need GPUs"


def job(schedule: Any = None, **transforms: Any) -> SimpleNamespace:
    """Eight sequences, one at a time, in fp32."""
    return SimpleNamespace(
        model=SimpleNamespace(),
        train=SimpleNamespace(global_batch=8, micro_batch=1),
        precision=Precision(compute="fp32"),
        parallel=Parallel(pipeline=Pipeline(schedule=schedule or ZeroBubbleV())),
        transforms=transforms,
    )


def test_e1_resharding_in_a_pipeline_is_a_feature() -> None:
    at = Layout.parse("dp2pp2")
    assert "reshard" in features(job(shard=Shard(reshard=True)), at)
    assert "reshard" not in features(job(shard=Shard(reshard=True)), Layout.parse("dp4")), "it is what every row does there"
    assert "keep_gathered" in features(job(shard=Shard(reshard=False)), Layout.parse("dp4"))
    assert list(compositions_are_proven(job(shard=Shard(reshard=True)), at)) == []


def test_e1_values_other_than_the_default_count_where_their_axis_does() -> None:
    assert features(job(expert=Expert(overlap=False)), Layout.parse("dp2ep2")) >= {"ep_in_turn", "ep_all_to_all"}
    assert "ep_in_turn" not in features(job(expert=Expert(overlap=False)), Layout.parse("dp2"))
    assert "recompute_full" in features(job(recompute=Recompute(policy="full")), Layout.parse("dp2"))
    assert "more_stages" in features(job(Interleaved(stages_per_rank=3)), Layout.parse("pp2"))
    assert "more_stages" not in features(job(Interleaved(stages_per_rank=3)), Layout.parse("dp2"))


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
    assert used(Mine, {"told": "b", "half": 1, "number": 2}, sizes) == {"mine_b"}, "1 is not True"
    assert used(Mine, {"told": "c", "half": True, "number": 2}, sizes | {"tp": 2}) == {"mine_half", "mine_number"}
    assert used(Mine, {"number": 1}, sizes | {"tp": 2}) == set()
    assert values_of(Annotated[Literal["x"] | bool | None, "note"]) == ("x", False, True, None)
    assert values_of(int) == ()
