"""Loops as their authors wrote them, around what `parallelize` gives: one process, in fp64, is what they are compared with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.layout import Layout
from forge_parallel import ParallelizedModule, parallelize
from forge_parallel.model.parallel_model import gathered
from forge_parallel.transforms.shard import FullyShard
from harness.pool import World
from harness.siblings import fast
from parallel.foreign_modules import PLAN, VOCAB, Plain

TOKENS = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(5))


def laid_out(layout: str, build: Callable[[], nn.Module] = Plain, **options: Any) -> tuple[ParallelizedModule, nn.Module]:
    """A module in a layout, and the same in one process."""
    model = parallelize(build, layout, tp_plan=PLAN if "tp" in layout else None, state="fp64", compute="fp64", **options)
    plain = build().double()
    plain.load_state_dict(model.state_dict(whole=True))
    return model, plain


def mine(model: ParallelizedModule, tokens: Tensor) -> Tensor:
    """The rows of this rank."""
    return tokens.chunk(model.data_ranks)[model.data_rank]


def score(output: Tensor, tokens: Tensor) -> Tensor:
    """The mean loss of rows."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def backward(model: ParallelizedModule, tokens: Tensor = TOKENS) -> None:
    """Of the mean loss over all ranks' rows."""
    rows = mine(model, tokens)
    if model.cut is None:
        score(model(rows), rows).backward()
    else:
        model.step([{"tokens": each} for each in rows.chunk(2)], lambda output, batch: score(output, batch["tokens"]))


def _gradients(layout: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, plain = laid_out(layout, transforms=[FullyShard(**options)])
    backward(model)
    score(plain(TOKENS), TOKENS).backward()
    right = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    return gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()}), right


@pytest.mark.parametrize(
    ("layout", "options"),
    fast(("dp2", {}), of=[("dp2", {}), ("dp2", {"reshard": False}), ("dp2tp2", {}), ("hsdp2x2", {}), ("pp2dp2", {})]),
)
def test_a_shard_transform_of_ones_own_averages_gradients(world: World, layout: str, options: dict[str, Any]) -> None:
    for found, right in world.run(_gradients, Layout.parse(layout).world, layout, options):
        assert found.keys() == right.keys()
        for name, gradient in right.items():
            torch.testing.assert_close(
                found[name], gradient, rtol=1e-10, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}"
            )


def _habits(module: nn.Module, tokens: Tensor) -> Tensor:
    """A loop with a scheduler, gradients that stay, a hook, a look at the state, and modes."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    handle = module.register_forward_hook(lambda _, __, output: output * 1.5)
    for step in range(4):
        module.train(step != 2)
        score(module(tokens), tokens).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in module.parameters())
        assert module.state_dict().keys() >= dict(module.named_parameters()).keys()
    with torch.no_grad():
        hooked = module(TOKENS)
        handle.remove()
        torch.testing.assert_close(module(TOKENS) * 1.5, hooked)
    return hooked


def _with_habits(layout: str) -> tuple[Tensor, Tensor]:
    model, plain = laid_out(layout)
    return _habits(model, mine(model, TOKENS)), _habits(plain, TOKENS)


@pytest.mark.parametrize("layout", fast("dp2", of=["dp2", "tp2", "dp2tp2", "hsdp2x2"]))
def test_schedulers_hooks_modes_and_kept_gradients(world: World, layout: str) -> None:
    for found, right in world.run(_with_habits, Layout.parse(layout).world, layout):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-10)


def _frozen(module: nn.Module, tokens: Tensor) -> Tensor:
    """A loop that freezes some layers after two steps, and lets them learn again after another one."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in range(4):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(step != 2 or not name.startswith(("blocks.0", "embed")))
        score(module(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return module(TOKENS)


def _with_frozen_layers(layout: str) -> tuple[Tensor, Tensor]:
    model, plain = laid_out(layout)
    return _frozen(model, mine(model, TOKENS)), _frozen(plain, TOKENS)


@pytest.mark.parametrize("layout", fast("dp2", of=["dp2", "tp2"]))
def test_layers_that_are_frozen_for_a_while(world: World, layout: str) -> None:
    for found, right in world.run(_with_frozen_layers, Layout.parse(layout).world, layout):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-10)
