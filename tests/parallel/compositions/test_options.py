"""Every option of every strategy says whether it is a feature, and those that are equal one process."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from forge_core.component import Component, fields_of
from forge_core.features import Feature, Neutral, declared, undeclared, used, values_of
from forge_core.layout import SIZES, Layout
from forge_core.registry import Registry
from forge_parallel.checks import compositions_are_proven, options_are_declared
from forge_parallel.pipeline.schedules import Interleaved, ZeroBubbleV
from forge_parallel.sections import Parallel, PipelineConfig, Precision
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from parallel.compositions.rows import names


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
