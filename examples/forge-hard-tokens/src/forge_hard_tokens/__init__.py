"""Training on hard tokens as a plugin of Forge."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from forge_core import IGNORE, Component
from forge_core.protocols import Head, LossTerms

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HardTokens(Component):
    """Only tokens whose loss is at least `floor` contribute to the gradient, so that learned tokens do not dominate it.

    The reported loss is that of all tokens, so it can be compared with other runs. A second pass of the head selects the tokens.
    """

    floor: Annotated[float, Ge(0)] = 0.1
    """Loss in nats below which a token is left out; 0 trains on every token."""

    def __call__(self, head: Head, hidden: "Tensor", labels: "Tensor") -> LossTerms:
        """hidden (B, T, embed), labels (B, T). Metrics: `hard`, the number of tokens that contribute to the gradient."""
        import torch

        with torch.no_grad():
            _, nll, _ = head.loss(hidden, labels)
        kept = labels.masked_fill(nll < self.floor, IGNORE)
        hard, _, _ = head.loss(hidden, kept)
        total = nll.sum() + (hard - hard.detach())  # the value of all tokens with the gradient of the hard ones
        return LossTerms(total, (labels != IGNORE).sum(), {"hard": (kept != IGNORE).sum().float()}, nll.sum(1))
