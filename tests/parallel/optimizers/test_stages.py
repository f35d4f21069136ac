"""Stages of training: what is frozen when, against optimizers made by hand, and in layouts against one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from forge_core.errors import PlanError
from forge_core.registry import Registry
from forge_core.specs import Specs
from forge_parallel.model.parallel_model import rest
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim import optimizers
from forge_parallel.optim.groups import NO_SETTINGS, Setting, Settings, TrainingStage, grouped
from forge_parallel.optim.groups import ParameterGroup as Group
from forge_parallel.optim.optimizers import AdamW8bitConfig, AdamWConfig, LionConfig, ScheduleFreeAdamWConfig
from forge_parallel.optim.stages import apply, settings_of, stage_at, staged
from forge_parallel.placement.topology import Topology
from forge_parallel.sections import PipelineConfig
from forge_parallel.step.step import Step
from forge_parallel.verify.parity import Measurement, compare, share, synthetic
from forge_parallel.verify.proofs import features
from forge_train.recipe.load import load_recipe
from harness.pool import World
from parallel.compositions.rows import CPU, DECODER, case_of, job_of, layout_of, measured, precision_of, schedule_of

ENDS = ("blocks.3.*", "norm.weight", "head.weight")
STAGES = (
    TrainingStage(until=1, train=ENDS),
    TrainingStage(
        until=3, train=("blocks.1.*", "blocks.3.*", "embed.weight"), lr={"blocks.1.*": 0.5}, weight_decay={"blocks.*": 0.3}
    ),
    TrainingStage(train=("*",), warmup={"blocks.0.*": 2}),
)
"""Of four steps. The first of two stages of a pipeline has nothing that learns at first; the table has no state then."""

NAMES = ("embed.weight", "encoder.proj.weight", "encoder.norm.weight", "blocks.0.qkv.weight", "blocks.1.qkv.weight")
SPECS = Specs({}, {}, (), {}, ties={"head.weight": "embed.weight"}, roles={"eyes": frozenset(NAMES[1:3])})


def _settled(*stages: TrainingStage, before: Settings = NO_SETTINGS) -> Settings:
    return staged(stages, NAMES, SPECS, before)


def test_settings_follow_from_roles_patterns_and_the_step() -> None:
    before = grouped([Group(match="blocks.*", lr=0.5), Group(match="blocks.1.*", frozen=True)], NAMES, {})
    found = _settled(
        TrainingStage(until=3, train=("eyes",), lr={"eyes": 4.0, "*.norm.*": 2.0}, warmup=5),
        TrainingStage(until=7, train=("eyes", "blocks.*"), lr={"blocks.*": 3.0}, weight_decay={"*": 0.2}, warmup={"*.norm.*": 2}),
        TrainingStage(train=("blocks.0.*",)),
        before=before,
    )
    one, two, three = found.stages
    assert one.frozen == {"embed.weight", "blocks.0.qkv.weight", "blocks.1.qkv.weight"}
    assert one.of("encoder.proj.weight") == Setting(lr=4.0, warmup=5) and one.of("encoder.norm.weight") == Setting(2.0, warmup=5)
    assert two.frozen == {"embed.weight", "blocks.1.qkv.weight"}  # what a group freezes, no stage trains
    assert two.of("blocks.0.qkv.weight") == Setting(lr=1.5, weight_decay=0.2)
    assert two.of("encoder.norm.weight") == Setting(weight_decay=0.2, warmup=2)
    assert three.of("blocks.0.qkv.weight") == Setting(lr=0.5) and three.frozen == set(NAMES) - {"blocks.0.qkv.weight"}
    assert [one.first, two.first, three.first] == [0, 3, 7]
    assert found.frozen == {"embed.weight", "blocks.1.qkv.weight"}  # in every stage
    assert found.of("encoder.norm.weight") == Setting(2.0, warmup=5) and found.of("blocks.0.qkv.weight").lr == 1.5
    assert [stage_at(found.stages, step) for step in (0, 2, 3, 6, 7, 100)] == [0, 0, 1, 1, 2, 2]
    assert _settled(before=before) is before


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (TrainingStage(train=("eye",)), r"train\.stages\.0\.train: 'eye' matches no parameter of the model; did you mean 'eyes'"),
        (TrainingStage(train=("blocks.*.qvk.*",)), r"stages\.0\.train: 'blocks.*did you mean 'blocks\.\*\.qkv\.\*'"),
        (TrainingStage(train=("head.weight",)), "matches only head.weight, which is tied to embed.weight; use embed.weight"),
        (
            TrainingStage(train=("blocks.1.*", "eyes")),
            "parameters.groups or the model itself freezes all parameters that 'blocks.1.*' matches",
        ),
        (
            TrainingStage(train=("eyes",), lr={"blocks.0.*": 2.0}),
            r"stages\.0\.lr: the stage trains no parameter of 'blocks\.0\.\*'; add it to",
        ),
        (
            TrainingStage(train=("eyes",), weight_decay={"embed.*": 0.1}),
            r"stages\.0\.weight_decay: the stage trains no parameter of 'embed",
        ),
        (TrainingStage(train=("eyes",), warmup={"eys": 2}), r"stages\.0\.warmup: 'eys' matches no parameter .* 'eyes'"),
    ],
)
def test_what_names_nothing_is_refused_with_what_is_near(stage: TrainingStage, message: str) -> None:
    before = grouped([Group(match="blocks.1.*", frozen=True)], NAMES, {})
    with pytest.raises(PlanError, match=message):
        _settled(stage, before=before)


def _laid_out(component: Any, stages: tuple[TrainingStage, ...]) -> tuple[Any, Any, Step]:
    blueprint = Blueprint.of(DECODER.build)
    settings = settings_of(blueprint, stages=stages)
    layout = layout_of(frozenset())
    model = realize(apply(blueprint, settings), Plan.of([], layout), Topology.of(layout, CPU), 0, "fp64", "fp64")
    return model, optimizers.build_optimizer(component, model, settings), Step(model, case_of(frozenset()).objective)


def _batches(step: int) -> Any:
    case = case_of(frozenset())
    return share(synthetic(case, step), 0, 1, case.micro_batch)


def test_each_parameter_moves_as_by_an_adamw_that_was_made_when_its_stage_began() -> None:
    """torch's AdamW, one for each parameter: made where the parameter begins, dropped where it is frozen, its rate by hand."""
    model, optimizer, step = _laid_out(AdamWConfig(lr=1e-2, weight_decay=0.1), STAGES)
    held = dict(model.parameters_held())
    matrices = {name for name, spec in model.specs.tensors.items() if spec.group in ("matrix", "head", "router")}
    trained: list[set[str]] = [
        {name for name in held if name.startswith("blocks.3.") or name in ENDS},
        {name for name in held if name.startswith(("blocks.1.", "blocks.3.")) or name == "embed.weight"},
        set(held),
    ]
    shadow = {name: tensor.detach().clone().requires_grad_() for name, tensor in held.items()}
    by_hand: dict[str, torch.optim.AdamW] = {}
    for index, stage in enumerate((0, 1, 1, 2, 2)):
        optimizer.at_step(index)
        optimizer.set_factor(0.5)
        result = step(_batches(index))
        names = {name for name, tensor in held.items() if tensor.grad is not None}
        assert names == trained[stage] == {name for name, _, _ in model.trainable()}
        squares = sum(float(held[name].grad.square().sum()) for name in names)  # type: ignore[union-attr]
        assert result.numbers()["grad_norm"] == pytest.approx(squares**0.5, rel=1e-12)
        state = optimizer.state()
        assert all(set(tensors) == names for tensors in state.values())
        by_hand = {name: by_hand[name] if name in by_hand else torch.optim.AdamW([shadow[name]]) for name in names}
        for name, own in by_hand.items():
            shadow[name].grad = held[name].grad.clone()  # type: ignore[union-attr]
            decay = 0.1 if name in matrices else 0.0
            factor = 0.5
            if stage == 1:
                decay = 0.3 if name.startswith("blocks.") else decay
                factor *= 0.5 if name.startswith("blocks.1.") else 1.0
            if stage == 2 and name.startswith("blocks.0."):
                factor *= (index - 3 + 1) / 2
            own.param_groups[0] |= {"lr": 1e-2 * factor, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}
            own.step()
        assert optimizer.lr == pytest.approx(0.5e-2)
        optimizer.step(result.skip)
        optimizer.zero_grad()
        for name, tensor in held.items():
            torch.testing.assert_close(tensor.detach(), shadow[name].detach(), rtol=1e-10, atol=1e-13, msg=f"{index} {name}")
            assert name in trained[stage] or tensor.grad is None


