"""Optimizers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from forge_core.component import FREE, Component

if TYPE_CHECKING:
    from forge_core.protocols.model import Optimizer, TrainableModel


@dataclass(frozen=True, kw_only=True)
class AdamW(Component):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019); torch's fused kernel."""

    key_class: ClassVar = FREE

    lr: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate; the schedule multiplies it."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95)
    """Decay of the running means of gradient and squared gradient."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled decay of matrices and of an untied output head; embeddings, norms and biases are never decayed."""
    shards: ClassVar[str] = "elementwise"

    def build(self, model: "TrainableModel") -> "Optimizer":
        import torch

        from forge_parallel.optim import adamw, adamw_bf16

        low = {tensor.dtype for _, tensor, _ in model.trainable()} == {torch.bfloat16}
        made = adamw_bf16.AdamWBf16 if low else adamw.AdamW
        return made(model, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)
