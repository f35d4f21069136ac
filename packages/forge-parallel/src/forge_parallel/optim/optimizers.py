"""The optimizers of recipes, how they treat sharded tensors, and `build_optimizer`. Does not import torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from forge_core.component import FREE, IDENTITY, Component, class_name
from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel.optim.groups import NO_SETTINGS, Settings, with_settings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_core.protocols.model import LaidOutModel, Optimizer, TrainableModel
    from forge_parallel.model.parallel_model import ParallelModel


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(Component):
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

        from forge_parallel.optim import elementwise

        low = {tensor.dtype for _, tensor, _ in model.trainable()} == {torch.bfloat16}
        optimizer = elementwise.adamw_bf16 if low else elementwise.AdamW
        return optimizer(model, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class AdamW8bitConfig(Component):
    """AdamW whose moments have eight bits (Dettmers et al., 2021; torchao): about two bytes an element instead of eight. Needs
    `pip install "forge-parallel[adamw8bit]"`.
    """

    key_class: ClassVar = FREE
    implementation: ClassVar[str] = "forge_parallel.optim.adamw8bit:adamw8bit"

    lr: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate; the schedule multiplies it."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95)
    """Decay of the running means of gradient and squared gradient."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled decay of matrices and of an untied output head; embeddings, norms and biases are never decayed."""
    block: Annotated[int, Gt(1), IDENTITY] = 256
    """Elements of a row (last dimension) that share a scale. Layouts that would split a block over ranks are refused."""
    smallest: Annotated[int, Ge(0), IDENTITY] = 4096
    """Parameters with fewer elements keep exact moments, and so do norms and biases."""
    feature: ClassVar[str] = "adamw8bit"
    shards: ClassVar[str] = "blocks"
    states: ClassVar[frozenset[str]] = frozenset({"fp32", "fp64"})
    width_rule: ClassVar[str] = "adam"

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[AdamW8bitConfig]":
        """As it is, which leaves small tensors exact, and so that they have blocks."""
        return cls(), cls(block=4, smallest=0)


