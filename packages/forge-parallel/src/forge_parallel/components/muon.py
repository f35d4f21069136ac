"""Muon, which orthogonalizes whole matrices."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from forge_core.component import FREE, Component

if TYPE_CHECKING:
    from forge_core.protocols.model import LaidOutModel, Optimizer


@dataclass(frozen=True, kw_only=True)
class Muon(Component):
    """Momentum of hidden matrices, orthogonalized by Newton-Schulz (Jordan et al., 2024); AdamW for embeddings, head, routers,
    norms and biases. Every matrix is orthogonalized once over all ranks."""

    key_class: ClassVar = FREE

    lr: Annotated[float, Gt(0)] = 0.02
    """Peak learning rate of matrices; the schedule multiplies it. With scale = "match_rms_adamw" take that of AdamW."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the running mean of the gradient."""
    nesterov: bool = True
    """Look ahead: orthogonalize the mean of gradient and momentum."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled decay of matrices, of routers and of an untied output head; embeddings, norms and biases are never decayed."""
    scale: Literal["original", "match_rms_adamw"] = "original"
    """Factor of the rate for a matrix: `original` is sqrt(max(1, rows / columns)) (Jordan et al., 2024), `match_rms_adamw`
    0.2 sqrt(max(rows, columns)), after which rates of AdamW fit (Liu et al., 2025)."""
    newton_schulz_steps: Annotated[int, Gt(0), Lt(100)] = 5
    """Iterations of the orthogonalization."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Format in which matrices travel and are orthogonalized; parameters of fp64 stay in fp64."""
    adamw_lr: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate of all that is not a hidden matrix."""
    adamw_betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95)
    """Decay of AdamW's running means of gradient and squared gradient."""
    adamw_eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of AdamW's second moment."""
    shards: ClassVar[str] = "gathers"
    states: ClassVar[frozenset[str]] = frozenset({"fp32", "fp64"})

    def build(self, model: "LaidOutModel") -> "Optimizer":
        from forge_parallel.build.precision import DTYPES
        from forge_parallel.optim import muon

        return muon.Muon(
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
        )
