"""Feed-forward layer, norm and router."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core import Init, TensorSpec
from forge_models import BlockContext, RouterContext
from forge_models.blocks import Linear, Routing, linear_specs


def wide(x: Tensor) -> Tensor:
    """Converts to fp32, or keeps a wider dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ReGLULayer(nn.Module):
    """(..., dim) -> (..., dim)."""

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        self.context = context
        self.gate_proj, self.up_proj = Linear(context.dim, context.ffn_dim), Linear(context.dim, context.ffn_dim)
        self.down_proj = Linear(context.ffn_dim, context.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return {
            **linear_specs("gate_proj", self.gate_proj, ("ffn", "embed"), self.context.init_std),
            **linear_specs("up_proj", self.up_proj, ("ffn", "embed"), self.context.init_std),
            **linear_specs("down_proj", self.down_proj, ("embed", "ffn"), self.context.output_std),
        }


class DyT(nn.Module):
    """(..., dim) -> (..., dim), in fp32 and rounded once."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale, self.weight, self.bias = (nn.Parameter(torch.empty(size)) for size in (1, dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return ((wide(x) * wide(self.scale)).tanh() * wide(self.weight) + wide(self.bias)).to(x.dtype)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs: scale and weight start at 1, the bias at 0."""
        one, zero = TensorSpec((None,), Init("ones"), "vector"), TensorSpec((None,), Init("zeros"), "vector")
        return {"scale": one, "weight": one, "bias": zero}


class CosineRouter(nn.Module):
    """Implements `forge_models.blocks.Router`."""

    def __init__(self, context: RouterContext, *, temperature: float) -> None:
        super().__init__()
        self.context, self.temperature = context, temperature
        self.weight = nn.Parameter(torch.empty(context.experts, context.dim))

    def forward(self, x: Tensor, tokens: Tensor | None) -> Routing:
        """x (N, dim) -> experts and weights (N, top_k), probabilities and logits (N, experts)."""
        logits = F.linear(F.normalize(wide(x), dim=-1), F.normalize(wide(self.weight), dim=-1)) / self.temperature
        probabilities = logits.softmax(-1)
        weights, experts = probabilities.topk(self.context.top_k, dim=-1)
        return Routing(experts, weights / weights.sum(-1, keepdim=True), probabilities, logits)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        # Every rank routes its own tokens among all experts, so no strategy may split the rows.
        return {"weight": TensorSpec((None, "embed"), Init("normal", self.context.init_std), "router")}