@dataclass(frozen=True, kw_only=True)
class LionConfig(Component):
    """The sign of an interpolated momentum (Chen et al., 2023): half the state of AdamW, and every element moves by the rate."""

    key_class: ClassVar = FREE
    implementation: ClassVar[str] = "forge_parallel.optim.elementwise:lion"

    lr: Annotated[float, Gt(0)] = 1e-4
    """Peak learning rate; the schedule multiplies it. The paper recommends a third to a tenth of AdamW's."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.99)
    """Share of the momentum in the update direction, and decay of the momentum."""
    weight_decay: Annotated[float, Ge(0)] = 0.3
    """Decoupled decay of matrices and of an untied output head. The paper recommends three to ten times AdamW's."""
    shards: ClassVar[str] = "elementwise"
    width_rule: ClassVar[str] = "adam"


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamWConfig(Component):
    """AdamW that trains at one point and evaluates the mean of all (Defazio et al., 2024); needs no schedule but a warm-up.

    Evaluations, samples, checkpoints and what is exported from them have the averaged weights.
    """

    key_class: ClassVar = FREE
    implementation: ClassVar[str] = "forge_parallel.optim.schedule_free:ScheduleFree"

    lr: Annotated[float, Gt(0)] = 2.5e-3
    """Learning rate after the warm-up; constant. The paper recommends one to ten times that of AdamW with a schedule."""
    betas: tuple[Annotated[float, Gt(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.999)
    """How close to the average gradients are computed, and decay of the running mean of squared gradients."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decay of matrices and of an untied output head, applied at the point where gradients are computed."""
    shards: ClassVar[str] = "elementwise"
    width_rule: ClassVar[str] = "adam"
    decays_by_itself: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class MuonConfig(Component):
    """Momentum of hidden matrices, orthogonalized by Newton-Schulz (Jordan et al., 2024); AdamW for embeddings, head, routers,
    norms and biases. Every matrix is orthogonalized once over all ranks."""

    key_class: ClassVar = FREE

    lr: Annotated[float, Gt(0)] = 0.02
    """Peak learning rate of matrices; the schedule multiplies it. With scale = "match_rms_adamw" use AdamW's learning rate."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the running mean of the gradient."""
    nesterov: bool = True
    """Whether to orthogonalize the mean of gradient and momentum (look ahead) instead of the momentum."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled decay of matrices, of routers and of an untied output head; embeddings, norms and biases are never decayed."""
    scale: Literal["original", "match_rms_adamw"] = "original"
    """Factor of the learning rate of a matrix: `original` is sqrt(max(1, rows / columns)) (Jordan et al., 2024),
    `match_rms_adamw` is 0.2 sqrt(max(rows, columns)), with which AdamW's learning rates fit (Liu et al., 2025)."""
    newton_schulz_steps: Annotated[int, Gt(0), Lt(100)] = 5
    """Iterations of the orthogonalization."""
    coefficients: Literal["original", "polar_express"] = "original"
    """Polynomials of the iterations: `original`, the same in each (Jordan et al., 2024), with singular values from about 0.7 to
    1.2, or `polar_express`, one for each (Amsel et al., 2025), with which singular values converge to 1."""
    neuron_beta: Annotated[Annotated[float, Ge(0), Lt(1)] | None, IDENTITY] = None
    """NorMuon (Li et al., 2025): decay of a running mean of squares of each row of an orthogonalized matrix, by whose root the
    row is divided; the norm of the matrix stays. 0.95 in the paper; without it, rows keep their lengths."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Format in which matrices are sent and orthogonalized; fp64 parameters stay in fp64."""
    adamw_lr: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate of all parameters that are not hidden matrices."""
    adamw_betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95)
    """Decay of AdamW's running means of gradient and squared gradient."""
    adamw_eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of AdamW's second moment."""
    feature: ClassVar[str] = "muon"
    shards: ClassVar[str] = "gathers"
    states: ClassVar[frozenset[str]] = frozenset({"fp32", "fp64"})

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[MuonConfig]":
        """As it is, and with all that is published since."""
        return cls(), cls(coefficients="polar_express", neuron_beta=0.95)

    def build(self, model: "LaidOutModel") -> "Optimizer":
        from forge_parallel.model.parallel_model import DTYPES
        from forge_parallel.optim.muon import Muon

        return Muon(
            model,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            scale=self.scale,
            steps=self.newton_schulz_steps,
            precision=DTYPES[self.precision],
            adamw_lr=self.adamw_lr,
            adamw_betas=self.adamw_betas,
            adamw_eps=self.adamw_eps,
            coefficients=self.coefficients,
            neuron_beta=self.neuron_beta,
        )


WAYS = ("elementwise", "blocks", "gathers")
PROVEN = ("blocks", "gathers")
"""The ways that count as features on several ranks."""


def split(layout: Layout) -> bool:
    """Whether ranks hold different parameters, which is so in all layouts except replicas of a whole model."""
    return layout.world > layout.dp_replicate


def sharding_fault(component: Any, layout: Layout) -> str | None:
    """Returns why the optimizer of a component does not support a layout; None if it does."""
    way = getattr(component, "shards", None)
    if way in WAYS or not split(layout):
        return None
    said = "does not say" if way is None else f"says {way!r} of"
    return (
        f"{class_name(component)} {said} how it treats parts of parameters, which ranks hold in layout {layout}; "
        "an optimizer that computes norms or matrices of parts is wrong there"
    )


HINT = (
    "in its component set `shards: ClassVar[str] = 'elementwise'` if each element is updated independently (test it with "
    "forge_testing.conforms), or 'gathers' if it exchanges the tensors that it needs, for example with "
    "forge_parallel's WholeMatrices; or use one process"
)


def build_optimizer(component: Any, model: "ParallelModel", settings: Settings = NO_SETTINGS) -> "Optimizer":
    """Returns the optimizer of a component for a parallelized model, with `settings` for some of its parameters.

    Raises:
        PlanError: the layout shards parameters and the component has no `shards`, or the optimizer does not support a setting.
    """
    if why := sharding_fault(component, model.topology.layout):
        raise PlanError(f"optimizer: {why}; {HINT}")
    if settings.stages:
        from forge_parallel.optim.stages import StagedOptimizer

        return StagedOptimizer(component, model, settings.stages)
    return with_settings(component, model, settings)
