"""Hooks of `[[hooks]]` except those that evaluate the model."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import FREE, Component

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_core.protocols.run import Hook


@dataclass(frozen=True, kw_only=True)
class Log(Component):
    """Writes loss, gradient norm, learning rate, throughput and memory to every tracker."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 10
    """Optimizer steps between lines; the first and the last step are always written."""

    def build(self) -> "Hook":
        from forge_train.hooks.metrics import LogHook

        return LogHook(every=self.every)


@dataclass(frozen=True, kw_only=True)
class Progress(Component):
    """Shows step, loss, learning rate, tokens/s, MFU, memory, faults and the time left: a live panel on a terminal, otherwise
    occasional lines of text."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 10
    """Optimizer steps between updates of the loss."""
    seconds: Annotated[float, Ge(0)] = 10.0
    """Minimum seconds between lines if the output is not a terminal."""

    def build(self) -> "Hook":
        from forge_train.hooks.progress import ProgressHook

        return ProgressHook(every=self.every, seconds=self.seconds)


@dataclass(frozen=True, kw_only=True)
class Stragglers(Component):
    """Names ranks, with their hosts, that are slower than others with the same work, so that all other ranks wait for them."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(1)] = 20
    """Optimizer steps per window, after which all ranks compare their times. Three slow windows of five make a straggler."""
    ratio: Annotated[float, Gt(1)] = 1.5
    """A rank is slow if its own work in a step takes more than this multiple of the median of the others."""

    def build(self) -> "Hook":
        from forge_train.hooks.stragglers import StragglersHook

        return StragglersHook(every=self.every, ratio=self.ratio)


@dataclass(frozen=True, kw_only=True)
class Machine(Component):
    """Probes device, communication, disk and memory of every machine. A fault ends the run and names the rank and its host; slow
    probes and low memory are warnings."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 200
    """Optimizer steps between probes."""
    minutes: Annotated[float, Ge(0)] = 0.0
    """Minimum minutes between probes, by the clock of rank 0, which is read every `every` steps."""
    slow: Annotated[float, Gt(0)] = 10.0
    """Seconds above which a probe is reported as slow. A probe takes milliseconds on a healthy machine."""
    least_memory: Annotated[float, Ge(0)] = 0.5
    """GiB of free host memory below which there is a warning."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Machine]":
        return (cls(every=2),)

    def build(self) -> "Hook":
        from forge_train.hooks.machine import MachineHook

        return MachineHook(every=self.every, minutes=self.minutes, slow=self.slow, least_memory=self.least_memory)


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
    """Profiles some steps on every rank with torch.profiler; `forge-train profile RUN` shows where their time went."""

    key_class: ClassVar = FREE

    at: list[Annotated[int, Gt(0)]] = field(default_factory=list)
    """First steps of windows; the first step of the run is 1."""
    every: Annotated[int, Ge(0)] = 0
    """A window begins at each multiple of this step; 0 for none."""
    steps: Annotated[int, Gt(0)] = 3
    """Steps per window."""
    warmup: Annotated[int, Ge(0)] = 1
    """Steps before a window in which the profiler runs without recording, because its start takes time."""
    signal: Literal["SIGUSR1", "SIGUSR2"] | None = None
    """Signal that opens a window on all ranks if any process of the run receives it; it no longer ends the run. Do not send
    SIGUSR1 to torchrun, which it ends."""
    ranks: Literal["all", "nodes"] | list[Annotated[int, Ge(0)]] = "all"
    """Ranks that write a trace: all ranks, the first rank of each node, or the ranks in a list."""
    memory: bool = False
    """Also write the history of the device's allocator, for pytorch.org/memory_viz; a warning if the device has none."""
    stacks: bool = False
    """Also record Python stacks, which makes traces large and steps slow."""
    shapes: bool = False
    """Also record the shapes of operators' inputs."""
    keep: Annotated[int, Gt(0)] = 5
    """Number of newest windows to keep."""

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
