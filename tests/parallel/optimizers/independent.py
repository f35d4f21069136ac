"""The optimizers of other libraries, by the names of ours, with the same numbers."""

from collections.abc import Iterable
from typing import Any

import torch
from lion_pytorch import Lion as TheirLion
from schedulefree import AdamWScheduleFree

from forge_core.component import Component
from forge_parallel.optim.optimizers import AdamWConfig, LionConfig, ScheduleFreeAdamWConfig

RATES = [0.5, 1.0, 1.0, 1.0]
"""Factors of the first steps, then 1: a warm-up of two steps."""

OURS: dict[str, Any] = {
    "adamw": AdamWConfig(lr=3e-3, betas=(0.8, 0.95), weight_decay=0.2),
    "lion": LionConfig(lr=1e-3, betas=(0.85, 0.97), weight_decay=0.2),
    "schedule_free_adamw": ScheduleFreeAdamWConfig(lr=3e-3, betas=(0.85, 0.97), weight_decay=0.2),
}
"""One for each that is registered."""


def theirs(component: Component, decayed: Iterable[Any], others: Iterable[Any]) -> Any:
    """The same by torch, lion-pytorch or schedulefree, in their plain arithmetic, over two groups of parameters."""
    groups = [{"params": list(decayed), "weight_decay": component.weight_decay}, {"params": list(others), "weight_decay": 0.0}]  # type: ignore[attr-defined]
    match component:
        case AdamWConfig():
            return torch.optim.AdamW(groups, lr=component.lr, betas=component.betas, eps=component.eps, foreach=False)
        case LionConfig():
            return TheirLion(groups, lr=component.lr, betas=component.betas)
        case ScheduleFreeAdamWConfig():
            kinds = {"lr": component.lr, "betas": component.betas, "eps": component.eps}
            optimizer = AdamWScheduleFree(groups, **kinds, warmup_steps=2, foreach=False)
            optimizer.train()
            return optimizer
    raise AssertionError(component)


def set_rate(optimizer: Any, component: Any, step: int) -> None:
    """The rate of a step; `schedulefree` warms up by itself."""
    if not isinstance(component, ScheduleFreeAdamWConfig):
        for group in optimizer.param_groups:
            group["lr"] = component.lr * factor(step)


def factor(step: int) -> float:
    """Of the rate, in a step counted from 0."""
    return RATES[min(step, len(RATES) - 1)]
