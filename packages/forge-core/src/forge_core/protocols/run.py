"""Interfaces between the trainer, its hooks and its trackers, and the typed recipe that checks and hooks read.

The protocols of the recipe have the keys that packages read from each other's sections. The package that owns a section has a
derived protocol with all keys. Components are open to plugins, so their type is `Any`.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, cast, runtime_checkable

from forge_core.batch import Batch
from forge_core.component import Component
from forge_core.protocols.data import EvaluationSet, Stream
from forge_core.protocols.model import Objective, Optimizer, Topology

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor


class Identity(Protocol):
    """`[job]`."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...


class Train(Protocol):
    """`[train]`; batches are counted in sequences."""

    @property
    def max_steps(self) -> int: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def deterministic(self) -> bool: ...


class Data(Protocol):
    """`[data]`; `sequence_length` in tokens."""

    @property
    def sequence_length(self) -> int: ...


class Precision(Protocol):
    """`[precision]`; `compute` is `bf16`, `fp32` or `fp64`."""

    @property
    def compute(self) -> str: ...


class Checkpoint(Protocol):
    """`[checkpoint]`; `every` in steps, 0 = only at the end; `first`: whether step 0 is also saved."""

    @property
    def every(self) -> int: ...
    @property
    def first(self) -> bool: ...


class Job(Protocol):
    """A recipe (`forge_train.recipe.schema.Job`)."""

    @property
    def job(self) -> Identity: ...
    @property
    def model(self) -> Any: ...
    @property
    def data(self) -> Data: ...
    @property
    def train(self) -> Train: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def transforms(self) -> Mapping[str, Any]: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def objective(self) -> Any: ...
    @property
    def checkpoint(self) -> Checkpoint: ...


class StepResult(Protocol):
    """The result of one step."""

    def numbers(self) -> Mapping[str, float]:
        """All numbers of the step on the host: `loss`, `grad_norm`, `tokens`, `skipped`, ... On an accelerator this waits for the
        step, and the device may run dry: read them when they are due, not in every step."""
        ...

    @property
    def skip(self) -> "Tensor":
        """Scalar on the device: 1 where the update did not happen, since loss or gradient was not finite; else 0."""
        ...


