"""Schedule-Free AdamW under a rate that falls: no check lets a recipe do so, but a loop of somebody else's may."""

from types import SimpleNamespace
from typing import Any

import torch
from schedulefree import AdamWScheduleFree

from forge_core.protocols.model import NamedTensor
from forge_parallel.optim.schedule_free import ScheduleFree

LR, BETAS, EPS, DECAY = 3e-3, (0.85, 0.97), 1e-8, 0.2


def test_steps_of_a_smaller_rate_weigh_as_much_in_the_mean_as_those_of_the_largest() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    model: Any = SimpleNamespace(trainable=lambda: [NamedTensor("w", ours, "matrix")])
    optimizer = ScheduleFree(model, LR, BETAS, EPS, DECAY)
    other = AdamWScheduleFree([theirs], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False)
    other.train()
    for step in range(12):
        factor = 1.0 if step < 4 else 0.3
        gradient = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        ours.grad, theirs.grad = gradient, gradient.clone()
        optimizer.set_factor(factor)
        other.param_groups[0]["lr"] = LR * factor
        optimizer.step()
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    other.eval()
    with optimizer.averaged():
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
