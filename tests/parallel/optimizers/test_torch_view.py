"""`optimizer.torch()`: schedulers of torch and loops that expect a `torch.optim.Optimizer`, against torch's own AdamW."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from forge_core.errors import PlanError
from forge_parallel import ParallelizedModule, parallelize
from forge_parallel.optim import (
    AdamW8bitConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    ScheduleFreeAdamWConfig,
    Setting,
    Settings,
    TorchOptimizer,
    build_optimizer,
)

STEPS, LR = 12, 0.02
CONFIGS = [AdamWConfig(), LionConfig(), MuonConfig(), ScheduleFreeAdamWConfig(), AdamW8bitConfig(block=4, smallest=0)]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def parallelized(layout: str = "1") -> ParallelizedModule:
    return parallelize(build().double(), layout, state="fp64", compute="fp64")


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler: Any = None) -> None:
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.detach())
        elif scheduler is not None:
            scheduler.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=1e-4),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=3 * LR, total_steps=STEPS + 1, cycle_momentum=False),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.8)],
            milestones=[4],
        ),
    ],
    ids=["cosine", "one cycle", "lambda", "plateau", "sequential"],
)
def test_schedulers_of_torch_give_what_they_give_with_torchs_adamw(schedule: Callable[[torch.optim.Optimizer], Any]) -> None:
    model, plain = parallelized(), build().double()
    ours = AdamWConfig(lr=LR, weight_decay=0.1).build(model)
    matrices = [parameter for parameter in plain.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in plain.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for network, optimizer in ((model, ours.torch()), (plain, theirs)):
        train(network, optimizer, range(STEPS), schedule(optimizer))
    assert ours.lr != LR
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_the_state_is_saved_and_loaded(config: Any) -> None:
    """Through a file that is read without pickle's code, and into an optimizer that has made other steps."""
    model = parallelized()
    optimizer = config.build(model).torch()
    train(model, optimizer, range(3), lr_scheduler.ExponentialLR(optimizer, 0.5))
    file, parameters = io.BytesIO(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(optimizer.state_dict(), file)
    train(model, optimizer, range(3, 6))

    other = parallelized()
    resumed = config.build(other).torch()
    train(other, resumed, range(7, 9))
    other.load_state_dict(parameters)
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(config.lr / 8)
    train(other, resumed, range(3, 6))
    assert torch.equal(weights(other), weights(model))


def test_a_scheduler_continues_after_a_load() -> None:
    model = parallelized()
    optimizer = AdamWConfig(lr=LR).build(model).torch()
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    train(model, optimizer, range(5), scheduler)
    saved = optimizer.state_dict(), scheduler.state_dict()
    optimizer.step()
    scheduler.step()
    expected = optimizer.param_groups[0]["lr"]

    resumed = AdamWConfig(lr=LR).build(parallelized()).torch()
    again = lr_scheduler.CosineAnnealingLR(resumed, STEPS)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    resumed.step()
    again.step()
    assert resumed.param_groups[0]["lr"] == expected


def test_the_view_is_live() -> None:
    model = parallelized()
    optimizer = AdamWConfig(lr=LR).build(model)
    view = optimizer.torch()
    assert isinstance(view, torch.optim.Optimizer) and isinstance(view, TorchOptimizer)
    assert view.param_groups[0]["lr"] == LR and view.param_groups[0]["params"] == list(model.parameters())
    view.param_groups[0]["lr"] = 0.5 * LR
    train(model, view, range(1))
    assert optimizer.lr == 0.5 * LR
    weight = next(model.parameters())
    assert view.state[weight]["exp_avg"] is optimizer.state()["exp_avg"]["0.weight"] and view.state[weight]["step"] == 1


def test_rates_of_parameter_groups_keep_their_ratio() -> None:
    models = parallelized(), parallelized()
    settings = Settings(each={"2.weight": Setting(lr=0.1)})
    by_view, by_factor = (build_optimizer(AdamWConfig(lr=LR), model, settings) for model in models)
    view = by_view.torch()
    view.param_groups[0]["lr"] = 0.25 * LR
    train(models[0], view, range(2))
    by_factor.set_factor(0.25)
    for step in range(2):
        loss_of(models[1], step).backward()
        by_factor.step()
        by_factor.zero_grad()
    assert torch.equal(weights(models[0]), weights(models[1]))


def test_a_view_starts_with_the_rate_of_the_optimizer() -> None:
    optimizer = AdamWConfig(lr=LR).build(parallelized())
    optimizer.set_factor(0.5)
    assert optimizer.torch().param_groups[0]["lr"] == optimizer.lr == 0.5 * LR


def test_a_closure_computes_gradients_and_a_step_can_be_skipped() -> None:
    model = parallelized()
    view = AdamWConfig(lr=LR).build(model).torch()

    def closure() -> torch.Tensor:
        view.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    before = weights(model)
    assert torch.is_tensor(view.step(closure)) and not torch.equal(weights(model), before)
    before = weights(model)
    view.step(skip=torch.ones(()))
    assert torch.equal(weights(model), before)
    view.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    view.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_would_have_no_effect_is_refused() -> None:
    model = parallelized()
    view = AdamWConfig(lr=LR).build(model).torch()
    with pytest.raises(PlanError, match="build another optimizer"):
        view.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    with pytest.raises(ValueError, match="cycle_momentum"):
        lr_scheduler.OneCycleLR(view, max_lr=LR, total_steps=4)
    view.param_groups[0]["weight_decay"] = 0.0
    loss_of(model, 0).backward()
    before = weights(model)
    with pytest.raises(PlanError, match=r"weight_decay .*ParameterGroup"):
        view.step()
    assert torch.equal(weights(model), before)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = parallelized()
    view = AdamWConfig(lr=LR).build(model).torch()
    train(model, view, range(2))
    before = {key: value.clone() for key, value in view.state[next(model.parameters())].items()}
    wider = parallelize(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), "1")
    for other, said in (
        (LionConfig().build(parallelized()).torch(), "state_dict.. of the same optimizer"),
        (AdamWConfig().build(wider).torch(), "in the same shapes"),
        (AdamWConfig().build(parallelize(nn.Linear(6, 8), "1")).torch(), "of the same model"),
    ):
        with pytest.raises(PlanError, match=said):
            view.load_state_dict(other.state_dict())
    assert all(torch.equal(before[key], value) for key, value in view.state[next(model.parameters())].items())
    assert view.param_groups[0]["lr"] == LR


def test_training_stages_are_refused() -> None:
    model = parallelized()
    stage = Settings()
    optimizer: Any = build_optimizer(AdamWConfig(), model, Settings(stages=(stage,)))
    with pytest.raises(PlanError, match="at_step"):
        optimizer.torch()


def _trained(layout: str) -> dict[str, torch.Tensor]:
    """Weights after a resume in the middle; every data rank reads the same rows."""
    states: list[Any] = []
    for _ in range(2):
        model = parallelized(layout)
        optimizer = MuonConfig(lr=LR).build(model).torch()
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 6)
        if states:
            for target, state in zip((model, optimizer, scheduler), states, strict=True):
                target.load_state_dict(state)
        train(model, optimizer, range(3) if not states else range(3, 6), scheduler)
        states = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
    return model.state_dict(whole=True)


def test_shards_are_saved_loaded_and_trained_as_in_one_process(world: Any) -> None:
    expected = _trained("1")
    for weights in world.run(_trained, 2, "dp2"):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-10)
