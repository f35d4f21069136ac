"""Kimi Delta Attention, chosen in `[model]`: `attention = "kimi_delta"`, or as the recurrent layer of `hybrid`."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from forge_core.component import IDENTITY
from forge_core.specs import Matrix
from forge_models.components.recurrent import RecurrentLayer
from forge_models.shape import BlockContext

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn


@dataclass(frozen=True, kw_only=True)
class KDA(RecurrentLayer):
    """Kimi Delta Attention (Kimi Team, 2025): Gated DeltaNet whose decay differs by channel of the keys.

    Time and memory per token do not grow with the length. A document begins with an empty state. It has no rotary positions. The
    chunks are computed in plain torch, or with `kernel = "fla"`.
    """

    key_class: ClassVar = IDENTITY

    heads: Annotated[int, Gt(0)] | None = None
    """Number of heads, each with a state; the model's `heads` when absent."""
    head_dim: Annotated[int, Gt(0)] | None = None
    """Width of a head of queries, keys and values, and rank of decays and gate; the model's `head_dim` when absent."""
    conv_width: Annotated[int, Ge(1)] = 4
    """Number of positions that the causal convolution over queries, keys and values covers, including the current one."""
    norm_eps: Annotated[float, Gt(0)] | None = None
    """`eps` of the norm of each head's output; the model's norm `eps`, or 1e-6, when absent."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[KDA]":
        """Returns examples with the model's sizes and with sizes of their own."""
        return (cls(), cls(heads=4, head_dim=6, conv_width=3, norm_eps=1e-5))

    def resolved(self, context: BlockContext) -> "KDA":
        """Returns the component with every default of a model resolved."""
        heads, head_dim = self.heads or context.heads, self.head_dim or context.head_dim
        return replace(self, heads=heads, head_dim=head_dim, norm_eps=self.norm_eps or getattr(context.norm, "eps", 1e-6))

    def units(self, context: BlockContext) -> dict[str, int]:
        """Returns the number of indivisible units of each logical dimension that only this layer has."""
        return {"state_heads": self.heads or context.heads}

    def matrices(self, context: BlockContext) -> dict[str, Matrix]:
        """Returns the linear layers by name."""
        heads, rank = self.heads or context.heads, self.head_dim or context.head_dim
        rows = {"q_proj": heads * rank, "k_proj": heads * rank, "v_proj": heads * rank, "b_proj": heads}
        made = {name: Matrix((count, context.dim), ("state_heads", "embed")) for name, count in rows.items()}
        for pair in ("f", "g"):
            made[f"{pair}_a_proj"] = Matrix((rank, context.dim), (None, "embed"))
            made[f"{pair}_b_proj"] = Matrix((heads * rank, rank), ("state_heads", None))
        return made | {"o_proj": Matrix((context.dim, heads * rank), ("embed", "state_heads"))}

    def score_width(self, context: BlockContext) -> int:
        """Returns the multiply-adds of one token with the states: a prediction, a write and a read in every head."""
        return 3 * (self.heads or context.heads) * (self.head_dim or context.head_dim) ** 2

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.kimi_delta import KimiDelta

        return KimiDelta(
            context,
            heads=self.heads or context.heads,
            head_dim=self.head_dim or context.head_dim,
            conv_width=self.conv_width,
            norm_eps=self.norm_eps or getattr(context.norm, "eps", 1e-6),
            kernel=self.kernel,
        )
