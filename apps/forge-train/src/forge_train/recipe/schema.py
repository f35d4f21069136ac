"""The typed tree of a recipe. Every field is a table or key of the TOML file. Does not import torch."""

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
    """Name, directory and seed of the run."""

    key_class: ClassVar = FREE

    name: str = "run"
    """Name of the run; its files are in `runs/<name>`."""
    dir: str | None = None
    """Directory of the run instead of `runs/<name>`."""
    seed: Annotated[int, Ge(0), IDENTITY] = 0
    """Fixes the initial weights and, unless `data.seed` is set, the order of the data."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith(".") or len(self.name.encode()) > 200:
            raise ValueError("name must be one path component: not empty, no '/', no leading '.', at most 200 bytes")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Weights that a run starts from, at step 0 with a new optimizer. A resume ignores this section."""

    key_class: ClassVar = FREE

    weights: Annotated[str | None, Place] = None
    """A run, a checkpoint, a mark such as `best`, a folder in the Hugging Face format, or safetensors that Forge wrote. Unset
    (`"none"`), weights are initialized at random from `job.seed`."""
    section: str = "model"
    """Weights of the checkpoint to load: `model`, or a set that a hook saved, such as `ema`."""
    include: tuple[str, ...] = ("*",)
    """Names of the model's tensors to load, with `*` and `?`, such as `blocks.*`; all others are initialized at random."""
    exclude: tuple[str, ...] = ()
    """Names to leave out of `include`."""
    rename: tuple[str, ...] = ()
    """Prefixes of names to replace, each as `OLD=NEW`, such as `encoder.=blocks.`; the longest matching OLD applies."""
    draw: tuple[str, ...] = ()
    """Names of the model's tensors to initialize at random because the weights have another kind of layer there, such as
    `blocks.*.mlp.*` for experts in place of dense layers. Without this key, such weights are refused."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Length of the run, batch sizes, and what happens at bad steps."""

    key_class: ClassVar = FREE

    max_steps: Annotated[int, Gt(0)] = 1000
    """Number of optimizer steps of the whole run."""
    stop_at: Annotated[int, Gt(0)] | None = None
    """Pauses the run after this step, with an evaluation, a checkpoint and exit code 0. The schedule still follows `max_steps`;
    start again with a later step to continue. Unset (`"none"`), the run does not pause."""
    global_batch: Annotated[int, Gt(0), DATA] = 32
    """Sequences per optimizer step over all ranks."""
    micro_batch: Annotated[int, Gt(0), LAYOUT] = 8
    """Sequences in one forward pass on one rank; the number of gradient accumulation steps follows from it."""
    grad_clip: Annotated[float, Gt(0)] | None = 1.0
    """Maximum norm of the gradient of all parameters; unset (`"none"`) switches clipping off."""
    max_skipped: Annotated[int, Gt(0)] = 10
    """A step whose loss or gradient is not finite is skipped; this many skipped steps among the last 100 end the run."""
    rollback_after: Annotated[int, Gt(0)] | None = None
    """Number of consecutive bad steps (skipped, or with a loss above its band) after which the run rolls back: it loads the
    newest verified checkpoint whose loss was in the band, and skips the data read since. Unset (`"none"`), runs never roll
    back."""
    max_rollbacks: Annotated[int, Ge(0)] = 3
    """Maximum number of rollbacks; the next one ends the run with exit code 7."""
    rollback_lr: Annotated[float, Gt(0), Le(1)] = 1.0
    """Factor on the learning rate for the rest of the run, applied at each rollback."""
    collect_every: Annotated[int, Gt(0)] | None = 50
    """Steps between Python's cyclic garbage collections, which run on all ranks at the same step so that no rank waits for
    another. Unset (`"none"`), Python collects garbage by its own rules."""
    stages: list[TrainingStage] = field(default_factory=list)
    """Training stages in order, from step 0 on; each trains its own parameters and freezes the others. Empty: one stage."""
    deterministic: bool = False
    """Uses deterministic kernels, which may be slower, so that the same recipe on the same machines computes the same bits;
    torch raises an error that names any operator without such a kernel. Without it, GPUs may round sums differently in each
    run; CPUs do not."""
    threads: Annotated[int, Gt(0)] | None = None
    """CPU threads per process. Default: OMP_NUM_THREADS, or without it, the cores available to this process (by affinity and
    control group quota) divided by the number of processes on the machine."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A whole recipe."""

    key_class: ClassVar = FREE

    job: JobSection = field(default_factory=JobSection)
    """Name, directory and seed."""
    model: Annotated[Component, Slot("forge.models", default="decoder"), IDENTITY] = Slot.unset()
    """The model to train."""
    data: Data = field(default_factory=Data)
    """Training and evaluation data."""
    start: Start = field(default_factory=Start)
    """Weights to start from."""
    train: Train = field(default_factory=Train)
    """Length of the run and batch sizes."""
    parallel: Parallel = field(default_factory=Parallel)
    """Sizes of the parallel axes."""
    precision: Precision = field(default_factory=Precision)
    """Number formats."""
    transforms: dict[str, Annotated[Component, Slot("forge.transforms", named_by_key=True), LAYOUT]] = field(default_factory=dict)
    """Parallelism, compilation and other strategies, each switched on by its table; an axis larger than 1 adds its default."""
    optimizer: Annotated[Component, Slot("forge.optimizers", default="adamw"), IDENTITY] = Slot.unset()
    """The optimizer that updates the parameters."""
    parameters: Parameters = field(default_factory=Parameters)
    """Which parameters are trained, and parameters with settings of their own."""
    schedule: Annotated[Component, Slot("forge.schedules", default="cosine")] = Slot.unset()
    """The learning rate over the run."""
    objective: Annotated[Component, Slot("forge.objectives", default="cross_entropy"), IDENTITY] = Slot.unset()
    """The loss to minimize."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """When and where checkpoints are saved."""
    hooks: list[Annotated[Component, Slot("forge.hooks")]] = field(default_factory=list)
    """Hooks that run around each step, in this order."""
    trackers: list[Annotated[Component, Slot("forge.trackers")]] = field(default_factory=list)
    """Where metrics are written, in addition to the run's own JSON lines."""
