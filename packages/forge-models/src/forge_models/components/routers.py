"""Routers, chosen inside `[model.moe]`: `router = { name = "sigmoid_topk", bias_rate = 1e-3 }`.

A component may answer `check(experts, top_k)` with a `ValueError` for sizes that do not go together. `learned` says whether
gradients reach it, so that losses can balance it (True when absent); `total` is what the combine weights of a token add up
to, None when that depends on the token (None when absent).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import FREE, IDENTITY, Component
from forge_core.specs import Matrix
from forge_models.context import RouterContext

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn

BiasSchedule = Literal["constant", "cosine", "warmup"]


@dataclass(frozen=True, kw_only=True)
class SoftmaxTopK(Component):
    """The top_k largest of softmax(W x) (Shazeer et al., 2017; Switch, Fedus et al., 2021; Mixtral, Jiang et al., 2024)."""

    key_class: ClassVar = IDENTITY

    normalize: bool = True
    """Divide the chosen probabilities by their sum; without it they are smaller the more experts there are."""
    learned: ClassVar[bool] = True

    @property
    def total(self) -> float | None:
        return 1.0 if self.normalize else None

    def matrices(self, context: RouterContext) -> dict[str, Matrix]:
        """Its linear layers."""
        return _matrices(context)

    def build(self, context: RouterContext) -> "nn.Module":
        from forge_models.moe import routers

        return routers.SoftmaxTopK(context, normalize=self.normalize)


@dataclass(frozen=True, kw_only=True)
class SigmoidTopK(Component):
    """The top_k largest of sigmoid(W x) + bias, weighted by sigmoid(W x) (DeepSeek-V3, 2024, section 2.1.2).

    The bias is a buffer: after each optimizer step it rises by `bias_rate` for experts below the mean load of the
    whole batch and falls for those above. It takes part in the choice only, never in the weights.
    """

    key_class: ClassVar = IDENTITY

    normalize: bool = True
    """Divide the chosen scores by their sum."""
    scaling: Annotated[float, Gt(0)] = 1.0
    """Multiplies the combine weights."""
    n_group: Annotated[int, Gt(0)] = 1
    """Experts form this many groups of equal size, in order. A group's score is the sum of its two best experts'."""
    topk_group: Annotated[int, Gt(0)] | None = None
    """A token may choose from this many groups, the best ones; all of them when absent. With the experts of a group on one
    node, no token is sent to more nodes than this."""
    bias_rate: Annotated[float, Ge(0), FREE] = 1e-3
    """How far the bias moves in one step; 0 keeps it as it is."""
    bias_schedule: Annotated[BiasSchedule, FREE] = "constant"
    """`cosine` lets the rate fall to 0 over `bias_steps` steps, `warmup` lets it rise from 0 over as many."""
    bias_steps: Annotated[int, Gt(0), FREE] | None = None
    """Length of `cosine` and `warmup` in optimizer steps."""
    learned: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.bias_schedule == "constant") != (self.bias_steps is None):
            raise ValueError(
                f"bias_steps must be set exactly when bias_schedule is 'cosine' or 'warmup', not {self.bias_schedule!r}"
            )
        if self.topk_group is not None and self.topk_group > self.n_group:
            raise ValueError(f"topk_group {self.topk_group} must be at most n_group {self.n_group}")

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[SigmoidTopK]":
        """With and without groups and schedules."""
        return (
            cls(),
            cls(normalize=False, n_group=4, topk_group=2),
            cls(scaling=2.5, bias_rate=0.01, bias_schedule="warmup", bias_steps=10),
        )

    @property
    def total(self) -> float | None:
        return self.scaling if self.normalize else None

    def matrices(self, context: RouterContext) -> dict[str, Matrix]:
        """Its linear layers."""
        return _matrices(context)

    @property
    def groups_kept(self) -> int:
        """`topk_group`, or all groups when absent."""
        return self.n_group if self.topk_group is None else self.topk_group

    def check(self, experts: int, top_k: int) -> None:
        """Faults that need the layer's sizes."""
        if experts % self.n_group:
            raise ValueError(f"n_group {self.n_group} must divide experts {experts}")
        within = self.groups_kept * (experts // self.n_group)
        if top_k > within:
            raise ValueError(f"topk_group {self.topk_group} leaves {within} of {experts} experts, fewer than top_k {top_k}")

    def build(self, context: RouterContext) -> "nn.Module":
        from forge_models.moe import routers

        return routers.SigmoidTopK(
            context,
            normalize=self.normalize,
            scaling=self.scaling,
            n_group=self.n_group,
            topk_group=self.groups_kept,
            bias_rate=self.bias_rate,
            bias_schedule=self.bias_schedule,
            bias_steps=self.bias_steps,
        )


@dataclass(frozen=True, kw_only=True)
class Hash(Component):
    """A fixed choice by token id, each of the top_k experts with weight 1 / top_k (Roller et al., 2021). Nothing is learned."""

    key_class: ClassVar = IDENTITY

    seed: Annotated[int, Ge(0)] = 0
    """Another seed gives another choice. Layers choose independently of each other."""
    learned: ClassVar[bool] = False
    total: ClassVar[float] = 1.0

    def matrices(self, context: RouterContext) -> dict[str, Matrix]:
        """It has no linear layers."""
        return {}

    def build(self, context: RouterContext) -> "nn.Module":
        from forge_models.moe import routers

        return routers.Hash(context, seed=self.seed)


def _matrices(context: RouterContext) -> dict[str, Matrix]:
    return {"weight": Matrix((context.experts, context.dim), (None, "embed"))}
