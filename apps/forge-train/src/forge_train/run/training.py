"""What a start decides, what is trained, how far it has come, and what hooks request. `settings_in` returns the
settings of single parameters: those of `[parameters]` and `[[train.stages]]`.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.errors import PlanError
from forge_core.protocols.data import Cursor, EvaluationSet, Stream
from forge_core.protocols.model import Objective, Optimizer
from forge_core.protocols.run import Hook
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint
from forge_parallel.optim.groups import Settings
from forge_parallel.optim.optimizers import build_optimizer
from forge_parallel.optim.stages import settings_of
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step, StepTimer
from forge_train.recipe.schema import Job
from forge_train.run.base import FrozenBase

if TYPE_CHECKING:
    from forge_train.recipe.load import Recipe


@dataclass(frozen=True)
class OptimizerSpec:
    """How the optimizer of a run is built.

    Attributes:
        component: `[optimizer]` of the recipe.
        settings: learning rate, decay and state of each parameter, from `[parameters]` and `[[train.stages]]`.
    """

    component: Any
    settings: Settings

    def build(self, model: Any, settings: Settings | None = None) -> Any:
        """Builds the optimizer of a model, or of some parameters of it (`forge_parallel.optim.groups.Beginning`)."""
        return build_optimizer(self.component, model, settings or self.settings)

    def frozen(self, optimizer: Optimizer) -> frozenset[str]:
        """Returns the parameters that are not trained: never, or not in the stage that the optimizer is in."""
        stage = getattr(optimizer, "stage_settings", None)
        return self.settings.frozen if stage is None else stage.frozen


@dataclass(frozen=True)
class Decided:
    """Everything that a start has decided on the meta device, before it allocates the model.

    Attributes:
        recipe: the recipe as it was read.
        job: the recipe with the micro-batch that fits into memory.
        directory: directory of the run.
        topology: this rank's place in the layout.
        data: training data.
        evaluations: held-out sets by name.
        blueprint: the model on the meta device.
        plan: the transforms, in order.
        optimizer: how the optimizer is built.
        factor: factor on the learning rate, by step.
        objective: what is minimized.
        hooks: hooks of the recipe, in order; a start that follows a rollback has new ones.
        plugins: distribution and version of every component that the recipe uses, as a checkpoint records them.
        origin: what checkpoints record of the weights that the run started from (`forge_train.run.weights`).
        differences: accepted differences between the recipe and the checkpoint that the run resumes from.
        base: the frozen base of the model's adapter; None without one.
    """

    recipe: "Recipe"
    job: Job
    directory: Path
    topology: Topology
    data: Stream
    evaluations: Mapping[str, EvaluationSet]
    blueprint: Blueprint
    plan: Plan
    optimizer: OptimizerSpec
    factor: Callable[[int], float]
    objective: Objective
    hooks: tuple[Hook, ...]
    plugins: tuple[Mapping[str, str], ...]
    origin: Mapping[str, Any]
    differences: tuple[str, ...] = ()
    base: FrozenBase | None = None


@dataclass
class State:
    """How far a run has come.

    Attributes:
        step: completed optimizer steps.
        tokens: tokens that went through the model, without padding.
        cursor: data position.
        complete: whether weights, optimizer and data position belong to the same step; False while a step runs.
    """

    step: int
    tokens: int
    cursor: Cursor
    complete: bool = True

    def advance(self, cursor: Cursor, tokens: int) -> None:
        """Counts a step that is complete, and the data that it used."""
        self.step += 1
        self.tokens += tokens
        self.cursor = cursor
        self.complete = True


@dataclass
class Training:
    """What a run trains.

    Attributes:
        factor: factor on the learning rate, by step.
        times: times of the parts of a step.
        parameters: number of parameters of the whole model.
        facts: metadata of the checkpoint that was restored; empty at the start of a run.
    """

    model: ParallelModel
    optimizer: Optimizer
    factor: Callable[[int], float]
    step: Step
    times: StepTimer
    data: Stream
    evaluations: Mapping[str, EvaluationSet]
    state: State
    parameters: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def restored(self, step: int, facts: Mapping[str, Any]) -> None:
        """Takes the position of a checkpoint whose tensors were restored."""
        self.state = State(step, facts["tokens"], facts["cursor"])
        self.facts = facts


@dataclass
class Requests:
    """What hooks request of the run.

    Attributes:
        save: whether hook `save` saves this step, due by its number or not.
        marks: steps whose checkpoints have a name, such as `best`: retention keeps them; a file of that name leads to each.
        trace: whether this rank requests a profile; the numbers of the next step carry the request to all ranks.
        trace_step: the newest judged step in which some rank requested a profile; 0 if there is none. Equal on all ranks.
    """

    save: bool = False
    marks: dict[str, int] = field(default_factory=dict)
    trace: bool = False
    trace_step: int = 0


@dataclass
class Clock:
    """The time of a run, in seconds.

    Attributes:
        earlier: duration of earlier starts, as their checkpoints say.
        started: when this start began, by `time.monotonic`.
        paused: time of this start that was not training, such as evaluation.
        pauses: the same by hook.
    """

    earlier: float = 0.0
    started: float = field(default_factory=time.monotonic)
    paused: float = 0.0
    pauses: dict[str, float] = field(default_factory=dict)

    def blame(self, hook: str, since: float) -> None:
        """Counts the pause since `paused` was `since` as one of a hook."""
        if self.paused > since:
            self.pauses[hook] = self.pauses.get(hook, 0.0) + self.paused - since

    @property
    def seconds(self) -> float:
        """Duration of all starts of the run, pauses included."""
        return self.earlier + time.monotonic() - self.started


def settings_in(job: Job, blueprint: Blueprint) -> Settings:
    """Returns the settings of `[parameters]` and `[[train.stages]]` for the blueprint of the recipe's model.

    Raises:
        PlanError: a pattern matches no parameter, all parameters are frozen, widths cannot be scaled, or stages do not fit the
            model.
    """
    narrow = narrow_of(job)
    narrow_blueprint = None if narrow is None else Blueprint.of(narrow.build)
    return settings_of(blueprint, job.parameters.groups, narrow_blueprint, job.train.stages)


def narrow_of(job: Job) -> Any:
    """Returns the component of the narrow model whose learning rates were tuned; None without `parameters.width_base`.

    Raises:
        PlanError: a model with these widths is not valid.
    """
    if not job.parameters.width_base:
        return None
    try:
        return replace(job.model, **job.parameters.width_base)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise PlanError(f"parameters.width_base: the model with these widths is not valid: {error}") from error
