"""Hooks as they are chosen in `[[hooks]]`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from forge_core.component import FREE, Component

if TYPE_CHECKING:
    from forge_core.protocols.run import Hook


@dataclass(frozen=True, kw_only=True)
class Log(Component):
    """Writes loss, gradient norm, learning rate, throughput and memory to every tracker."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 10
    """Optimizer steps between two lines; the first and the last step are always written."""

    def build(self) -> "Hook":
        from forge_train.hooks.log import LogHook

        return LogHook(every=self.every)


@dataclass(frozen=True, kw_only=True)
class Progress(Component):
    """Shows step, loss, tokens/s and the time left: a live line on a terminal, else a line of text now and then."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 10
    """Optimizer steps between two updates of the loss."""
    seconds: Annotated[float, Ge(0)] = 10.0
    """Least time between two lines when the output is not a terminal."""

    def build(self) -> "Hook":
        from forge_train.hooks.progress import ProgressHook

        return ProgressHook(every=self.every, seconds=self.seconds)


@dataclass(frozen=True, kw_only=True)
class Evaluate(Component):
    """Loss and perplexity on every set of `[data.evaluation]`, weighted by tokens over all ranks."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 500
    """Optimizer steps between two evaluations; the last step of the run is always evaluated."""
    at_start: bool = False
    """Also evaluate the initial weights, before the first step."""

    def build(self) -> "Hook":
        from forge_train.hooks.evaluate import EvaluateHook

        return EvaluateHook(every=self.every, at_start=self.at_start)


@dataclass(frozen=True, kw_only=True)
class Replicas(Component):
    """Compares replicated parameters bit by bit, and stops the run when replicas have diverged."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 200
    """Optimizer steps between two comparisons, of a few bytes a tensor; the last step is always compared."""

    def build(self) -> "Hook":
        from forge_train.hooks.replicas import ReplicasHook

        return ReplicasHook(every=self.every)


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
class Sample(Component):
    """Generates text from prompts: at the end of the run, and every N steps if asked; shown and kept for the report."""

    key_class: ClassVar = FREE

    prompts: list[str] = field(default_factory=lambda: ["The "])
    """Texts to continue."""
    every: Annotated[int, Ge(0)] = 0
    """Optimizer steps between samples; 0 samples at the end only."""
    max_tokens: Annotated[int, Gt(0)] = 96
    """Tokens to generate for each prompt."""
    temperature: Annotated[float, Ge(0)] = 0.8
    """Divides the logits before sampling; 0 takes the most likely token."""
    top_k: Annotated[int, Gt(0)] | None = None
    """Samples among the k most likely tokens."""
    top_p: Annotated[float, Gt(0), Le(1)] = 0.95
    """Samples among the most likely tokens that together have this probability."""
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    """Leaves out tokens below this fraction of the most likely one's probability."""
    repetition_penalty: Annotated[float, Gt(0)] = 1.0
    """Above 1, tokens that already occurred become less likely."""

    def build(self) -> "Hook":
        from forge_train.hooks.sample import SampleHook

        return SampleHook(
            prompts=self.prompts,
            every=self.every,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )
