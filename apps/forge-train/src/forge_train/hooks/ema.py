"""Keeps an exponential moving average of the weights."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook, Run, StepResult
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.boxes import local_box

SECTION = "ema"
"""Of a checkpoint: `ema/NAME` is the average of the parameter NAME."""


class EmaHook(Hook):
    """Average m of each parameter w that is trained, in any stage of the run: m = w after step `start`, then every N steps
    m += (1 - decay) (w - m).

    Each rank averages the elements that it holds, so nothing is exchanged. A step whose update is skipped moves nothing, without
    the host asking for it. Before `start`, and where a run begins to average later, m is the weights themselves.
    """

    def __init__(self, decay: float = 0.999, start: int = 0, every: int = 1, dtype: Literal["fp32", "weights"] = "fp32") -> None:
        self.decay, self.begin_at, self.every, self.dtype = decay, start, every, dtype
        self.begun = False
        self.average: dict[str, Tensor] = {}

    def check(self, run: Run) -> None:
        """Refuses an optimizer that evaluates averages itself: one would be taken for the other."""
        if run.model.averages:
            raise ForgeError("hook 'ema' averages weights, and the optimizer evaluates averages already; remove the hook")

    def start(self, run: Run) -> None:
        """Begins with the initial weights, or those that a run resumes from, where it is time."""
        self._begin(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Begins, or moves the average where it is due."""
        if self.begun and (run.state.step - self.begin_at) % self.every == 0:
            self._move(run.model, result.skip)
        self._begin(run)

    def state(self) -> Mapping[str, Any]:
        """Whether the average has begun."""
        return {"begun": True} if self.begun else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        self.begun = state.get("begun", False)

    def tensors(self, model: ParallelModel) -> Mapping[str, Mapping[str, Tensor]]:
        """The average of each parameter that is trained, laid out as it is."""
        if not self.average:
            for name, tensor, _ in model.trained_sometime():
                wide = tensor.dtype if self.dtype == "weights" else torch.promote_types(tensor.dtype, torch.float32)
                self.average[name] = torch.zeros_like(tensor.detach(), dtype=wide, memory_format=torch.preserve_format)
        if not self.begun:
            for mine, weights in self._pairs(model):
                mine.copy_(weights)
        return {SECTION: self.average}

    def _begin(self, run: Run) -> None:
        if not self.begun and run.state.step >= self.begin_at:
            self.tensors(run.model)
            self.begun = True

    @torch.no_grad()
    def _move(self, model: ParallelModel, skip: Tensor) -> None:
        for mine, weights in self._pairs(model):
            share = (1 - self.decay) * (1 - skip.to(mine.device, mine.dtype))
            mine.lerp_(weights.to(mine.dtype), share)

    def _pairs(self, model: ParallelModel) -> list[tuple[Tensor, Tensor]]:
        """This rank's elements of each average and of its parameter."""
        return [(local_box(self.average[name]).local, local_box(tensor).local) for name, tensor, _ in model.trained_sometime()]
