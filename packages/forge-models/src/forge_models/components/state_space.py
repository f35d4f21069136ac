"""Mamba-2, chosen in `[model]`: `attention = "mamba2"`, or as the recurrent layer of `hybrid`."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

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
class Mamba2(RecurrentLayer):
    """Mamba-2 (Dao and Gu, 2024): a state of fixed size per head, whose decay and input depend on the token.

    Time and memory per token do not grow with the length. A document begins with an empty state. It has no rotary positions. The
    chunks are computed in plain torch, or with `kernel = "fla"`.
    """

    key_class: ClassVar = IDENTITY

    heads: Annotated[int, Gt(0)] | None = None
    """Number of heads, each with a state; the model's `heads` when absent."""
    head_dim: Annotated[int, Gt(0)] | None = None
    """Width of a head; 2 * dim / heads when absent."""
    groups: Annotated[int, Gt(0)] | None = None
    """Number of groups of heads, a divisor of `heads`; the heads of a group share B and C, and a norm. The model's `kv_heads`
    when absent."""
    state_dim: Annotated[int, Gt(0)] = 128
    """Width of a state: of B and C."""
    conv_width: Annotated[int, Ge(1)] = 4
    """Number of positions that the causal convolution over x, B and C covers, including the current one."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""
    bias: bool = False
    """Whether the linear layers have a bias."""
    gate_first: bool = True
    """Whether the gate multiplies before the norm (Mamba-2, Nemotron-H); after it when false."""
    step_min: Annotated[float, Ge(0)] = 0.0
    """Minimum of the step sizes."""
    step_max: Annotated[float, Gt(0)] | None = None
    """Maximum of the step sizes; no maximum when absent."""
    norm_eps: Annotated[float, Gt(0)] | None = None
    """`eps` of the norm of each group's output; the model's norm `eps`, or 1e-6, when absent."""

    def __post_init__(self) -> None:
        if self.step_max is not None and self.step_max <= self.step_min:
            raise ValueError(f"step_max {self.step_max} must be above step_min {self.step_min}")

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Mamba2]":
        """Returns examples with and without shared B and C."""
        other = cls(heads=4, head_dim=6, groups=2, state_dim=5, conv_bias=False, bias=True, gate_first=False, step_min=1e-3)
        return (cls(state_dim=8), other)

    def sizes(self, context: BlockContext) -> dict[str, int]:
        """Returns the numbers and widths of heads, groups and states."""
        heads = self.heads or context.heads
        head_dim = self.head_dim or 2 * context.dim // heads
        return {"heads": heads, "head_dim": head_dim, "groups": self.groups or context.kv_heads, "state_dim": self.state_dim}

    def resolved(self, context: BlockContext) -> "Mamba2":
        """Returns the component with every default of a model resolved."""
        sizes: dict[str, Any] = self.sizes(context)
        return replace(self, **sizes, norm_eps=self.norm_eps or getattr(context.norm, "eps", 1e-6))

    def check(self, context: BlockContext) -> None:
        """Checks the settings against the sizes of the model.

        Raises:
            ValueError: a setting does not fit the model.
        """
        sizes = self.sizes(context)
        heads, groups = sizes["heads"], sizes["groups"]
        if heads % groups:
            raise ValueError(f"groups {groups} must divide heads {heads} of mamba2")
        if self.head_dim is None and 2 * context.dim % heads:
            raise ValueError(f"heads {heads} of mamba2 must divide 2 * dim = {2 * context.dim}, or head_dim must be given")

    def units(self, context: BlockContext) -> dict[str, int]:
        """Returns the number of indivisible units of each logical dimension that only this layer has."""
        return {"state_heads": self.sizes(context)["groups"]}

    def matrices(self, context: BlockContext) -> dict[str, Matrix]:
        """Returns the linear layers by name."""
        sizes = self.sizes(context)
        values, keys = sizes["heads"] * sizes["head_dim"], sizes["groups"] * sizes["state_dim"]
        rows = {"z_proj": values, "x_proj": values, "b_proj": keys, "c_proj": keys, "dt_proj": sizes["heads"]}
        made = {name: Matrix((count, context.dim), ("state_heads", "embed")) for name, count in rows.items()}
        return made | {"o_proj": Matrix((context.dim, values), ("embed", "state_heads"))}

    def score_width(self, context: BlockContext) -> int:
        """Returns the multiply-adds of one token with the states: a write and a read in every head."""
        sizes = self.sizes(context)
        return 2 * sizes["heads"] * sizes["head_dim"] * sizes["state_dim"]

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.mamba import StateSpaceMixer

        return StateSpaceMixer(
            context,
            **self.sizes(context),
            conv_width=self.conv_width,
            conv_bias=self.conv_bias,
            bias=self.bias,
            gate_first=self.gate_first,
            step_min=self.step_min,
            step_max=self.step_max,
            norm_eps=self.norm_eps or getattr(context.norm, "eps", 1e-6),
            kernel=self.kernel,
        )
