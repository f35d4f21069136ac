"""Norms of gradients, updates and parameters, by group of parameters or by tensor."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from forge_core.protocols.run import Hook, Run, StepResult
from forge_parallel.placement.boxes import local_box, owns
from forge_parallel.step.reduce import local_grad


class NormsHook(Hook):
    """Every N steps and at the last one: 2-norms over all ranks of everything that is trained. `norm/gradient/NAME` is that
    before clipping, `norm/update/NAME` of what the optimizer added, and `norm/parameter/NAME` of the weights after it.

    NAME is the group of the optimizer that a parameter belongs to (`matrix`, `vector`, `embedding`, ...), or its own name. A
    measurement costs an all-reduce, one wait for the device, and, during the update, a copy of this rank's parameters.
    """

    observes = True

    def __init__(self, every: int = 100, by: Literal["group", "tensor"] = "group") -> None:
        self.every, self.by = every, by
        self.before: dict[str, Tensor] = {}
        self.gradients: Tensor | None = None

    def before_update(self, run: Run, result: StepResult) -> None:
        """Measures gradients and keeps the weights, where the step is due."""
        step = run.state.step + 1
        if step % self.every == 0 or step >= run.job.train.max_steps:
            held = run.model.trainable()
            grown = {item.name: local_grad(item.tensor) for item in held}
            self.gradients = self._squares(run, lambda name, _: grown[name])
            self.before = {item.name: local_box(item.tensor).local.clone() for item in held}

    def after_step(self, run: Run, result: StepResult) -> None:
        """Collective: measures the rest and writes."""
        if self.gradients is None:
            return
        before, squares = self.before, [self._squares(run, lambda _, local: torch.ones_like(local)), self.gradients]
        squares.append(self._squares(run, lambda name, local: local - before[name]))
        squares.append(self._squares(run, lambda _, local: local))
        self.before, self.gradients = {}, None
        found = run.topology.all_reduce(torch.stack(squares)).sqrt()
        if run.topology.rank != 0:
            return
        names = list(self._places(run))
        counts, *rows = found.tolist()
        trained = [place for place, count in enumerate(counts) if count]  # not buffers, nor what is frozen
        values: dict[str, float] = {}
        for what, row in zip(("gradient", "update", "parameter"), rows, strict=True):
            values |= {f"norm/{what}/{names[place]}": row[place] for place in trained}
        run.log(values)

    def _places(self, run: Run) -> Mapping[str, int]:
        """Names of the norms, on every rank those of the whole model, in its order."""
        tensors: Mapping[str, Tensor] = run.model.specs.tensors
        names = dict.fromkeys(self._name(run, name) for name in tensors)
        return {name: place for place, name in enumerate(names)}

    def _name(self, run: Run, parameter: str) -> str:
        return parameter if self.by == "tensor" else run.model.specs.tensors[parameter].group

    @torch.no_grad()
    def _squares(self, run: Run, take: Callable[[str, Tensor], Tensor | None]) -> Tensor:
        """(names,) fp64 on the device: sums of squares of the elements that this rank owns."""
        places, device = self._places(run), run.topology.device
        total = torch.zeros(len(places), dtype=torch.float64, device=device)
        for name, parameter, _ in run.model.trainable():
            local = local_box(parameter).local
            value = take(name, local) if owns(parameter, run.model.topology) and local.numel() else None
            if value is not None:
                total[places[self._name(run, name)]] += torch.linalg.vector_norm(value, dtype=torch.float64).square().to(device)
        return total
