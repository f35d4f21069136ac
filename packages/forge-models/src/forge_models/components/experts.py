"""`[model.moe]`: experts in the place of feed-forward parts, and routers: `router = { name = "sigmoid_topk", bias_rate = 1e-3 }`.

With the table a model is sparse, without it dense. A router component may define `check(experts, top_k)`, which raises
`ValueError` for sizes that do not go together. `learned` says whether gradients reach it, so that losses can balance it (True
when absent); `total` is what the combine weights of a token add up to, None when that depends on the token (None when absent).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import FREE, IDENTITY, Component, Slot
from forge_core.specs import Matrix
from forge_models.shape import ExpertKernel, Losses, MoEShape, RouterContext

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


BiasSchedule = Literal["constant", "cosine", "warmup"]


@dataclass(frozen=True, kw_only=True)
class SoftmaxTopKConfig(Component):
    """The top_k largest of softmax(W x) (Shazeer et al., 2017; Switch, Fedus et al., 2021; Mixtral, Jiang et al., 2024)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.moe.routers:SoftmaxTopK"

    normalize: bool = True
    """Divide the chosen probabilities by their sum; without it they are smaller the more experts there are."""
    learned: ClassVar[bool] = True

    @property
    def total(self) -> float | None:
        return 1.0 if self.normalize else None

    def matrices(self, context: RouterContext) -> dict[str, Matrix]:
        """Its linear layers."""
        return _matrices(context)


@dataclass(frozen=True, kw_only=True)
class SigmoidTopKConfig(Component):
    """The top_k largest of sigmoid(W x) + bias, weighted by sigmoid(W x) (DeepSeek-V3, 2024, section 2.1.2).

    The bias is a buffer: after each optimizer step it rises by `bias_rate` for experts below the mean load of the
    whole batch and falls for those above. It takes part in the choice only, never in the weights.
    """

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.moe.routers:SigmoidTopK"

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
    def examples(cls, folder: "Path") -> "Iterable[SigmoidTopKConfig]":
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


@dataclass(frozen=True, kw_only=True)
class HashConfig(Component):
    """A fixed choice by token id, each of the top_k experts with weight 1 / top_k (Roller et al., 2021). Nothing is learned."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.moe.routers:Hash"

    seed: Annotated[int, Ge(0)] = 0
    """Another seed gives another choice. Layers choose independently of each other."""
    learned: ClassVar[bool] = False
    total: ClassVar[float] = 1.0

    def matrices(self, context: RouterContext) -> dict[str, Matrix]:
        """It has no linear layers."""
        return {}


def _matrices(context: RouterContext) -> dict[str, Matrix]:
    return {"weight": Matrix((context.experts, context.dim), (None, "embed"))}


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A layer of experts: a router chooses `top_k` of them for each token, and their outputs are added with its weights."""

    key_class: ClassVar = IDENTITY

    experts: Annotated[int, Gt(0)] = 8
    """Experts of a layer, without the shared ones."""
    top_k: Annotated[int, Gt(0)] = 2
    """Experts that a token goes to."""
    shared: Annotated[int, Ge(0)] = 0
    """Experts that every token goes to, besides the chosen ones."""
    every: Annotated[int, Gt(0)] = 1
    """Every n-th layer (the n-th, the 2n-th, ...) has experts, the others a plain feed-forward part."""
    first_dense: Annotated[int, Ge(0)] = 0
    """The first layers that have none in any case."""
    ffn_dim: Annotated[int, Gt(0)] | None = None
    """Hidden width of one expert; the model's `ffn_dim` when absent. Fine-grained experts have less."""
    capacity: Annotated[float, Gt(0)] | None = None
    """An expert takes at most capacity * tokens * top_k / experts slots of one forward, those with the largest weights; the
    others are dropped and cost nothing. So later tokens, and those of other rows, may change an earlier one, in evaluation too.
    Generation with a cache drops none. When absent nothing is ever dropped."""
    kernel: Annotated[ExpertKernel, FREE] = "auto"
    """`grouped`: one product for all experts; `loop`: one after the other, any precision and width; or what fits."""
    router: Annotated[Component, Slot("forge.routers", default="softmax_topk")] = Slot.unset()
    """What chooses."""
    losses: Losses = field(default_factory=Losses)
    """What is added to the loss."""

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than experts {self.experts}")
        router = self._router
        if self.losses.any() and not getattr(router, "learned", True):
            raise ValueError(f"router {type(router).__name__} is not learned, so losses cannot balance it; remove losses")
        check: Any = getattr(router, "check", None)
        if check is not None:
            try:
                check(self.experts, self.top_k)
            except ValueError as cause:
                raise ValueError(f"router: {cause}") from cause

    @property
    def _router(self) -> Component:
        """`router`, or softmax top-k when this object was made in Python without one."""
        return SoftmaxTopKConfig() if self.router is None else self.router

    def shape(self, ffn_dim: int) -> MoEShape:
        """With every default resolved, for a model of width `ffn_dim`."""
        return MoEShape(
            experts=self.experts,
            top_k=self.top_k,
            shared=self.shared,
            every=self.every,
            first_dense=self.first_dense,
            ffn_dim=ffn_dim if self.ffn_dim is None else self.ffn_dim,
            capacity=self.capacity,
            kernel=self.kernel,
            router=self._router,
            losses=self.losses,
        )
