"""Hooks over all parameters: `ema` (averages), `norms`, and `replicas` (compares replicas).

Methods import torch, so that importing this module does not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from forge_core.component import FREE, IDENTITY, Component
from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook, Run, StepResult
from forge_train.hooks.periodic import Periodic
from forge_train.process.stop import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from forge_parallel.model.parallel_model import ParallelModel

EMA_SECTION = "ema"
"""Section of a checkpoint: `ema/NAME` is the average of the parameter NAME."""


@dataclass(frozen=True, kw_only=True)
class EmaConfig(Component):
    """Keeps an exponential moving average of the weights, also in checkpoints; `evaluate` and `sample` can use it."""

    # Not a hook itself, because its key `start` has the name of a method of hooks.
    implementation: ClassVar[str] = "forge_train.hooks.weights:Ema"
    key_class: ClassVar = FREE

    decay: Annotated[float, Gt(0), Lt(1)] = 0.999
    """Decay of the average m at each update: m = decay m + (1 - decay) w, where w are the weights."""
    start: Annotated[int, Ge(0)] = 0
    """The average starts with the weights after this optimizer step; 0 starts with the initial weights."""
    every: Annotated[int, Gt(0)] = 1
    """Optimizer steps between updates of the average."""
    dtype: Annotated[Literal["fp32", "weights"], IDENTITY] = "fp32"
    """Dtype of the average: fp32, or that of the weights, where rounding may cancel updates if the decay is near 1. The average
    of fp64 weights is always fp64."""


class Ema(Hook):
    """Averages each parameter w that is trained in any stage of the run: m = w after step `start`, then every N steps
    m += (1 - decay) (w - m).

    Each rank averages its own shards, without communication. A skipped step does not change m; the host does not wait to know.
    Before `start`, m equals the weights.
    """

    def __init__(self, decay: float = 0.999, start: int = 0, every: int = 1, dtype: Literal["fp32", "weights"] = "fp32") -> None:
        self.decay, self.begin_at, self.every, self.dtype = decay, start, every, dtype
        self.begun = False
        self.average: dict[str, Tensor] = {}

    def check(self, run: Run) -> None:
        """Refuses an optimizer that evaluates averages itself, since the two averages could be confused."""
        if run.model.averages:
            raise ForgeError("hook 'ema' averages weights, but the optimizer evaluates averages already; remove the hook")

    def start(self, run: Run) -> None:
        """Starts the average with the current weights if step `start` is reached."""
        self._begin(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Updates the average if it is due, or starts it."""
        if self.begun and (run.state.step - self.begin_at) % self.every == 0:
            self._move(run.model, result.skip)
        self._begin(run)

    def state(self) -> Mapping[str, Any]:
        """Returns whether the average has started."""
        return {"begun": True} if self.begun else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        self.begun = state.get("begun", False)

    def tensors(self, model: "ParallelModel") -> "Mapping[str, Mapping[str, Tensor]]":
        """Returns the average of each trained parameter, sharded like the parameter."""
        import torch

        if not self.average:
            for name, tensor, _ in model.trained_sometime():
                wide = tensor.dtype if self.dtype == "weights" else torch.promote_types(tensor.dtype, torch.float32)
                self.average[name] = torch.zeros_like(tensor.detach(), dtype=wide, memory_format=torch.preserve_format)
        if not self.begun:
            for mine, weights in self._pairs(model):
                mine.copy_(weights)
        return {EMA_SECTION: self.average}

    def _begin(self, run: Run) -> None:
        if not self.begun and run.state.step >= self.begin_at:
            self.tensors(run.model)
            self.begun = True

    def _move(self, model: "ParallelModel", skip: "Tensor") -> None:
        import torch

        with torch.no_grad():
            for mine, weights in self._pairs(model):
                share = (1 - self.decay) * (1 - skip.to(mine.device, mine.dtype))
                mine.lerp_(weights.to(mine.dtype), share)

    def _pairs(self, model: "ParallelModel") -> "list[tuple[Tensor, Tensor]]":
        """Returns this rank's shards of each average and of its parameter."""
        from forge_parallel.placement.boxes import local_box

        return [(local_box(self.average[name]).local, local_box(tensor).local) for name, tensor, _ in model.trained_sometime()]


