"""Optimizers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from forge_core.component import FREE, IDENTITY, Component

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

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
    width_rule: ClassVar[str] = "adam"

    def build(self, model: "TrainableModel") -> "Optimizer":
        import torch

        from forge_parallel.optim import adamw, adamw_bf16

        low = {tensor.dtype for _, tensor, _ in model.trainable()} == {torch.bfloat16}
        made = adamw_bf16.adamw_bf16 if low else adamw.AdamW
        return made(model, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(Component):
    """AdamW whose moments have eight bits (Dettmers et al., 2021; torchao): about two bytes an element instead of eight. Needs
    `pip install "forge-parallel[adamw8bit]"`.
    """

    key_class: ClassVar = FREE

    lr: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate; the schedule multiplies it."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95)
    """Decay of the running means of gradient and squared gradient."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled decay of matrices and of an untied output head; embeddings, norms and biases are never decayed."""
    block: Annotated[int, Gt(1), IDENTITY] = 256
    """Elements of a row, the last dimension, that share a scale. A layout that cuts a block is refused."""
    smallest: Annotated[int, Ge(0), IDENTITY] = 4096
    """Parameters of fewer elements keep exact moments, as do norms and biases."""
    shards: ClassVar[str] = "blocks"
    states: ClassVar[frozenset[str]] = frozenset({"fp32", "fp64"})
    width_rule: ClassVar[str] = "adam"

    def build(self, model: "TrainableModel") -> "Optimizer":
        from forge_parallel.optim.low_bits.adamw8bit import adamw8bit

        return adamw8bit(
            model,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            block=self.block,
            smallest=self.smallest,
        )

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[AdamW8bit]":
        """As it is, which leaves small tensors exact, and so that they have blocks."""
        return cls(), cls(block=4, smallest=0)


@dataclass(frozen=True, kw_only=True)
class Lion(Component):
    """The sign of an interpolated momentum (Chen et al., 2023): half the state of AdamW, and every element moves by the rate."""

    key_class: ClassVar = FREE

    lr: Annotated[float, Gt(0)] = 1e-4
    """Peak learning rate; the schedule multiplies it. The paper takes a third to a tenth of AdamW's."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.99)
    """How much of the momentum is in the direction of a step, and how much of it is kept."""
    weight_decay: Annotated[float, Ge(0)] = 0.3
    """Decoupled decay of matrices and of an untied output head. The paper takes three to ten times AdamW's."""
    shards: ClassVar[str] = "elementwise"
    width_rule: ClassVar[str] = "adam"

    def build(self, model: "TrainableModel") -> "Optimizer":
        from forge_parallel.optim.lion import lion

        return lion(model, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamW(Component):
    """AdamW that trains at one point and evaluates the mean of all (Defazio et al., 2024); needs no schedule but a warm-up.

    Evaluations, samples, checkpoints and what is exported from them have the averaged weights.
    """

    key_class: ClassVar = FREE

    lr: Annotated[float, Gt(0)] = 2.5e-3
    """Learning rate after the warm-up. It stays; the paper takes one to ten times that of AdamW with a schedule."""
    betas: tuple[Annotated[float, Gt(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.999)
    """How near to the mean gradients are taken, and the decay of the running mean of squared gradients."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decay of matrices and of an untied output head, taken at the point where gradients are."""
    shards: ClassVar[str] = "elementwise"
    width_rule: ClassVar[str] = "adam"
    decays_by_itself: ClassVar[bool] = True

    def build(self, model: "TrainableModel") -> "Optimizer":
        from forge_parallel.optim.schedule_free import ScheduleFree

        return ScheduleFree(model, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)
