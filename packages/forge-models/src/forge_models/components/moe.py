"""`[model.moe]`: experts in the place of feed-forward parts. With the table a model is sparse, without it dense."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import FREE, IDENTITY, Component, Slot
from forge_models.components.routers import SoftmaxTopK

Kernel = Literal["auto", "grouped", "loop"]

LAYOUT_DEPENDENT = ("micro_batch", "pooled")
"""Losses whose value depends on how rows are dealt out to ranks and micro-batches. All others are the same in every layout."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Losses that balance experts and keep logits small, each added to the loss with its weight; see `forge_models.moe.losses`.

    The key names the scope over which loads are counted.
    """

    key_class: ClassVar = IDENTITY

    sequence: Annotated[float, Ge(0)] = 0.0
    """Balance within each row (DeepSeek-V3, 2024, equations 17 to 20)."""
    micro_batch: Annotated[float, Ge(0)] = 0.0
    """Balance within what one rank sees in one forward (Switch, Fedus et al., 2021): depends on layout and micro-batch size.
    1 for each layer when the load is even; transformers' loss is counted otherwise, see `pooled`."""
    global_batch: Annotated[float, Ge(0)] = 0.0
    """Balance over the whole batch of all ranks (Qiu et al., 2025), with the loads of the step before."""
    pooled: Annotated[float, Ge(0)] = 0.0
    """Balance as transformers counts it (its `router_aux_loss_coef`): `top_k` times `micro_batch`, with loads and probabilities
    added up over all layers before they are multiplied, instead of a loss for each layer."""
    z: Annotated[float, Ge(0)] = 0.0
    """Mean square of the router's log partition function (ST-MoE, Zoph et al., 2022)."""

    def any(self) -> bool:
        """Whether there is a loss at all."""
        return any((self.sequence, self.micro_batch, self.global_batch, self.pooled, self.z))


@dataclass(frozen=True, kw_only=True)
class MoE:
    """A layer of experts: a router chooses `top_k` of them for each token, and their outputs are added with its weights."""

    key_class: ClassVar = IDENTITY

    experts: Annotated[int, Gt(0)] = 8
    """Experts of a layer, without the shared ones."""
    top_k: Annotated[int, Gt(0)] = 2
    """Experts that a token goes to."""
    shared: Annotated[int, Ge(0)] = 0
    """Further experts that every token goes to."""
    every: Annotated[int, Gt(0)] = 1
    """Every n-th layer (the n-th, the 2n-th, ...) has experts, the others a plain feed-forward part."""
    first_dense: Annotated[int, Ge(0)] = 0
    """The first layers that have none in any case."""
    ffn_dim: Annotated[int, Gt(0)] | None = None
    """Hidden width of one expert; the model's `ffn_dim` when absent. Fine-grained experts have less."""
    capacity: Annotated[float, Gt(0)] | None = None
    """An expert takes at most capacity * tokens * top_k / experts slots of one forward, those with the largest weights; the
    others are dropped and cost nothing. Generation with a cache drops none. When absent nothing is ever dropped."""
    kernel: Annotated[Kernel, FREE] = "auto"
    """`grouped`: one product for all experts; `loop`: one after the other, any precision and width; or what fits."""
    router: Annotated[Component, Slot("forge.routers", default="softmax_topk")] = Slot.unset()
    """What chooses."""
    losses: Losses = field(default_factory=Losses)
    """What is added to the loss."""

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than experts {self.experts}")
        router = self.resolved_router
        if self.losses.any() and not getattr(router, "learned", True):
            raise ValueError(f"losses cannot reach the router {type(router).__name__}, which learns nothing; leave them out")
        check: Any = getattr(router, "check", None)
        if check is not None:
            try:
                check(self.experts, self.top_k)
            except ValueError as cause:
                raise ValueError(f"router: {cause}") from cause

    @property
    def resolved_router(self) -> Component:
        """`router`, or softmax top-k when this object was made in Python without one."""
        return SoftmaxTopK() if self.router is None else self.router

    def has(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has experts."""
        return layer >= self.first_dense and (layer + 1) % self.every == 0
