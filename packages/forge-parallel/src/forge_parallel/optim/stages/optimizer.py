"""Any optimizer in a run of stages: what is trained changes between two steps, decided by the step alone.

Parameters with the same settings in every stage share one optimizer. At the border of two stages an optimizer goes on as it is
where its parameters are trained in both, with its state; it is dropped, state and all, where they are frozen from then on; and
one is made, with the state that it has at first, where they begin. That is what a resume at the border makes of a checkpoint.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forge_core.errors import PlanError
from forge_core.protocols.model import Optimizer
from forge_parallel.build.frozen import freeze
from forge_parallel.optim.grouped import NOT_OF_PARAMETERS, one_setting
from forge_parallel.optim.settings import Setting, Settings
from forge_parallel.optim.stages.resolve import stage_at
from forge_parallel.placement.boxes import local_box

if TYPE_CHECKING:
    from torch import Tensor

    from forge_parallel.build.parallel_model import ParallelModel

_log = logging.getLogger(__name__)

Averages = Callable[[], AbstractContextManager[Mapping[str, "Tensor"]]]


class _Cell(NamedTuple):
    """Parameters with the same settings in every stage; None where they are frozen."""

    names: list[str]
    settings: tuple[Setting | None, ...]


class _Part(NamedTuple):
    """The optimizer of a cell in a stage, and its averages, if it evaluates them."""

    setting: Setting
    optimizer: Optimizer
    averages: list[Averages]


class _Told:
    """The model, for an optimizer of a cell: it keeps what that says of averages."""

    def __init__(self, model: Any, averages: list[Averages]) -> None:
        self._model, self._averages = model, averages

    def evaluate_with(self, averages: Averages) -> None:
        self._averages.append(averages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class StagedOptimizer:
    """The optimizers of a run in stages; implements `forge_core.protocols.model.Optimizer`. It begins in the first stage, and
    freezes and unfreezes parameters of its model, which no other optimizer may train.

    Attributes:
        stage_settings: of the stage that it is in, frozen parameters among them.
        stage_number: from 0.
        lr: rate of the newest step without factors of parameters, where the optimizer has a single one.

    Raises:
        PlanError: a stage sets a weight decay that the optimizer does not have, or states have names that are not a parameter's.
    """

    def __init__(self, component: Any, model: "ParallelModel", stages: Sequence[Settings]) -> None:
        self._component, self._model, self._stages = component, model, stages
        shared: dict[tuple[Setting | None, ...], list[str]] = {}
        for name, _, _ in model.trained_sometime():
            own = tuple(None if name in stage.frozen else stage.of(name) for stage in stages)
            shared.setdefault(own, []).append(name)
        self._cells = [_Cell(names, own) for own, names in shared.items()]
        self._parts: dict[int, _Part] = {}
        self._step = self.stage_number = 0
        self._averages: list[Averages] = []
        self._enter(0)
        self.set_factor(1.0)

    @property
    def stage_settings(self) -> Settings:
        """See the class."""
        return self._stages[self.stage_number]

    def at_step(self, step: int) -> None:
        """Before optimizer step `step`, counted from 0, and its forward: enters the stage that it belongs to. All ranks do."""
        self._step = step
        if (stage := stage_at(self._stages, step)) != self.stage_number:
            self._enter(stage)

    def step(self, skip: "Tensor | None" = None) -> None:
        """One update of all that is trained."""
        for part in self._parts.values():
            part.optimizer.step(skip)

    def set_factor(self, factor: float) -> None:
        """Sets the learning rate of each to `factor` times its peak, times its own factor and its warm-up at this step."""
        for part in self._parts.values():
            part.optimizer.set_factor(factor * self._own(part.setting))
        for part in self._parts.values():
            if (rate := getattr(part.optimizer, "lr", None)) is not None:
                self.lr = rate / self._own(part.setting)
                return
        if (peak := getattr(self._component, "lr", None)) is not None:  # a stage of a pipeline may have nothing that learns
            self.lr = peak * factor

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for part in self._parts.values():
            part.optimizer.zero_grad()

    def state(self) -> "Mapping[str, Mapping[str, Tensor]]":
        """Of all that is trained."""
        found: dict[str, dict[str, Tensor]] = {}
        for part in self._parts.values():
            for key, tensors in part.optimizer.state().items():
                found.setdefault(key, {}).update(tensors)
        return found

    def shorten(self) -> None:
        """See `Optimizer`."""
        for part in self._parts.values():
            getattr(part.optimizer, "shorten", lambda: None)()

    @contextmanager
    def averaged(self) -> "Iterator[Mapping[str, Tensor]]":
        """See `forge_core.protocols.model.AveragingOptimizer`."""
        with ExitStack() as stack:
            trained = [stack.enter_context(one()) for part in self._parts.values() for one in part.averages]
            yield {name: tensor for tensors in trained for name, tensor in tensors.items()}

    def _own(self, setting: Setting) -> float:
        done = self._step - self.stage_settings.first + 1
        return setting.lr * (min(1.0, done / setting.warmup) if setting.warmup else 1.0)

    def _enter(self, stage: int) -> None:
        self.stage_number = stage
        for number, part in list(self._parts.items()):
            if self._cells[number].settings[stage] is None:
                self._leave_averages(part)
                del self._parts[number]
        freeze(self._model, self.stage_settings.frozen)
        before, self._parts = self._parts, {}
        for number, cell in enumerate(self._cells):
            if (own := cell.settings[stage]) is not None:
                self._parts[number] = self._part(cell, own, before.pop(number, None))
        owners = [(key, name) for part in self._parts.values() for key, held in part.optimizer.state().items() for name in held]
        if len(owners) != len(set(owners)) or {name for _, name in owners} - self._model.learns:
            raise PlanError(NOT_OF_PARAMETERS)
        if not self._averages and any(part.averages for part in self._parts.values()):
            self._averages.append(self.averaged)
            self._model.evaluate_with(self.averaged)
        trained = sum(len(self._cells[number].names) for number in self._parts)
        _log.info("stage %s of %s: this rank trains %s tensors", stage + 1, len(self._stages), trained)

    def _part(self, cell: _Cell, own: Setting, before: _Part | None) -> _Part:
        if before is not None and before.setting[1:3] == own[1:3]:  # the same decay
            return before._replace(setting=own)
        averages: list[Averages] = []
        made = one_setting(self._component, _Told(self._model, averages), own, cell.names)  # type: ignore[arg-type]
        for key, tensors in before.optimizer.state().items() if before is not None else ():
            for name, tensor in tensors.items():
                local_box(made.state()[key][name]).local.copy_(local_box(tensor).local)
        return _Part(own, made, averages)

    @torch.no_grad()
    def _leave_averages(self, part: _Part) -> None:
        """Parameters keep the weights that are evaluated, where they are others than those that were trained."""
        for averages in part.averages:
            with averages() as trained:
                kept = {name: local_box(self._model.everything[name]).local.clone() for name in trained}
            for name, value in kept.items():
                local_box(self._model.everything[name]).local.copy_(value)
