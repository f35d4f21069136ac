"""Linear layers whose forward rounds their weight: W -> s * round(W / s), with s = max|row| / (2^(bits - 1) - 1)."""

from collections.abc import Container

from torch import Tensor, nn
from torch.nn import functional as F


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Returns the rounded weight (outputs, inputs), whose gradient is that of the weight itself."""
    scale = weight.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return weight + ((weight / scale).round() * scale - weight).detach()


def round_linear_layers(part: nn.Module, names: Container[str], bits: int) -> None:
    """Changes the forward of all linear layers of `part` whose weight is in `names`. Parameters keep their names."""
    for path, layer in part.named_modules():
        if isinstance(layer, nn.Linear) and f"{path}.weight" in names:
            layer.__class__ = type(f"Rounded{type(layer).__name__}", (_Rounded, type(layer)), {"bits": bits})


class _Rounded(nn.Linear):
    bits: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name in torch)
        return F.linear(input, rounded(self.weight, self.bits), self.bias)
