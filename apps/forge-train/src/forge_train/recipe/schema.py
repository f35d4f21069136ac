"""The typed tree of a recipe. Every field is a table or key of the TOML file; nothing here imports torch."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from forge_ckpt.components import Checkpoint
from forge_core.component import DATA, FREE, IDENTITY, LAYOUT, Component, Place, Slot
from forge_data.section import Data
from forge_parallel.optim.groups import Parameters, TrainingStage
from forge_parallel.sections import Parallel, Precision


@dataclass(frozen=True, kw_only=True)
class JobSection:
    """Who this run is."""

    key_class: ClassVar = FREE

    name: str = "run"
    """Name of the run; its files live in `runs/<name>`."""
    dir: str | None = None
    """Directory of the run instead of `runs/<name>`."""
    seed: Annotated[int, Ge(0), IDENTITY] = 0
    """Fixes the initial weights and, unless `data.seed` is set, the order of the data."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith(".") or len(self.name.encode()) > 200:
            raise ValueError("name is one path component: not empty, no '/', no leading '.', at most 200 bytes")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Weights that a run starts from, at step 0 with a new optimizer. A resume does not look at them."""

    key_class: ClassVar = FREE

    weights: Annotated[str | None, Place] = None
    """A run, a checkpoint, a mark such as `best`, a folder in the Hugging Face format, or safetensors that Forge wrote. Unset
    (`"none"`), weights are drawn from `job.seed`."""
    section: str = "model"
    """Which ones of a checkpoint: `model`, or what a hook kept next to them, such as `ema`."""
    include: tuple[str, ...] = ("*",)
    """Names of the model's tensors that are taken, with `*` and `?`, such as `blocks.*`; all others begin as drawn."""
    exclude: tuple[str, ...] = ()
    """Names that are not taken although `include` has them."""
    rename: tuple[str, ...] = ()
    """How names begin that differ, each as `OLD=NEW`, such as `encoder.=blocks.`; the longest OLD counts."""
    draw: tuple[str, ...] = ()
    """Names of the model's tensors that begin as drawn although the weights have them in another kind of layer, such as
    `blocks.*.mlp.*` of experts where the weights are dense; without it that is refused."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long and in what portions."""

    key_class: ClassVar = FREE

    max_steps: Annotated[int, Gt(0)] = 1000
    """Optimizer steps of the whole run."""
    stop_at: Annotated[int, Gt(0)] | None = None
    """Ends this start after that step, with an evaluation, a checkpoint and exit code 0; the schedule stays that of `max_steps`,
    and a start with a later step goes on. Unset (`"none"`), the run goes to its end."""
    global_batch: Annotated[int, Gt(0), DATA] = 32
    """Sequences per optimizer step over all ranks; the anchor of every resume."""
    micro_batch: Annotated[int, Gt(0), LAYOUT] = 8
    """Sequences in one forward pass on one rank; gradient accumulation follows."""
    grad_clip: Annotated[float, Gt(0)] | None = 1.0
    """Largest norm of the whole gradient; unset (`"none"`) switches clipping off."""
    max_skipped: Annotated[int, Gt(0)] = 10
    """Steps with a loss or gradient that is not finite, among the last 100, that end the run; each one is skipped."""
    rollback_after: Annotated[int, Gt(0)] | None = None
    """Bad steps in a row, skipped or with a loss above its band, after which the run goes back to its newest verified checkpoint
    whose loss was in the band, and on from there without the data read since. Unset (`"none"`), a run does not go back."""
    max_rollbacks: Annotated[int, Ge(0)] = 3
    """So many times a run goes back; once more ends it with exit code 7."""
    rollback_lr: Annotated[float, Gt(0), Le(1)] = 1.0
    """Factor on the learning rate for the rest of the run, each time that it goes back."""
    collect_every: Annotated[int, Gt(0)] | None = 50
    """Steps after which Python looks for garbage in cycles, on all ranks at once: one that does so alone keeps others waiting.
    Unset (`"none"`), each process does so when it likes."""
    stages: list[TrainingStage] = field(default_factory=list)
    """What is trained when, and all else is frozen; one after the other from step 0 on. Empty: the same in all steps."""
    deterministic: bool = False
    """The same recipe on the same machines gives the same bits: torch takes kernels that sum in one order, which may be slower,
    and names an operator that has none. Without it, a GPU may round sums differently each time; a CPU does not."""
    threads: Annotated[int, Gt(0)] | None = None
    """CPU threads per process. By default OMP_NUM_THREADS; without it, the cores that this process may use (affinity, control
    group's quota) divided by the processes on the machine."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A whole recipe."""

    key_class: ClassVar = FREE

    job: JobSection = field(default_factory=JobSection)
    """Name, directory and seed."""
    model: Annotated[Component, Slot("forge.models", default="decoder"), IDENTITY] = Slot.unset()
    """What is trained."""
    data: Data = field(default_factory=Data)
    """What it is trained on."""
    start: Start = field(default_factory=Start)
    """Weights to start from."""
    train: Train = field(default_factory=Train)
    """Length and batch sizes."""
    parallel: Parallel = field(default_factory=Parallel)
    """Sizes of the parallel axes."""
    precision: Precision = field(default_factory=Precision)
    """Number formats."""
    transforms: dict[str, Annotated[Component, Slot("forge.transforms", named_by_key=True), LAYOUT]] = field(default_factory=dict)
    """Strategies that are switched on by their presence; an axis larger than 1 pulls in its default."""
    optimizer: Annotated[Component, Slot("forge.optimizers", default="adamw"), IDENTITY] = Slot.unset()
    """How parameters are updated."""
    parameters: Parameters = field(default_factory=Parameters)
    """Which of them are trained, and which in another way than the others."""
    schedule: Annotated[Component, Slot("forge.schedules", default="cosine")] = Slot.unset()
    """How the learning rate moves over the run."""
    objective: Annotated[Component, Slot("forge.objectives", default="cross_entropy"), IDENTITY] = Slot.unset()
    """What is minimized."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """When and where state is saved."""
    hooks: list[Annotated[Component, Slot("forge.hooks")]] = field(default_factory=list)
    """What happens around a step, in order."""
    trackers: list[Annotated[Component, Slot("forge.trackers")]] = field(default_factory=list)
    """Where numbers are written besides the JSON lines that every run keeps."""
