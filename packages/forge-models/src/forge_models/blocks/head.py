"""The last module of a decoder: logits for inference, the loss for training."""

from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.protocols.model import LossHead, LossTerms, Objective
from forge_core.specs import Init, ModuleSpec, TensorSpec
from forge_models.blocks.layers import unfilled
from forge_models.loss_head.cross_entropy import ChunkedCrossEntropy


class Head(nn.Module):
    """Projection to the vocabulary. `core` is the seam where strategies enter.

    Training goes through `forward` with an objective, which calls `loss`: so what is attached to the call of this
    module, such as the gathering of a sharded weight, happens for both uses.
    """

    def __init__(self, dim: int, vocab_size: int, std: float, soft_cap: float | None = None) -> None:
        super().__init__()
        self.weight = unfilled(vocab_size, dim)
        self.core: LossHead = ChunkedCrossEntropy()
        self.std = std
        self.soft_cap = soft_cap

    def forward(self, hidden: Tensor, labels: Tensor | None = None, objective: Objective | None = None) -> Tensor | LossTerms:
        """(B, T, embed) -> logits (B, T, vocab) in the dtype of `hidden`, or with an objective its `LossTerms`."""
        if objective is not None and labels is not None:
            return objective(self, hidden, labels)
        logits = F.linear(hidden, self.weight)
        return logits if self.soft_cap is None else self.soft_cap * (logits / self.soft_cap).tanh()

    def loss(self, hidden: Tensor, labels: Tensor, z_loss: float = 0.0, smoothing: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """`hidden` (B, T, embed), `labels` (B, T): the loss head's (total, nll, z), the latter two (B, T).

        Raises:
            ValueError: when there is not one label per position.
        """
        if labels.shape != hidden.shape[:-1]:
            raise ValueError(f"labels {tuple(labels.shape)} do not fit hidden states {tuple(hidden.shape)}")
        smoothed = {"smoothing": smoothing} if smoothing else {}
        total, nll, z = self.core(hidden.flatten(0, -2), self.weight, labels.flatten(), z_loss, self.soft_cap, **smoothed)
        return total, nll.view(labels.shape), z.view(labels.shape)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The projection."""
        return {"weight": TensorSpec(("vocab", "embed"), Init("normal", self.std), "head")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Layout of the hidden states that enter and the logits that leave."""
        return {"": ModuleSpec((("batch", "sequence", "embed"),), (("batch", "sequence", "vocab"),))}
