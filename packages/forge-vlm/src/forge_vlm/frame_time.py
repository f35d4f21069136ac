"""The time of a frame as a vector that is added to the vectors of the frame.

A time becomes sines and cosines whose periods are a geometric sequence, as positions do in Vaswani et al. (2017), and a learned
matrix maps them to the width of the decoder. The matrix starts at zero, so a trained model computes the same as before.
"""

from math import log, pi

import torch
from torch import Tensor, nn

from forge_core.specs import Init, TensorSpec
from forge_models.blocks.layers import Linear


class FrameTime(nn.Module):
    """A learned vector of each time; zero for an image without a time."""

    def __init__(self, dim: int, features: int, shortest: float, longest: float) -> None:
        """
        Args:
            dim: width of the vectors.
            features: number of sines and cosines, half of each.
            shortest, longest: periods in seconds.
        """
        super().__init__()
        self.features, self.shortest, self.longest = features, shortest, longest
        self.proj = Linear(features, dim)

    def forward(self, times: Tensor) -> Tensor:
        """(N,) seconds -> (N, dim). A negative time means none."""
        # In fp64: an hour has thousands of periods, of which fp32 would keep three digits.
        count = self.features // 2
        steps = torch.linspace(0, 1, count, dtype=torch.float64, device=times.device)
        rates = 2 * pi / self.shortest * torch.exp(steps * -log(self.longest / self.shortest))
        angles = times.double().unsqueeze(-1) * rates
        waves = torch.cat([angles.sin(), angles.cos()], -1).masked_fill((times < 0).unsqueeze(-1), 0)
        return self.proj(waves.to(self.proj.weight.dtype))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module."""
        return {"proj.weight": TensorSpec((None, None), Init("zeros"), "matrix")}