class Evaluation(Protocol):
    """Mean loss over all ranks, in nats per token, the number of tokens behind it, and sums of metrics over these."""

    @property
    def loss(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


class Step(Protocol):
    """Runs the model on this rank's batches."""

    def evaluate(self, batches: Iterable[Batch], objective: Objective | None = None, metrics: Sequence[str] = ()) -> Evaluation:
        """Collective: without gradients. Every rank brings the same number of batches. By another `objective` than that of the
        training where one is given; `metrics` are names of its metrics, the same on all ranks, whose sums are wanted."""
        ...


class StepTimes(Protocol):
    """Times of the parts of a step, such as `forward`; profiles name the parts.

    Attributes:
        timed: whether parts that begin from now on are timed.
    """

    timed: bool

    def take(self) -> dict[str, float]:
        """Returns the seconds of each part since the last call, and `other`, the time between the parts.

        The device has to be done with them: read a number of the step first.
        """
        ...


class PauseClock(Protocol):
    """The time of a run, in seconds.

    Attributes:
        paused: time of this start that was not training, such as evaluation; a hook adds the time that it takes.
    """

    paused: float


class HookRequests(Protocol):
    """What hooks request of the run.

    Attributes:
        save: whether hook `save` saves this step, due by its number or not.
        trace: whether this rank requests a profile; the numbers of the next step carry the request to all ranks.
    """

    save: bool
    trace: bool

    @property
    def marks(self) -> dict[str, int]:
        """Steps whose checkpoints have a name, such as `best`: retention keeps them; a file of that name leads to each."""
        ...

    @property
    def trace_step(self) -> int:
        """The newest judged step in which some rank requested a profile; 0 if there is none. Equal on all ranks."""
        ...


class CheckpointWriter(Protocol):
    """Writes the checkpoints of a run."""

    def may_begin(self) -> bool:
        """Collective: whether a run that was asked to stop has the time for a save; warns if it has not."""
        ...

    def finish(self) -> None:
        """Collective: returns when the newest step for which a save was requested is durable."""
        ...


class RunState(Protocol):
    """How far a run has come: completed optimizer steps, and tokens that went through the model."""

    @property
    def step(self) -> int: ...
    @property
    def tokens(self) -> int: ...


class Stop(Protocol):
    """Whether and why the run ends."""

    def agree(self, topology: Topology) -> bool:
        """Collective: for long work between steps, whether any rank wants the run to end."""
        ...

    def reason(self, state: RunState) -> str:
        """Why the run ends before the next step; empty while it goes on."""
        ...

    def end(self, why: str) -> None:
        """The run has reached what it was for, as `why` says: it ends before the next step, with a checkpoint and exit code 0.
        All ranks say so after the same step."""
        ...


class Watch(Protocol):
    """Is told what the rank is doing, so that a rank that hangs can be named.

    Attributes:
        section: what the rank is doing now.
    """

    section: str

    def enter(self, doing: str, section: str = "") -> None:
        """Every rank passes the same marks in the same order. What lies between two marks may take ten times as long as usual for
        its `section`, a kind of work whose times are alike; without one, nothing is known of it."""
        ...

    def seconds(self) -> Mapping[str, float]:
        """Seconds of this rank in each section so far, the current one included."""
        ...


class Health(Protocol):
    """Counts skipped steps, and warns when the loss leaves its band."""

    @property
    def total(self) -> int:
        """Skipped steps of the whole run."""
        ...

    def summary(self) -> Sequence[str]:
        """Warnings so far, one sentence each."""
        ...

    def warn(self, message: str) -> None:
        """Says something now, on one rank, and again in the report; all ranks say the same."""
        ...


class Run(Protocol):
    """What a hook or a tracker may use of a run (`forge_train.run.run.Run`).

    Attributes:
        job: the typed recipe.
        config: the resolved recipe as plain values; may hold secrets.
        directory: directory of the run.
        topology: this rank's place in the layout, and its collectives.
        model: the trained model (`forge_parallel.model.parallel_model.ParallelModel`).
        optimizer: updates the model.
        step: evaluates the model.
        data: training data.
        evaluations: held-out sets by name.
        state: how far the run has come.
        console: the terminal of rank 0; None on other ranks.
        resumed: whether this start restored a checkpoint.
        results: the newest result of each evaluation, by the name under which it is logged, with its step; equal on all ranks.
        requests: what hooks request of the run.
        saves: writes checkpoints.
        clock: time of the run.
        times: times of the parts of a step.
        stop: whether and why the run ends.
        watch: records what the rank does, so that a rank that hangs can be named.
        health: counts skipped steps, and watches the loss.
        lr: learning rate of the newest step; None if the optimizer has several.
        batches: this rank's micro-batches of the step, on the host.
    """

    @property
    def job(self) -> Job: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def directory(self) -> Path: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def model(self) -> Any: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def step(self) -> Step: ...
    @property
    def data(self) -> Stream: ...
    @property
    def evaluations(self) -> Mapping[str, EvaluationSet]: ...
    @property
    def state(self) -> RunState: ...
    @property
    def console(self) -> "Console | None": ...
    @property
    def resumed(self) -> bool: ...
    @property
    def results(self) -> dict[str, tuple[int, float]]: ...
    @property
    def requests(self) -> HookRequests: ...
    @property
    def saves(self) -> CheckpointWriter: ...
    @property
    def clock(self) -> PauseClock: ...
    @property
    def times(self) -> StepTimes: ...
    @property
    def stop(self) -> Stop: ...
    @property
    def watch(self) -> Watch: ...
    @property
    def health(self) -> Health: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def batches(self) -> Sequence[Batch]: ...

    def save(self) -> None:
        """Collective: saves a checkpoint of the current step, or begins to."""
        ...

    def judge(self) -> None:
        """Collective: reads the numbers of every complete step, so that `stop` and `health` include them.

        On an accelerator the loop reads the numbers of a step when the next step is queued, so `stop` and `health` may be one
        step behind. A hook that acts by them calls `judge` first, on all ranks at the same steps. `save` and
        `StepResult.numbers` need no such call.
        """
        ...

    def log(self, values: Mapping[str, float]) -> None:
        """Writes values of the current step to every tracker."""
        ...

    def weights(self, section: str) -> AbstractContextManager[None]:
        """Inside, the model has the weights that a hook keeps in `section` (`Hook.tensors`); afterwards its own, bit by bit."""
        ...


class Hook(Component):
    """Something that happens around a step; override what you need. Hooks run in the order of the recipe.

    A hook that recipes choose is a dataclass, `@dataclass(kw_only=True)`, whose fields are its keys. What it remembers during a
    run it sets in `__post_init__`, or in fields with `init=False`.

    A hook is given its run by every method. Until `start`, an older job may still work in the run's directory: a hook writes
    nothing there before.

    Attributes:
        state_key: finds the hook's state in a checkpoint. A run sets the registered name of a hook of its recipe, such as
            `forge-train:evaluate`; a hook without one goes by the name of its class. Hooks with the same key keep their order.
        former_keys: keys under which checkpoints of earlier versions have the hook's state.
        observes: the hook only looks, and training is the same without it. An exception in it is said and counted, and the run
            goes on; after three it is switched off. One of a hook that acts on training ends the run.
        generates: the hook asks the model for next tokens, which a bidirectional model cannot tell.
    """

    keeps_state: ClassVar[bool] = True
    state_key: str = ""
    former_keys: tuple[str, ...] = ()
    observes: bool = False
    generates: bool = False

    def build(self) -> Self:
        """Returns a new hook with copies of the keys, so that nothing passes from one run of a recipe to another."""
        return type(self)(**{key.name: deepcopy(getattr(self, key.name)) for key in fields(cast(Any, self)) if key.init})

    def check(self, run: Run) -> None:
        """Once, before the run takes over its directory: raises a ForgeError when the hook cannot work with this run."""

    def start(self, run: Run) -> None:
        """Once, after a checkpoint was restored and before the first step."""

    def before_step(self, run: Run) -> None:
        """Before forward and backward."""

    def before_update(self, run: Run, result: StepResult) -> None:
        """Gradients are complete and visible; parameters are those of the step before."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """Parameters are updated, gradients cleared, the cursor advanced."""

    def finish(self, run: Run) -> None:
        """Once, after the last step or when the run stops early; not after an exception."""

    def leave(self, run: Run) -> None:
        """Once, where the run goes back to a checkpoint, with hooks that are made anew: closes what this one has opened. `finish`
        does not follow."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of this hook: JSON as it stands."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave, after `check` and before `start`."""

    def tensors(self, model: Any) -> "Mapping[str, Mapping[str, Tensor]]":
        """What a checkpoint keeps of this hook besides: section -> name of a parameter -> live tensor, laid out as the parameter.

        Asked for at each save, and at a resume after `load_state`, when the tensors are filled. No other hook has this section.
        """
        return {}


class Tracker(Protocol):
    """Where numbers are written; lives on rank 0 only. A failing tracker never stops a run.

    It is built before the run owns its directory, so it writes nothing there before `rewind`.
    """

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """Once at every start, before any write: the run goes on after `step`, 0 for a new one; later steps are void."""
        ...

    def close(self) -> None: ...


EndStatus = Literal["finished", "failed", "killed", "running"]
"""How a start ended: at its end, with an exception, by a signal; "running" if another start goes on in its place."""


@runtime_checkable
class EndingTracker(Tracker, Protocol):
    """A tracker that shows how a start ended."""

    def end(self, status: EndStatus) -> None:
        """Once before `close`, if it is known how the start ended."""
        ...
