"""Whether an optimizer does what it says: a property test for those who write one.

from forge_parallel.optim.conformance import faults
assert faults(MyOptimizer()) == []
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forge_core.protocols.model import NamedTensor, Optimizer

SHAPES = {"a.weight": ((12, 10), "matrix"), "table.weight": ((9, 4), "embedding"), "norm.weight": ((7,), "vector")}
"""(shape, group) of the parameters that are tried."""

CUTS = ((0, 5, 5, 9, 12), (0, 2, 4, 4, 9), (0, 3, 3, 7, 7))
"""Where each is cut for four ranks along its first dimension; some ranks have nothing."""

TOLERANCE = 1e-12
"""In fp64, relative to the largest element: another order of the same few operations."""


@dataclass(frozen=True)
class _Held:
    """Parameters as an optimizer is given them."""

    tensors: Mapping[str, torch.Tensor]

    def trainable(self) -> list[NamedTensor]:
        return [NamedTensor(name, tensor, SHAPES[name][1]) for name, tensor in self.tensors.items()]  # type: ignore[arg-type]


def faults(component: Any, steps: int = 4, seed: int = 0) -> list[str]:
    """What is wrong with the optimizer of a component; empty when nothing is.

    An `elementwise` one steps whole tensors, and four ranks step their parts of them: both are the same after each step. Any one
    leaves every bit as it is where `skip` is 1, even if gradients are not finite.
    """
    found = _skipped(component, seed)
    if getattr(component, "shards", None) == "elementwise":
        found += _in_parts(component, steps, seed)
    return found


def _start(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, (shape, _) in SHAPES.items()}


def _made(component: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Optimizer]:
    held: dict[str, torch.Tensor] = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
    return held, component.build(_Held(held))


def _part(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {name: tensor[cuts[rank] : cuts[rank + 1]] for (name, tensor), cuts in zip(tensors.items(), CUTS, strict=True)}


def _in_parts(component: Any, steps: int, seed: int) -> list[str]:
    start, ranks = _start(seed), len(CUTS[0]) - 1
    whole, optimizer = _made(component, start)
    parts = [_made(component, _part(start, rank)) for rank in range(ranks)]
    for step in range(steps):
        gradient = _start(seed + 1 + step)
        for tensors, made, slopes in ((whole, optimizer, gradient), *((*parts[r], _part(gradient, r)) for r in range(ranks))):
            for name, tensor in tensors.items():
                tensor.grad = slopes[name].clone()
            made.set_factor(1.0 / (step + 1))
            made.step(torch.zeros(()))
            made.zero_grad()
        for name, tensor in whole.items():
            together = torch.cat([held[name].detach() for held, _ in parts])
            error = float((together - tensor.detach()).abs().max() / tensor.detach().abs().max())
            if not error <= TOLERANCE:
                return [
                    f"says 'elementwise', but step {step + 1} of {name} in parts differs from that of the whole by {error:.1e}"
                ]
    return []


def _skipped(component: Any, seed: int) -> list[str]:
    held, optimizer = _made(component, _start(seed))
    for tensor in held.values():
        tensor.grad = torch.randn_like(tensor)
    optimizer.set_factor(1.0)
    optimizer.step(torch.zeros(()))
    every = {f"{key} of {name}": t for key, tensors in optimizer.state().items() for name, t in tensors.items()} | held
    before = {name: tensor.detach().clone() for name, tensor in every.items()}
    for tensor in held.values():
        tensor.grad = torch.full_like(tensor, torch.nan)
    optimizer.step(torch.ones(()))
    changed = [name for name, tensor in every.items() if not torch.equal(before[name], tensor.detach())]
    return [f"a step with skip = 1 changes {', '.join(changed)}"] if changed else []
