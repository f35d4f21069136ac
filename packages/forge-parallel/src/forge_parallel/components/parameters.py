"""The recipe's `[parameters]` and `[[train.stages]]`: which of a model's parameters are trained, when, and how."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from forge_core.component import FREE
from forge_core.features import Feature, Neutral


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are trained in another way than the others, chosen by their names."""

    key_class: ClassVar = FREE

    match: Annotated[str, Neutral("names, which are the same in every layout")]
    """Pattern of global names, such as "blocks.*.attention.*"; `*` crosses dots. Where several groups match, a later one counts,
    key by key."""
    lr: Annotated[Annotated[float, Gt(0)] | None, Neutral("a number of each parameter")] = None
    """Factor of the learning rate."""
    weight_decay: Annotated[Annotated[float, Ge(0)] | None, Neutral("a number of each parameter")] = None
    """Weight decay in place of the optimizer's, also for what is not decayed by default."""
    frozen: Annotated[bool | None, Feature("frozen", when=True, plane="model"), Neutral("as without a group", when=False)] = None
    """Not trained: no gradient, no state, not in the gradient's norm. A resume may change it: what is trained from then on begins
    without state."""

    def __post_init__(self) -> None:
        if self.lr is None and self.weight_decay is None and self.frozen is None:
            raise ValueError(f"the group of {self.match!r} changes nothing; give lr, weight_decay or frozen")


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Which of a model's parameters are trained, and how."""

    key_class: ClassVar = FREE

    groups: list[ParameterGroup] = field(default_factory=list)
    """Groups of parameters, and their settings."""
    width_base: dict[str, int] = field(default_factory=dict)
    """Width scaling: the keys of `[model]` that make it the narrow model whose rates were tuned, such as
    {dim = 256, ffn_dim = 1024, heads = 4, kv_heads = 4}. Initial weights and rates are then scaled from its widths to those of
    the model, so that the same rates are the best ones (muP: Yang et al., 2022, "Tensor Programs V"). For Adam and sign
    descent."""


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """A span of a run's steps in which some parameters are trained and all others are frozen.

    A NAME is one of the model's roles, such as `encoder`, `adapter`, `fusion` and `decoder` of `vlm`, or a pattern of names of
    parameters, such as "blocks.*.attention.*", in which `*` crosses dots.
    """

    key_class: ClassVar = FREE

    until: Annotated[Annotated[int, Gt(0)] | None, Neutral("a number of steps")] = None
    """How many steps of the run are done when the stage ends. The last stage has none, and lasts to the run's end."""
    train: Annotated[tuple[str, ...], Feature("frozen", unless=("*",), plane="model")]
    """NAMEs of what is trained. What `parameters.groups` freezes, no stage trains."""
    lr: Annotated[dict[str, Annotated[float, Gt(0)]], Neutral("a number of each parameter")] = field(default_factory=dict)
    """Factors of the learning rate by NAME, times those of `parameters.groups`; of several for a parameter the last counts."""
    weight_decay: Annotated[dict[str, Annotated[float, Ge(0)]], Neutral("a number of each parameter")] = field(
        default_factory=dict
    )
    """Weight decays by NAME, in place of the optimizer's and of those of `parameters.groups`."""
    warmup: Annotated[
        Annotated[int, Ge(0)] | dict[str, Annotated[int, Ge(0)]], Neutral("a number of each parameter, and of the step")
    ] = 0
    """Steps from the stage's first over which rates rise to their own, on top of `schedule`: step s of W runs at (s + 1) / W.
    For all that is trained, or by NAME."""

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("train = [] trains nothing; name what is trained")

    @property
    def warmups(self) -> dict[str, int]:
        """`warmup` by NAME."""
        return {"*": self.warmup} if isinstance(self.warmup, int) else self.warmup
