"""Training stages (`[[train.stages]]`): which parameters are frozen, and how others are trained, as a function of the step.

Names are resolved once against the names of the whole model, so all ranks agree without communication. `StagedOptimizer` switches
the trained parameters between two stages (docs/adr/0035).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch

from forge_core.errors import PlanError
from forge_core.protocols.model import Optimizer
from forge_core.specs import Init, Specs
from forge_parallel.model.parallel_model import freeze
from forge_parallel.model.realize import Blueprint
from forge_parallel.optim.groups import (
    NO_SETTINGS,
    NOT_OF_PARAMETERS,
    PLAIN,
    GroupSection,
    Setting,
    Settings,
    grouped,
    nearest,
    one_setting,
    scaled,
)
from forge_parallel.placement.boxes import local_box

if TYPE_CHECKING:
    from torch import Tensor

    from forge_parallel.model.parallel_model import ParallelModel


class Stage(Protocol):
    """See `forge_parallel.optim.groups.TrainingStage`."""

    @property
    def until(self) -> int | None: ...
    @property
    def train(self) -> Sequence[str]: ...
    @property
    def lr(self) -> Mapping[str, float]: ...
    @property
    def weight_decay(self) -> Mapping[str, float]: ...
    @property
    def warmups(self) -> Mapping[str, int]: ...


def staged(stages: Sequence[Stage], names: Sequence[str], specs: Specs, settings: Settings) -> Settings:
    """Returns the settings of a run with training stages. Their `frozen` are the parameters that no stage trains; `stages` has
    the settings of each stage.

    Args:
        stages: the stages, in order.
        names: names of all parameters of the whole model.
        specs: specs of the model, with its roles and ties.
        settings: settings that apply in all stages, frozen parameters included.

    Raises:
        PlanError: a name or pattern matches no parameter, a stage trains nothing, or has settings for parameters that it freezes.
    """
    if not stages:
        return settings
    per_stage: list[Settings] = []
    first = 0
    for index, stage in enumerate(stages):
        per_stage.append(_one(f"train.stages.{index}", stage, first, names, specs, settings))
        first = stage.until or first
    frozen = frozenset.intersection(*(own.frozen for own in per_stage))
    # For plans, which look at one setting per parameter: that of the first stage that trains it.
    each = {
        name: own.of(name)
        for name in names
        for own in [next((own for own in per_stage if name not in own.frozen), settings)]
        if own.of(name) != PLAIN
    }
    return replace(settings, each=each, frozen=frozen, stages=tuple(per_stage))


def stage_at(stages: Sequence[Settings], step: int) -> int:
    """Returns the index of the stage of optimizer step `step`, counted from 0."""
    return max(index for index, stage in enumerate(stages) if stage.first <= step)


def _one(key: str, stage: Stage, first: int, names: Sequence[str], specs: Specs, before: Settings) -> Settings:
    wanted: set[str] = set()
    for name in stage.train:
        matches = _matches(f"{key}.train", name, names, specs)
        if not matches - before.frozen:
            raise PlanError(
                f"{key}.train: parameters.groups or the model itself freezes all parameters that {name!r} matches; remove it"
            )
        wanted |= matches - before.frozen
    each = dict(before.each)
    for what, values in (("lr", stage.lr), ("weight_decay", stage.weight_decay), ("warmup", stage.warmups)):
        chosen: dict[str, float] = {}
        for name, value in values.items():
            matches = _matches(f"{key}.{what}", name, names, specs) & wanted
            if not matches:
                raise PlanError(f"{key}.{what}: the stage trains no parameter of {name!r}; add it to {key}.train, or remove it")
            chosen |= dict.fromkeys(matches, value)
        for name, value in chosen.items():
            each[name] = _with(each.get(name, PLAIN), before.of(name), what, value)
    each = {name: setting for name, setting in each.items() if name in wanted and setting != PLAIN}
    return replace(before, each=each, frozen=frozenset(names) - wanted, first=first)


def _with(now: Setting, before: Setting, what: str, value: float) -> Setting:
    if what == "lr":
        return now._replace(lr=before.lr * value)
    return now._replace(weight_decay=value) if what == "weight_decay" else now._replace(warmup=int(value))


def _matches(key: str, name: str, names: Sequence[str], specs: Specs) -> set[str]:
    if name in specs.roles:
        return set(specs.roles[name]) & set(names)
    matches = {parameter for parameter in names if fnmatchcase(parameter, name)}
    if not matches:
        raise PlanError(f"{key}: {name!r} {nearest(name, names, specs.ties, tuple(specs.roles))}")
    return matches


_log = logging.getLogger(__name__)

Averages = Callable[[], AbstractContextManager[Mapping[str, "Tensor"]]]


class _Cell(NamedTuple):
    """Parameters that have the same settings in every stage; None in stages that freeze them."""

    names: list[str]
    settings: tuple[Setting | None, ...]


class _Part(NamedTuple):
    """The optimizer of a cell in a stage, and the contexts of its averages."""

    setting: Setting
    optimizer: Optimizer
    averages: list[Averages]


class _Told:
    """The model as the optimizer of a cell sees it; collects the optimizer's averages."""

    def __init__(self, model: Any, averages: list[Averages]) -> None:
        self._model, self._averages = model, averages

    def evaluate_with(self, averages: Averages) -> None:
        self._averages.append(averages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class StagedOptimizer:
    """The optimizers of a run with training stages; implements `forge_core.protocols.model.Optimizer`. It starts in the first
    stage, and freezes and unfreezes parameters of the model, which no other optimizer may train.

    Attributes:
        stage_settings: settings of the current stage, frozen parameters included.
        stage_number: index of the current stage, from 0.
        lr: learning rate of the latest step without factors of parameters, if the optimizer has a single one.

    Raises:
        PlanError: a stage sets a weight decay that the optimizer lacks, or a state has a name that is not a parameter's.
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
        """Settings of the current stage, frozen parameters included."""
        return self._stages[self.stage_number]

    def at_step(self, step: int) -> None:
        """Enters the stage of optimizer step `step`, counted from 0. All ranks call it before the forward of the step."""
        self._step = step
        if (stage := stage_at(self._stages, step)) != self.stage_number:
            self._enter(stage)

    def step(self, skip: "Tensor | None" = None) -> None:
        """Updates all trained parameters."""
        for part in self._parts.values():
            part.optimizer.step(skip)

    def set_factor(self, factor: float) -> None:
        """Sets each learning rate to `factor` times its peak, its own factor and its warm-up at this step."""
        for part in self._parts.values():
            part.optimizer.set_factor(factor * self._own(part.setting))
        for part in self._parts.values():
            if (rate := getattr(part.optimizer, "lr", None)) is not None:
                self.lr = rate / self._own(part.setting)
                return
        if (peak := getattr(self._component, "lr", None)) is not None:  # a pipeline stage may have nothing to train
            self.lr = peak * factor

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for part in self._parts.values():
            part.optimizer.zero_grad()

    def state(self) -> "Mapping[str, Mapping[str, Tensor]]":
        """Returns the states of all trained parameters."""
        states: dict[str, dict[str, Tensor]] = {}
        for part in self._parts.values():
            for key, tensors in part.optimizer.state().items():
                states.setdefault(key, {}).update(tensors)
        return states

    def shorten(self) -> None:
        """See `Optimizer`."""
        for part in self._parts.values():
            getattr(part.optimizer, "shorten", lambda: None)()

    @contextmanager
    def averaged(self) -> "Iterator[Mapping[str, Tensor]]":
        """See `forge_core.protocols.model.AveragingOptimizer`."""
        with ExitStack() as stack:
            trained = [stack.enter_context(averages()) for part in self._parts.values() for averages in part.averages]
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
        owners = [(key, name) for part in self._parts.values() for key, state in part.optimizer.state().items() for name in state]
        if len(owners) != len(set(owners)) or {name for _, name in owners} - self._model.learns:
            raise PlanError(NOT_OF_PARAMETERS)
        if not self._averages and any(part.averages for part in self._parts.values()):
            self._averages.append(self.averaged)
            self._model.evaluate_with(self.averaged)
        trained = sum(len(self._cells[number].names) for number in self._parts)
        _log.info("stage %s of %s: this rank trains %s tensors", stage + 1, len(self._stages), trained)

    def _part(self, cell: _Cell, own: Setting, before: _Part | None) -> _Part:
        if before is not None and before.setting[1:3] == own[1:3]:  # equal weight decay
            return before._replace(setting=own)
        averages: list[Averages] = []
        optimizer = one_setting(self._component, _Told(self._model, averages), own, cell.names)  # type: ignore[arg-type]
        for key, tensors in before.optimizer.state().items() if before is not None else ():
            for name, tensor in tensors.items():
                local_box(optimizer.state()[key][name]).local.copy_(local_box(tensor).local)
        return _Part(own, optimizer, averages)

    @torch.no_grad()
    def _leave_averages(self, part: _Part) -> None:
        """Replaces the trained weights of parameters by the evaluated ones, where these differ."""
        for averages in part.averages:
            with averages() as trained:
                evaluated = {name: local_box(self._model.everything[name]).local.clone() for name in trained}
            for name, value in evaluated.items():
                local_box(self._model.everything[name]).local.copy_(value)

    def torch(self) -> NoReturn:
        """Raises `PlanError`: a `torch.optim.Optimizer` has the same parameters in all steps."""
        raise PlanError(
            "optimizer.torch(): training stages change which parameters are trained, and torch's parameter groups cannot follow; "
            "call at_step, set_factor and step of this optimizer, or build an optimizer without stages"
        )


def settings_of(
    blueprint: Blueprint, groups: Iterable[GroupSection] = (), narrow: Blueprint | None = None, stages: Sequence[Stage] = ()
) -> Settings:
    """Returns the settings of a model's parameters.

    Args:
        blueprint: the whole model.
        groups: patterns of names and their settings; see `forge_parallel.optim.groups`.
        narrow: the model for which rates were tuned, if widths are scaled.
        stages: training stages of the run, see `optim.stages`.

    Raises:
        PlanError: a pattern matches no parameter, all parameters are frozen, widths cannot be scaled, or stages do not fit.
    """
    shapes = _shapes(blueprint)
    before = NO_SETTINGS if narrow is None else scaled(blueprint.specs, shapes, narrow.specs, _shapes(narrow))
    trained = [name for name, parameter in blueprint.module.named_parameters() if parameter.requires_grad]
    settings = grouped(groups, list(shapes), blueprint.specs.ties, before)
    # The model itself may freeze parameters that no group matches.
    settings = replace(settings, frozen=settings.frozen | (shapes.keys() - set(trained)))
    return staged(stages, list(shapes), blueprint.specs, settings)


def apply(blueprint: Blueprint, settings: Settings) -> Blueprint:
    """Freezes parameters and sets initial weights according to the settings. Changes the blueprint's module in place."""
    for name, parameter in blueprint.module.named_parameters():
        if name in settings.frozen:
            parameter.requires_grad_(False)
    drawn = {name: replace(blueprint.specs.tensors[name], init=Init("normal", std)) for name, std in settings.std.items()}
    return Blueprint(blueprint.module, replace(blueprint.specs, tensors={**blueprint.specs.tensors, **drawn}))


def _shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in blueprint.module.named_parameters()}
