"""The table `[checkpoint]` of a recipe, and the stores that it can name."""

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
"""Saves of a run that are looked at one by one."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When checkpoints are written, how many are kept, and what a start does with those it finds."""

    key_class: ClassVar = FREE

    every: Annotated[int, Ge(0)] = 500
    """Optimizer steps between saves; 0 saves at the end only."""

    first: bool = False
    """Save step 0 too: the initial weights, and the position before the first sample."""

    keep: Annotated[int, Ge(0)] = 3
    """Newest checkpoints that are kept; 0 keeps all. What is deleted is older than one that stays and was verified. While the
    loss is above its band, the newest checkpoint from before stays too."""

    keep_every: Annotated[int, Ge(0)] = 0
    """Checkpoints of steps that this divides are kept as well; 0 keeps none for it."""

    keep_log_spaced: Annotated[int, Ge(0)] | None = None
    """The first checkpoints from this step, and from 1, 2, 4, 8, ... steps after it, are kept as well. Unset (`"none"`), none is
    kept for it."""

    keep_hours: Annotated[float, Ge(0), Lt(inf)] = 0.0
    """The first checkpoint of each so many hours of training is kept as well; 0 keeps none for it."""

    mode: Literal["sync", "async"] = "sync"
    """How a save runs: `sync` stops training until the checkpoint is durable; `async` only while the state is copied in memory,
    which takes as many bytes of the host as the state has."""

    saver: Literal["process", "thread"] = "process"
    """What writes an `async` save: a process, which leaves the interpreter to training, or a thread."""

    busy: Literal["wait", "skip", "queue"] = "wait"
    """What an `async` save does while the one before is still being written: training waits for it (`wait`), nothing is saved
    (`skip`), or it is written next (`queue`, which takes the memory of a second copy)."""

    grace: Annotated[float, Gt(0)] | None = None
    """Seconds that a scheduler leaves between a signal that asks for a stop and the end of the processes. A save that would take
    longer, as those before it did, is left out then, and the run ends in time. Unset (`"none"`), only the end of a job that SLURM
    gives (`SLURM_JOB_END_TIME`) counts."""

    store: Annotated[Component, Slot("forge.stores", default="local")] = Slot.unset()
    """Where the files live."""

    resume: Literal["auto", "never", "require"] | Annotated[int, Ge(0)] = "auto"
    """A start takes up the newest verified checkpoint if there is one (`auto`), must find one (`require`), ignores all (`never`),
    or goes back to that of a step (a number; later ones are renamed when the run saves again)."""

    allow: tuple[str, ...] | str = ()
    """Keys whose value may differ from the checkpoint's although they change the function that is trained, such as
    `model.rope.theta`: one, or a list. A resume names those that it refuses."""

    def policy(self) -> "RetentionPolicy":
        """The rules of retention that the keys say."""
        from forge_ckpt.checkpoint.retention import RetentionPolicy

        return RetentionPolicy(self.keep, self.keep_every, self.keep_log_spaced, self.keep_hours)

    def most_kept(self, steps: int) -> int:
        """How many checkpoints a run of so many steps keeps in the end, when it keeps most; what `keep_hours` adds is not known
        before. For a run of more than `COUNTED` saves that is the sum over the rules, which may keep the same ones."""
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
    """A directory that every rank sees under the same path: a local disk, or a shared file system."""

    key_class: ClassVar = FREE
    implementation: ClassVar[str] = "forge_ckpt.store.local:LocalStore"

    shared: bool = False
    """Files follow the umask, so that a group can read them; otherwise only their owner can."""

    allow_foreign_owner: bool = False
    """Accept a directory that belongs to another user, who could then change what is loaded."""


@dataclass(frozen=True, kw_only=True)
class Remote(Component):
    """Object storage that every rank reaches, through fsspec: `pip install 'forge-ckpt[remote]'`.

    Credentials and addresses of servers are given to fsspec and its packages in the environment or in their files, such as
    `AWS_ENDPOINT_URL`.
    """

    key_class: ClassVar = FREE

    url: str
    """Where checkpoints of runs live. Those of a run are in its folder there, which has the name of the run's directory; with
    `s3://bucket/runs` those of `runs/demo` are in `s3://bucket/runs/demo/checkpoints`."""

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
