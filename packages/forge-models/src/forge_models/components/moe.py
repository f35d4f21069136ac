"""`[model.moe]`: experts in the place of feed-forward parts. With the table a model is sparse, without it dense."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from forge_core.component import FREE, IDENTITY, Component, Slot
from forge_models.components.routers import SoftmaxTopK
from forge_models.kernels import ExpertKernel
from forge_models.shape import Losses, MoEShape


@dataclass(frozen=True, kw_only=True)
class MoE:
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
        return SoftmaxTopK() if self.router is None else self.router

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
