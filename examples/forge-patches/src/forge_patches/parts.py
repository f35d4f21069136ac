"""Encoder, adapter and fusion."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from forge_core import TensorSpec
from forge_models.blocks import Linear, linear_specs
from forge_vlm import AdapterContext, FusionContext
from forge_vlm.fusion import Inputs, JointFusion


class Patches(nn.Module):
    """(N, channels, size, size) -> (N, patches, channels * patch^2), row by row; without parameters."""

    blocks = ()

    def __init__(self, *, size: int, patch: int, channels: int) -> None:
        super().__init__()
        self.patch = patch

    def forward(self, images: Tensor) -> Tensor:
        return F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return {}


class GatedAdapter(nn.Module):
    """(N, n, width) -> (N, n, dim)."""

    def __init__(self, context: AdapterContext, hidden: int) -> None:
        super().__init__()
        self.std = context.init_std
        self.gate, self.up = Linear(context.width, hidden), Linear(context.width, hidden)
        self.down = Linear(hidden, context.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        layers = {"gate": self.gate, "up": self.up, "down": self.down}
        return {
            name: spec
            for path, layer in layers.items()
            for name, spec in linear_specs(path, layer, (None, None), self.std).items()
        }


class ApartFusion(JointFusion):
    """Implements `forge_vlm.fusion.Fusion`."""

    def __init__(self, context: FusionContext) -> None:
        super().__init__(context, image_attention="bidirectional_image")

    def seen(self, mask: Any, inputs: Inputs, window: int | None, x: Tensor) -> Any:
        """Removes from the mask (B, 1, T, T) what a token of an image sees outside of its image."""
        seen, token, length = super().seen(mask, inputs, window, x), self.context.image_token, inputs.tokens.shape[1]
        if token is None or not isinstance(seen, Tensor) or seen.shape[-2:] != (length, length):
            return seen  # a generation after its first forward has no images
        here = inputs.tokens == token
        images = ((here.cumsum(1) - 1) // self.context.per_image).masked_fill(~here, -1)
        own = (images[:, :, None] == images[:, None, :]) | ~here[:, :, None]
        return seen & own.unsqueeze(1)
