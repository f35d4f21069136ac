"""Hooks as they are chosen in `[[hooks]]`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from forge_core.component import FREE, IDENTITY, Component

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_core.protocols.run import Hook


@dataclass(frozen=True, kw_only=True)
class Log(Component):
    """Writes loss, gradient norm, learning rate, throughput and memory to every tracker."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 10
    """Optimizer steps between two lines; the first and the last step are always written."""

    def build(self) -> "Hook":
        from forge_train.hooks.metrics import LogHook

        return LogHook(every=self.every)


@dataclass(frozen=True, kw_only=True)
class Progress(Component):
    """Shows step, loss, rate, tokens/s, MFU, memory, faults and the time left: a live panel on a terminal, else a line of text
    now and then."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 10
    """Optimizer steps between two updates of the loss."""
    seconds: Annotated[float, Ge(0)] = 10.0
    """Least time between two lines when the output is not a terminal."""

    def build(self) -> "Hook":
        from forge_train.hooks.progress import ProgressHook

        return ProgressHook(every=self.every, seconds=self.seconds)


@dataclass(frozen=True, kw_only=True)
class Ema(Component):
    """Keeps an exponential moving average of the weights, in checkpoints too; `evaluate` and `sample` use it when asked."""

    key_class: ClassVar = FREE

    decay: Annotated[float, Gt(0), Lt(1)] = 0.999
    """What stays of the average m at each update: m = decay m + (1 - decay) w, with w the weights."""
    start: Annotated[int, Ge(0)] = 0
    """The average begins as the weights after this optimizer step; 0 takes the initial ones."""
    every: Annotated[int, Gt(0)] = 1
    """Optimizer steps between two updates of the average."""
    dtype: Annotated[Literal["fp32", "weights"], IDENTITY] = "fp32"
    """Of the average: fp32, or that of the weights, in which a decay near 1 may round to nothing. fp64 weights keep fp64."""

    def build(self) -> "Hook":
        from forge_train.hooks.weights import EmaHook

        return EmaHook(decay=self.decay, start=self.start, every=self.every, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class Replicas(Component):
    """Compares replicated parameters bit by bit, and stops the run when replicas have diverged."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 200
    """Optimizer steps between two comparisons, of a few bytes a tensor; the last step is always compared."""

    def build(self) -> "Hook":
        from forge_train.hooks.weights import ReplicasHook

        return ReplicasHook(every=self.every)


@dataclass(frozen=True, kw_only=True)
class Stragglers(Component):
    """Names ranks, with their hosts, that are slower than those which do the same work, and which all others wait for."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(1)] = 20
    """Optimizer steps of a window; times of all ranks are compared after each. Three slow windows of five make a straggler."""
    ratio: Annotated[float, Gt(1)] = 1.5
    """How many times as long as the median of the others a slow rank takes for its own work in a step."""

    def build(self) -> "Hook":
        from forge_train.hooks.stragglers import StragglersHook

        return StragglersHook(every=self.every, ratio=self.ratio)


@dataclass(frozen=True, kw_only=True)
class Machine(Component):
    """Asks now and then whether device, exchange between ranks, disk and memory of every machine are well. What is wrong ends the
    run with the rank and its host named; what is slow or short is a warning."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 200
    """Optimizer steps between two probes."""
    minutes: Annotated[float, Ge(0)] = 0.0
    """Least time between two probes, by the clock of rank 0; then `every` is how often the clock is looked at."""
    slow: Annotated[float, Gt(0)] = 10.0
    """Seconds of one probe above which it is a warning. Each takes milliseconds on a machine that is well."""
    least_memory: Annotated[float, Ge(0)] = 0.5
    """GiB of free host memory below which it is a warning."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Machine]":
        return (cls(every=2),)

    def build(self) -> "Hook":
        from forge_train.hooks.machine import MachineHook

        return MachineHook(every=self.every, minutes=self.minutes, slow=self.slow, least_memory=self.least_memory)


@dataclass(frozen=True, kw_only=True)
class Norms(Component):
    """Logs norms of gradients, updates and parameters, by group of parameters or by tensor."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 100
    """Optimizer steps between two measurements; the last step is always measured."""
    by: Literal["group", "tensor"] = "group"
    """One norm for each group of the optimizer (matrices, vectors, embeddings, ...), or for each tensor."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Norms]":
        return (cls(every=2), cls(every=3, by="tensor"))

    def build(self) -> "Hook":
        from forge_train.hooks.weights import NormsHook

        return NormsHook(every=self.every, by=self.by)


@dataclass(frozen=True, kw_only=True)
class Save(Component):
    """Saves a checkpoint every `checkpoint.every` steps and at the end, once per step."""

    def build(self) -> "Hook":
        from forge_train.hooks.save import SaveHook

        return SaveHook()


@dataclass(frozen=True, kw_only=True)
class Routing(Component):
    """Logs router statistics: load, entropy, dropped slots and bias of every layer, and a heat map for the report."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 100
    """Optimizer steps between two measurements; the last step is always measured."""

    def build(self) -> "Hook":
        from forge_train.hooks.routing import RoutingHook

        return RoutingHook(every=self.every)


@dataclass(frozen=True, kw_only=True)
class Profile(Component):
    """Records some steps on every rank with torch.profiler; `forge-train profile RUN` says where their time went."""

    key_class: ClassVar = FREE

    at: list[Annotated[int, Gt(0)]] = field(default_factory=list)
    """First steps of windows; the first step of the run is 1."""
    every: Annotated[int, Ge(0)] = 0
    """A window begins at each multiple of this step; 0 for none."""
    steps: Annotated[int, Gt(0)] = 3
    """Steps of a window."""
    warmup: Annotated[int, Ge(0)] = 1
    """Steps before a window in which the profiler already runs and records nothing: its own start takes time."""
    signal: Literal["SIGUSR1", "SIGUSR2"] | None = None
    """Signal that opens a window, on all ranks, when one process of the run gets it; it does not end the run then. SIGUSR1 ends
    torchrun when it is sent there."""
    ranks: Literal["all", "nodes"] | list[Annotated[int, Ge(0)]] = "all"
    """Who writes a trace: all ranks, the first one of each node, or those of a list."""
    memory: bool = False
    """Also write what the allocator of the device did, for pytorch.org/memory_viz. Devices without such a record are said."""
    stacks: bool = False
    """Also record Python's stacks: traces get large and steps slow."""
    shapes: bool = False
    """Also record the shapes of operators' inputs."""
    keep: Annotated[int, Gt(0)] = 5
    """Windows that are kept, the newest ones."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Profile]":
        return (cls(at=[2], steps=2),)

    def build(self) -> "Hook":
        from forge_train.hooks.profile import ProfileHook

        return ProfileHook(
            at=self.at,
            every=self.every,
            steps=self.steps,
            warmup=self.warmup,
            signal=self.signal,
            ranks=self.ranks,
            memory=self.memory,
            stacks=self.stacks,
            shapes=self.shapes,
            keep=self.keep,
        )