def test_modules_without_anything_to_learn_run_as_in_evaluation() -> None:
    model, optimizer, _ = _laid_out(AdamWConfig(), STAGES)
    blocks = model.part.blocks
    assert model.part.training and not model.part.embed.training and blocks.training and blocks["3"].training
    assert not any(module.training for module in blocks["0"].modules())
    with model.inference():
        pass
    assert not blocks["0"].training and blocks["3"].training
    optimizer.at_step(1)
    assert model.part.embed.training and not blocks["2"].mlp.training and not model.part.head.training
    optimizer.at_step(3)
    assert all(module.training for module in model.part.modules())


def test_an_optimizer_whose_states_are_not_of_parameters_is_refused() -> None:
    class OneCount:
        shards = "elementwise"

        def build(self, model: Any) -> Any:
            made = AdamWConfig().build(model)
            made.state = lambda: {"count": {"all": torch.zeros(())}}
            return made

    with pytest.raises(PlanError, match=r"has a state whose name is not that of a parameter.*train\.stages"):
        _laid_out(OneCount(), (TrainingStage(train=("*",)),))


def test_dropout_of_what_is_frozen_does_not_drop() -> None:
    """And what has no parameters by itself follows the module that it is in."""
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).requires_grad_(False)
    part = nn.ModuleDict({"frozen": frozen, "mixed": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), "drop": nn.Dropout(0.5)})
    rest(part)
    assert not frozen[1].training and part["mixed"][1].training and part["drop"].training and part.training  # type: ignore[index]
    x = torch.ones(5, 2)
    assert torch.equal(frozen(x), frozen[0](x))
    everything = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    rest(everything)
    assert everything.training and not everything[0].training


