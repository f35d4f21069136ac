"""The section `[checkpoint]` of a recipe, and the components for stores."""

from dataclasses import dataclass
from math import inf, lcm
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from forge_core.component import FREE, Component, Slot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forge_ckpt.checkpoint.retention import RetentionPolicy
    from forge_core.protocols.checkpoint import Store


COUNTED = 10_000
"""Maximum number of saves for which `most_kept` evaluates the rules save by save."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When checkpoints are written, which are kept, and how a run starts from existing ones."""

    key_class: ClassVar = FREE

    every: Annotated[int, Ge(0)] = 500
    """Optimizer steps between saves; 0 saves only at the end."""

    first: bool = False
    """Also saves step 0: the initial weights, and the data position before the first sample."""

    keep: Annotated[int, Ge(0)] = 3
    """Number of newest checkpoints to keep; 0 keeps all. A checkpoint is deleted only if a newer one that is kept was verified.
    While the loss is above its band, the newest checkpoint from before is kept too."""

    keep_every: Annotated[int, Ge(0)] = 0
    """Also keeps checkpoints of steps that are multiples of this number; 0 disables this rule."""

    keep_log_spaced: Annotated[int, Ge(0)] | None = None
    """Also keeps the first checkpoints from this step on, and from 1, 2, 4, 8, ... steps after it on. `"none"` disables this
    rule."""

    keep_hours: Annotated[float, Ge(0), Lt(inf)] = 0.0
    """Also keeps the first checkpoint of each window of this many hours of training; 0 disables this rule."""

    mode: Literal["sync", "async"] = "sync"
    """How a save runs: `sync` stops training until the checkpoint is durable; `async` stops training only while the state is
    copied, which needs host memory of the size of the state."""

    saver: Literal["process", "thread"] = "process"
    """Where an `async` save is written: in a separate process, which leaves the interpreter to training, or in a thread."""

    busy: Literal["wait", "skip", "queue"] = "wait"
    """What an `async` save does while the previous one is still being written: training waits (`wait`), the save is skipped
    (`skip`), or it is written next (`queue`, which needs the memory of a second copy)."""

    grace: Annotated[float, Gt(0)] | None = None
    """Seconds between a scheduler's stop signal and the kill of the processes. If previous saves took longer, the final save is
    left out, so that the run ends in time. If unset (`"none"`), only the end of a SLURM job (`SLURM_JOB_END_TIME`) counts."""

    store: Annotated[Component, Slot("forge.stores", default="local")] = Slot.unset()
    """Storage of the files."""

    resume: Literal["auto", "never", "require"] | Annotated[int, Ge(0)] = "auto"
    """How a run starts: from the newest verified checkpoint, if any (`auto`); the same, but without one the start fails
    (`require`); without a checkpoint (`never`); or from the checkpoint of a step (a number; later checkpoints are renamed when
    the run saves again)."""

    allow: tuple[str, ...] | str = ()
    """One key or a list of keys, such as `model.rope.theta`, whose values may differ from the checkpoint although they change the
    trained function. A refused resume lists the keys."""

    def policy(self) -> "RetentionPolicy":
        """Returns the rules of retention in these keys."""
        from forge_ckpt.checkpoint.retention import RetentionPolicy

        return RetentionPolicy(self.keep, self.keep_every, self.keep_log_spaced, self.keep_hours)

    def most_kept(self, steps: int) -> int:
        """Returns the number of checkpoints that a run of `steps` steps keeps at its end, without those of `keep_hours`, which
        are unknown in advance. For more than `COUNTED` saves it is an upper limit: the sum over the rules."""
        saves = steps // self.every if self.every else 0
        if saves > COUNTED:
            every = steps // lcm(self.every, self.keep_every) if self.keep_every else 0
            spaced = 0 if self.keep_log_spaced is None else 2 + steps.bit_length()
            return min(saves + 2, self.keep + every + spaced + self.first) if self.keep else saves + 2
        from forge_ckpt.checkpoint.retention import judge
        from forge_ckpt.format.names import Committed, step_name

        saved = {steps, *(range(self.every, steps, self.every) if self.every else ()), *((0,) if self.first else ())}
        entries = [Committed(step, 1, step_name(step)) for step in sorted(saved, reverse=True)]
        return sum(bool(verdict.kept_by) for verdict in judge(entries, self.policy()))


@dataclass(frozen=True, kw_only=True)
class Local(Component):
    """A directory with the same path on every rank: on a local disk, or on a shared file system."""

    key_class: ClassVar = FREE
    implementation: ClassVar[str] = "forge_ckpt.store.local:LocalStore"

    shared: bool = False
    """Permissions of files follow the umask, so that a group can read them; by default only the owner can."""

    allow_foreign_owner: bool = False
    """Accepts a directory of another user, who could change the checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Remote(Component):
    """Object storage that every rank can access, through fsspec: `pip install 'forge-ckpt[remote]'`.

    fsspec and its packages read credentials and server addresses from the environment, such as `AWS_ENDPOINT_URL`, or from
    their configuration files.
    """

    key_class: ClassVar = FREE

    url: str
    """URL of the checkpoints of all runs. A run has a folder with the name of its directory: with `s3://bucket/runs`, the
    checkpoints of `runs/demo` are in `s3://bucket/runs/demo/checkpoints`."""

    def __post_init__(self) -> None:
        from forge_ckpt.store.objects import check_url

        check_url(self.url)

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[Remote]":
        return (cls(url=f"memory://{folder.name}"),)

    def build(self, path: str | Path) -> "Store":
        from forge_ckpt.store.remote import RemoteStore

        *_, run, name = Path(path).resolve().parts
        return RemoteStore(f"{self.url.rstrip('/')}/{run}/{name}")
