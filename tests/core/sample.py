"""A small recipe of our own and the plugins that it may hold, so that these tests depend on no other package."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Len, Lt

from forge_core.component import Component, Slot
from forge_core.registry import Entry, Registry


@dataclass(frozen=True, kw_only=True)
class Adam(Component):
    """Adaptive moments."""

    lr: Annotated[float, Gt(0)] = 1e-3
    """Learning rate."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95)
    """Decays of the means."""

    def build(self, model: Any) -> Any:
        return ("adam", model)


@dataclass(frozen=True, kw_only=True)
class Muon(Component):
    """Orthogonal momentum."""

    lr: Annotated[float, Gt(0)] = 0.02
    """Learning rate."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the momentum."""

    def build(self, model: Any) -> Any:
        return ("muon", model)


@dataclass(frozen=True, kw_only=True)
class Gqa(Component):
    """Grouped queries."""

    heads: Annotated[int, Gt(0)] = 8
    """Query heads."""
    kv_heads: Annotated[int, Gt(0)] | None = None
    """Key heads; as many as query heads when unset."""

    def __post_init__(self) -> None:
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")

    def build(self, context: Any) -> Any:
        return ("gqa", context)


@dataclass(frozen=True, kw_only=True)
class Linear(Component):
    """Attention without softmax."""

    features: Annotated[int, Gt(0)] = 16
    """Size of the feature map."""

    def build(self, context: Any) -> Any:
        return ("linear", context)


@dataclass(frozen=True, kw_only=True)
class Router(Component):
    """Chooses experts."""

    bias_rate: float = 1e-3
    """Step of the balancing bias."""

    def build(self, context: Any) -> Any:
        return ("router", context)


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Experts."""

    experts: Annotated[int, Gt(0)]
    """How many."""
    router: Annotated[Component, Slot("forge.routers", default="topk")] = Slot.unset()
    """Who chooses."""


@dataclass(frozen=True, kw_only=True)
class Decoder(Component):
    """A decoder."""

    dim: Annotated[int, Gt(0)] = 64
    """Width."""
    attention: Annotated[Component, Slot("forge.attentions", default="gqa")] = Slot.unset()
    """Attention of every block."""
    moe: Moe | None = None
    """Experts in place of the dense part."""

    def build(self) -> Any:
        return "decoder"


@dataclass(frozen=True, kw_only=True)
class Recompute(Component):
    """Recompute activations."""

    policy: Literal["full", "selective"] = "full"
    """What is recomputed."""

    def build(self) -> Any:
        return "recompute"


@dataclass(frozen=True, kw_only=True)
class Text(Component):
    """Text files."""

    path: Path
    """Where."""
    weight: Annotated[float, Ge(0)] = 1.0
    """Share."""

    def build(self, context: Any) -> Any:
        return ("text", context)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of the mixture."""

    start: Annotated[int, Ge(0)]
    """First step."""
    weights: dict[str, float] = field(default_factory=dict)
    """Shares by label."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read."""

    length: Annotated[int, Gt(0)] = 1024
    """Tokens of a sample."""
    sources: list[Annotated[Component, Slot("forge.sources")]] = field(default_factory=list)
    """Where documents come from."""
    phases: list[Phase] = field(default_factory=list)
    """Changes of the mixture."""
    shuffle: Literal["permute", "none"] = "permute"
    """Order."""
    seed: Annotated[int, Ge(0)] | None = None
    """Of the order."""
    tags: Annotated[list[str], Len(0, 3)] = field(default_factory=list)
    """Free words."""


@dataclass(frozen=True, kw_only=True)
class Who:
    """Who this run is."""

    name: str = "run"
    """Of the run."""
    seed: int = 0
    """Of the weights."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long."""

    steps: Annotated[int, Gt(0)] = 1000
    """Optimizer steps."""
    clip: Annotated[float, Gt(0)] | None = 1.0
    """Largest norm."""
    deterministic: bool = False
    """Slower, and the same twice."""

    def __post_init__(self) -> None:
        if self.deterministic and self.steps > 10**6:
            raise ValueError("too long to be deterministic")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe."""

    job: Who = field(default_factory=Who)
    """Name and seed."""
    model: Annotated[Component, Slot("forge.models", default="decoder")] = Slot.unset()
    """What is trained."""
    data: Data = field(default_factory=Data)
    """What is read."""
    train: Train = field(default_factory=lambda: Train(steps=500))
    """How long."""
    transforms: dict[str, Annotated[Component, Slot("forge.transforms", named_by_key=True)]] = field(default_factory=dict)
    """Strategies."""
    optimizer: Annotated[Component, Slot("forge.optimizers", default="adam")] = Slot.unset()
    """Updates."""


def entry(group: str, name: str, target: str, distribution: str = "sample", version: str = "1.0") -> Entry:
    return Entry(f"forge.{group}", name, distribution, version, target if ":" in target else f"{__name__}:{target}")


def registry(*extra: Entry) -> Registry:
    """The plugins above, and `extra` ones."""
    own = [
        entry("optimizers", "adam", "Adam"),
        entry("optimizers", "muon", "Muon"),
        entry("models", "decoder", "Decoder"),
        entry("attentions", "gqa", "Gqa"),
        entry("attentions", "linear", "Linear"),
        entry("routers", "topk", "Router"),
        entry("transforms", "recompute", "Recompute"),
        entry("sources", "text", "Text"),
    ]
    return Registry([*own, *extra])
