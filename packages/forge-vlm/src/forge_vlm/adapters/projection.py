"""From one width to another, token by token: a matrix, or a feed-forward network of a few."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import TensorSpec
from forge_models.blocks.layers import Linear, linear_specs


class Projection(nn.Module):
    """A matrix behind each of `hidden` hidden layers with exact gelu between: 0 is a linear map, 1 the connector of LLaVA-1.5."""

    def __init__(self, inputs: int, outputs: int, *, hidden: int, hidden_dim: int, bias: bool, std: float) -> None:
        super().__init__()
        widths = (inputs, *[hidden_dim] * hidden, outputs)
        self.std = std
        self.layers = nn.ModuleDict({str(at): Linear(*sizes, bias) for at, sizes in enumerate(pairwise(widths))})

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        for name, layer in self.layers.items():
            x = layer(x if name == "0" else F.gelu(x))
        return x

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module."""
        found: dict[str, TensorSpec] = {}
        for name, layer in self.layers.items():
            assert isinstance(layer, Linear)
            found |= linear_specs(f"layers.{name}", layer, (None, None), self.std)
        return found
