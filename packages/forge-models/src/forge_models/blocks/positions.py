"""Learned vectors of positions, which are added to the embedded tokens before the first block (GPT-2; Radford et al., 2019)."""

from torch import Tensor, nn

from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.blocks.layers import look_up, unfilled

STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")


class LearnedPositions(nn.Module):
    """x + weight[positions]. A position is that of a token in its document, so packed documents begin with the first row."""

    def __init__(self, length: int, dim: int, std: float) -> None:
        super().__init__()
        self.weight = unfilled(length, dim)
        self.std = std

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, T, dim), (B or 1, T) int -> (B, T, dim)."""
        return x + look_up(self.weight, positions)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the spec of the table, which no strategy splits: it has one row for each position, not for each token."""
        return {"weight": TensorSpec((None, "embed"), Init("normal", self.std), "embedding")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout: positions come whole with a stream that may be split along the sequence."""
        return {"": ModuleSpec((STREAM, ("batch", "sequence")), (STREAM,))}