@pytest.mark.parametrize(
    "component", [AdamWConfig(lr=1e-2), LionConfig(), AdamW8bitConfig(block=4, smallest=0), ScheduleFreeAdamWConfig()], ids=str
)
def test_a_step_that_is_skipped_does_not_hold_a_stage_up(component: Any) -> None:
    """The stage follows from the step: of one that is skipped at the border nothing moves, and what begins has no step yet."""
    model, optimizer, step = _laid_out(component, STAGES)
    for index in range(2):
        optimizer.at_step(index)
        optimizer.set_factor(1.0)
        result = step(_batches(index))
        before = {name: tensor.detach().clone() for name, tensor in model.parameters_held()}
        optimizer.step(result.skip if index == 0 else torch.ones(()))
        optimizer.zero_grad()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.parameters_held())
    counts = optimizer.state()["step"]
    assert {name for name in counts if name.startswith("blocks.3.")} and "norm.weight" not in counts
    assert all(float(count) == (1 if name.startswith("blocks.3.") else 0) for name, count in counts.items())


def test_a_decay_that_an_optimizer_does_not_have_is_refused() -> None:
    class Bare:
        shards = "elementwise"

        def build(self, model: Any) -> Any:
            return AdamWConfig().build(model)

    with pytest.raises(PlanError, match=r"weight_decay = 0.3 of blocks.*has no key weight_decay.*train.stages"):
        _, optimizer, _ = _laid_out(Bare(), STAGES)
        optimizer.at_step(1)


