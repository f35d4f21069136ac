"""A fixed number of learned tokens that look at all features (Perceiver, Jaegle et al., 2021; as in Flamingo and Idefics2)."""

from math import sqrt

from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Init, TensorSpec
from forge_models.blocks.layers import LayerNorm, Linear, linear_specs, unfilled
from forge_vlm.adapters.projection import Projection
from forge_vlm.encoders.layers import attend

EPS = 1e-6
"""Of the norms."""


class Perceiver(nn.Module):
    """Latents, layers in which they look at the features, a norm. Its outputs do not depend on the order of features."""

    def __init__(self, width: int, dim: int, *, latents: int, layers: int, heads: int, ffn_dim: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.latents = unfilled(latents, dim)
        self.entry = Projection(width, dim, hidden=0, hidden_dim=dim, bias=True, std=std)
        self.layers = nn.ModuleDict(
            {str(at): PerceiverLayer(dim, heads, ffn_dim, std, std / sqrt(2 * layers)) for at in range(layers)}
        )
        self.norm = LayerNorm(dim, EPS)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """(N, n, width) -> (N, latents, dim). `seen` (N, n) is False for padding, which changes nothing; None = there is none."""
        mask = None if seen is None else seen[:, None, None]
        features = self.entry(x)
        latents = self.latents.to(features.dtype).expand(len(x), -1, -1)
        for layer in self.layers.values():
            latents = layer(latents, features, mask)
        return self.norm(latents)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module, without those of its layers."""
        return {"latents": TensorSpec((None, None), Init("normal", 1.0), "embedding")}


class PerceiverLayer(nn.Module):
    """Latents attend to features, then each goes through a feed-forward part; both are added."""

    def __init__(self, dim: int, heads: int, ffn_dim: int, std: float, output_std: float) -> None:
        super().__init__()
        self.heads, self.std, self.output_std = heads, std, output_std
        self.latent_norm = LayerNorm(dim, EPS)
        self.feature_norm = LayerNorm(dim, EPS)
        self.q_proj = Linear(dim, dim)
        self.k_proj = Linear(dim, dim)
        self.v_proj = Linear(dim, dim)
        self.o_proj = Linear(dim, dim)
        self.mlp_norm = LayerNorm(dim, EPS)
        self.up_proj = Linear(dim, ffn_dim)
        self.down_proj = Linear(ffn_dim, dim)

    def forward(self, latents: Tensor, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Latents (N, m, dim), features (N, n, dim) -> latents (N, m, dim). `mask` (N, 1, 1, n) is False for padding."""
        seen = self.feature_norm(features)
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.q_proj(self.latent_norm(latents)), self.k_proj(seen), self.v_proj(seen))
        )
        out = attend(q, k, v, mask)
        latents = latents + self.o_proj(out.transpose(1, 2).flatten(2))
        return latents + self.down_proj(F.gelu(self.up_proj(self.mlp_norm(latents))))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module, without those of its norms."""
        specs: dict[str, TensorSpec] = {}
        for name in ("q_proj", "k_proj", "v_proj", "up_proj"):
            specs |= linear_specs(name, getattr(self, name), (None, None), self.std)
        for name in ("o_proj", "down_proj"):
            specs |= linear_specs(name, getattr(self, name), (None, None), self.output_std)
        return specs
