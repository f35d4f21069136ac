"""Parameters in groups: which pattern counts, what is refused, and that every optimizer is given its settings."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from forge_core.component import Component
from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import realize
from forge_parallel.optim import optimizers
from forge_parallel.optim.groups import ParameterGroup as Group
from forge_parallel.optim.groups import Setting, Settings, grouped
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.verify.parity import Case, share, synthetic
from harness.siblings import fast
from parallel.optimizers.independent import OURS, theirs
from parallel.tiny import VOCAB, TiedTiny, Tiny, cross_entropy

CASE = Case(Tiny, cross_entropy, AssertionError, VOCAB)
NAMES = ["embed.weight", "blocks.0.norm.weight", "blocks.0.qkv.weight", "blocks.1.norm.weight", "blocks.1.qkv.weight"]


def made(*groups: Group, build: Any = Tiny) -> tuple[ParallelModel, Settings, Step]:
    blueprint, settings = replace(CASE, build=build, groups=groups).blueprint()
    layout = Layout()
    model = realize(blueprint, Plan.of([], layout), Topology(layout, torch.device("cpu")), 0, "fp64", "fp64")
    return model, settings, Step(model, cross_entropy)


def test_of_several_groups_that_match_a_later_one_counts_key_by_key() -> None:
    groups = [
        Group(match="blocks.*", lr=0.5, weight_decay=0.3),
        Group(match="*.norm.*", weight_decay=0.0),
        Group(match="blocks.1.*", lr=2.0, frozen=True),
        Group(match="blocks.1.qkv.weight", frozen=False),
    ]
    found = grouped(groups, NAMES, {})
    assert found.each == {
        "blocks.0.norm.weight": Setting(0.5, 0.0),
        "blocks.0.qkv.weight": Setting(0.5, 0.3),
        "blocks.1.norm.weight": Setting(2.0, 0.0),
        "blocks.1.qkv.weight": Setting(2.0, 0.3),
    }
    assert found.frozen == {"blocks.1.norm.weight"}


@pytest.mark.parametrize(
    ("match", "said"),
    [
        (
            "blocks.*.qvk.weight",
            r"parameters\.groups\.1\.match: 'blocks\.\*\.qvk\.weight' matches no .* mean 'blocks\.\*\.qkv\.weight'",
        ),
        ("block.*", r"did you mean 'blocks\.\*'"),
        ("xyz", r"the parameters are embed\.weight, blocks\.\*\.norm\.weight, blocks\.\*\.qkv\.weight"),
        ("head.weight", r"matches only head\.weight, which is tied to embed\.weight; use embed\.weight"),
    ],
)
def test_a_group_that_matches_nothing_is_refused_with_the_nearest_names(match: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        grouped([Group(match="*", lr=0.5), Group(match=match, lr=0.5)], NAMES, {"head.weight": "embed.weight"})


def test_a_group_that_changes_nothing_or_freezes_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="sets nothing"):
        Group(match="*")
    with pytest.raises(PlanError, match="every parameter of the model is frozen"):
        grouped([Group(match="*", frozen=True)], NAMES, {})


@pytest.mark.parametrize("name", OURS)
def test_every_optimizer_has_the_rate_and_decay_of_a_group(name: str) -> None:
    """Against another library that is given them one by one: at half the rate, decay is 0.4 of norms, 0 of an embedding that
    moves at the full one, and of the others what it is without groups."""
    groups = (Group(match="blocks.*.norm.weight", lr=0.5, weight_decay=0.4), Group(match="head.weight", weight_decay=0.0))
    model, settings, step = made(*groups)
    other, _, _ = made()
    component = OURS[name]
    optimizer, tensors = optimizers.build_optimizer(component, model, settings), {n: (t, g) for n, t, g in other.trainable()}
    norms = [t for n, (t, _) in tensors.items() if n.endswith("norm.weight")]
    matrices = [t for t, g in tensors.values() if g == "matrix"]
    rest = [t for n, (t, g) in tensors.items() if g != "matrix" and not n.endswith("norm.weight")]
    reference = theirs(component, matrices, rest)
    reference.add_param_group({"params": norms, "weight_decay": 0.4})
    for index, group in enumerate(reference.param_groups):
        group["lr"] = component.lr * (0.5 if index == 2 else 1)
    own = dict(model.parameters_held())
    for index in range(6):
        step(share(synthetic(CASE, index), 0, 1, 8))
        for key, (tensor, _) in tensors.items():
            tensor.grad = own[key].grad.clone()  # type: ignore[union-attr]
        optimizer.set_factor((1 + index) / 2 if name == "schedule_free_adamw" and index < 2 else 1.0)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    assert optimizer.lr == pytest.approx(component.lr)  # type: ignore[attr-defined]
    for key, (tensor, _) in tensors.items():
        torch.testing.assert_close(own[key].detach(), tensor.detach(), rtol=1e-10, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("build", [Tiny, TiedTiny])
def test_what_is_frozen_costs_no_state_and_is_not_in_the_norm(name: str, build: Any) -> None:
    frozen = {"blocks.1.qkv.weight", "blocks.1.norm.weight", "embed.weight"}
    model, settings, step = made(*(Group(match=n, frozen=True) for n in frozen), build=build)
    plain, _, whole = made(build=build)
    assert settings.frozen == frozen and model.parameter_count() == plain.parameter_count()
    optimizer = optimizers.build_optimizer(OURS[name], model, settings)
    assert all(frozen.isdisjoint(tensors) for tensors in optimizer.state().values())
    before = {key: tensor.detach().clone() for key, tensor in model.tensors()}
    batches = share(synthetic(CASE, 0), 0, 1, 8)
    result = step(batches)
    whole(batches)
    assert all(dict(model.parameters_held())[key].grad is None for key in frozen)
    squares = [float(t.grad.square().sum()) for key, t, _ in plain.trainable() if key not in frozen]  # type: ignore[union-attr]
    assert float(result.norm) == pytest.approx(sum(squares) ** 0.5, rel=1e-12)
    optimizer.step(result.skip)
    moved = {key for key, tensor in model.tensors() if not torch.equal(before[key], tensor)}
    assert moved == {key for key, _, _ in model.trainable()}


@pytest.mark.parametrize("name", fast("adamw", of=OURS))
def test_norms_move_at_a_small_rate_and_embeddings_are_not_decayed(name: str) -> None:
    """At 1e-5, in fp32 and in bf16, a norm of ones moves; without a gradient nothing but matrices does."""
    for state, count in (("fp32", 1), ("bf16", 250)):
        blueprint, settings = CASE.blueprint()
        layout = Layout()
        compute = "bf16" if state == "bf16" else "fp32"
        model = realize(blueprint, Plan.of([], layout), Topology(layout, torch.device("cpu")), 0, compute, state)
        optimizer = optimizers.build_optimizer(replace(OURS[name], lr=1e-5), model, settings)
        held = dict(model.parameters_held())
        start = {key: tensor.detach().clone() for key, tensor in held.items()}
        for _ in range(count):
            for key, tensor in held.items():
                tensor.grad = torch.ones_like(tensor) if "norm.weight" in key else None
            optimizer.step()
        moved = {key for key, tensor in held.items() if not torch.equal(start[key], tensor)}
        assert {key for key in held if "norm.weight" in key} <= moved
    model, settings, _ = made()
    optimizer = optimizers.build_optimizer(OURS[name], model, settings)
    start = {key: tensor.detach().clone() for key, tensor in model.parameters_held()}
    for _, tensor in model.parameters_held():
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    decayed = {key for key, tensor in model.parameters_held() if not torch.equal(start[key], tensor)}
    assert decayed == {key for key, _, group in model.trainable() if group in ("matrix", "head")}


@dataclass(frozen=True, kw_only=True)
class Descent(Component):
    """Gradient descent without weight decay; with a state that is not of a parameter if asked to."""

    count: bool = False

    def build(self, model: Any) -> Any:
        return _Descent(list(model.trainable()), self.count)


class _Descent:
    def __init__(self, named: Any, count: bool) -> None:
        self.named, self.count, self.lr = named, count, 1.0

    def set_factor(self, factor: float) -> None:
        self.lr = factor

    def state(self) -> Any:
        return {"step": {"all": torch.zeros(())}} if self.count else {}


def test_an_optimizer_that_cannot_do_what_a_group_asks_is_refused() -> None:
    model, settings, _ = made(Group(match="head.weight", weight_decay=0.1))
    with pytest.raises(PlanError, match=r"weight_decay = 0.1 of head.weight: optimizer Descent has no key weight_decay"):
        optimizers.build_optimizer(Descent(), model, settings)
    model, settings, _ = made(Group(match="head.weight", lr=0.1))
    assert optimizers.build_optimizer(Descent(), model, settings).state() == {}
    with pytest.raises(PlanError, match="a state whose name is not that of a parameter"):
        optimizers.build_optimizer(Descent(count=True), model, settings)
    assert isinstance(AdamWConfig().build(model).state(), dict)