@dataclass(kw_only=True)
class Norms(Hook):
    """Logs norms of gradients, updates and parameters, by group of parameters or by tensor.

    The 2-norms of trained parameters are `norm/gradient/NAME` (before clipping), `norm/update/NAME` (of the change by the
    optimizer) and `norm/parameter/NAME` (of the weights after the update). NAME is the parameter's group in the optimizer
    (`matrix`, `vector`, `embedding`, ...), or its own name. A measurement costs an all-reduce, one wait for the device and,
    during the update, a copy of this rank's parameters.
    """

    key_class: ClassVar = FREE
    observes = True

    every: Annotated[int, Gt(0)] = 100
    """Optimizer steps between two measurements; the last step is always measured."""
    by: Literal["group", "tensor"] = "group"
    """One norm per group of the optimizer (matrices, vectors, embeddings, ...), or per tensor."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Norms]":
        return (cls(every=2), cls(every=3, by="tensor"))

    def __post_init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.gradients: Tensor | None = None

    def before_update(self, run: Run, result: StepResult) -> None:
        """Measures gradients and copies the weights, if the step is due."""
        from forge_parallel.placement.boxes import local_box
        from forge_parallel.step.reduce import local_grad

        step = run.state.step + 1
        if step % self.every == 0 or step >= run.job.train.max_steps:
            held = run.model.trainable()
            grown = {item.name: local_grad(item.tensor) for item in held}
            self.gradients = self._squares(run, lambda name, _: grown[name])
            self.before = {item.name: local_box(item.tensor).local.clone() for item in held}

    def after_step(self, run: Run, result: StepResult) -> None:
        """Collective: measures updates and parameters, and logs all norms."""
        import torch

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
        trained = [place for place, count in enumerate(counts) if count]  # without buffers and frozen parameters
        values: dict[str, float] = {}
        for what, row in zip(("gradient", "update", "parameter"), rows, strict=True):
            values |= {f"norm/{what}/{names[place]}": row[place] for place in trained}
        run.log(values)

    def _places(self, run: Run) -> Mapping[str, int]:
        """Returns the index of each norm by name, for the whole model and equal on all ranks."""
        tensors: Mapping[str, Any] = run.model.specs.tensors
        names = dict.fromkeys(self._name(run, name) for name in tensors)
        return {name: place for place, name in enumerate(names)}

    def _name(self, run: Run, parameter: str) -> str:
        return parameter if self.by == "tensor" else run.model.specs.tensors[parameter].group

    def _squares(self, run: Run, take: "Callable[[str, Tensor], Tensor | None]") -> "Tensor":
        """Returns (names,) fp64 on the device: sums of squares of the elements that this rank owns."""
        import torch

        from forge_parallel.placement.boxes import local_box

        places, device = self._places(run), run.topology.device
        total = torch.zeros(len(places), dtype=torch.float64, device=device)
        with torch.no_grad():
            for name, parameter, _ in run.model.trainable():
                local = local_box(parameter).local
                value = take(name, local) if name in run.model.owned and local.numel() else None
                if value is not None:
                    square = torch.linalg.vector_norm(value, dtype=torch.float64).square()
                    total[places[self._name(run, name)]] += square.to(device)
        return total


@dataclass(kw_only=True)
class Replicas(Periodic):
    """Compares replicated parameters bitwise, and stops the run if replicas have diverged."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 200
    """Optimizer steps between comparisons, which exchange a few bytes per tensor; the last step is always compared."""

    def act(self, run: Run) -> None:
        """Compares all parameters.

        Raises:
            TrainingError: a replica differs; the message names the tensor and the rank.
        """
        from forge_parallel.verify.state import drifted

        if drift := drifted(run.model):
            raise TrainingError(
                f"after step {run.state.step} rank {drift.rank} has other values of {drift.name} than its replicas. The cause is "
                "a faulty device or a nondeterministic kernel. Start the run again to resume from its newest checkpoint; "
                "exclude that rank's device if it happens twice"
            )