ROWS = ("dp_shard accumulate recompute", "dp_shard bf16", "tp", "pp_1f1b accumulate", "dp_shard experts ep_all_to_all accumulate")
SLOW = (
    "dp_shard dp_replicate",
    "pp_1f1b dp_shard accumulate tied",
    "dp_shard muon",
    "cp_ring",
    "pp_zbv accumulate",
    "dp_shard compile accumulate recompute",
)


def _measured(row: str, layout: str) -> Measurement:
    words = frozenset(row.split())
    stages = STAGES if "tied" not in words else tuple(replace(stage, train=stage.train[:-1]) for stage in STAGES[:2]) + STAGES[2:]
    precision = precision_of(words)
    case = replace(case_of(words), stages=stages, steps=4, compute=precision.compute, state=precision.state)
    return measured(case, layout, words)


def _equal(world: World, row: str) -> None:
    alone, layout = _measured(row, "1"), layout_of(frozenset(row.split()))
    assert not torch.equal(alone.weights["embed.weight"], alone.initial["embed.weight"])
    assert alone.gradients and not any(name.startswith(("embed", "blocks.0", "blocks.1")) for name in alone.gradients)
    for found in world.run(_measured, layout.world, row, str(layout)):
        difference = compare(alone, found)
        if "bf16" in row:  # Adam makes whole steps of rounded gradients, so that only numbers of steps can be compared
            assert difference.initial and max(difference.loss, difference.norm) < 1e-2, difference
        else:
            assert difference.accepted("fp64"), difference


@pytest.mark.parametrize("row", ROWS)
def test_stages_in_a_layout_are_those_of_one_process(world: World, row: str) -> None:
    _equal(world, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW)
def test_stages_in_further_layouts_are_those_of_one_process(world: World, row: str) -> None:
    _equal(world, row)


def _copy_learns() -> list[bool]:
    """Of a copy of the table on the last stage, in each stage of training: the original's name says it."""
    words = frozenset(["pp_1f1b", "tied"])
    case = replace(case_of(words), stages=(TrainingStage(until=1, train=("blocks.*",)), TrainingStage(train=("embed.weight",))))
    blueprint, settings = case.blueprint()
    layout = layout_of(words)
    plan = Plan.of([], layout, PipelineConfig(schedule=schedule_of(words)).build())
    model = realize(blueprint, plan, Topology.of(layout, CPU), 0, "fp64", "fp64")
    optimizer: Any = optimizers.build_optimizer(AdamWConfig(), model, settings)
    found = []
    for step in range(2):
        optimizer.at_step(step)
        found += [tensor.requires_grad for name, tensor in model.everything.items() if name in ("embed.weight", "head.weight")]
    return found


def test_a_tied_copy_on_another_stage_is_frozen_with_its_original(world: World) -> None:
    assert world.run(_copy_learns, 2) == [[False, True], [False, True]]


def test_a_stage_that_freezes_uses_the_feature_of_frozen_parameters() -> None:
    def used(*stages: TrainingStage) -> list[str]:
        job = job_of(frozenset({"dp_shard"}), load_recipe("debug", [], None, Registry()).job)
        job = replace(job, train=replace(job.train, stages=list(stages)))
        return [use.key for use in features(job, layout_of(frozenset({"dp_shard"}))) if use.name == "frozen"]

    assert used() == used(TrainingStage(train=("*",))) == []
    assert used(TrainingStage(until=3, train=("*",)), TrainingStage(train=("embed.*",))) == [
        "train.stages.1.train = ('embed.*',)"
    ]
