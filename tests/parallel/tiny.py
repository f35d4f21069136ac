"""A small model that describes itself, written with torch alone, and its loss."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.protocols.model import LossTerms
from forge_core.specs import Init, ModuleSpec, Specs, TensorSpec

VOCAB, DIM, LAYERS = 37, 8, 3


class Block(nn.Module):
    """Document-masked attention with one head, then a two-matrix MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 5, bias=True)
        self.down = nn.Linear(5, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return x + self.down(torch.tanh(self.up(x)))


class Head(nn.Module):
    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))

    def forward(self, hidden: Tensor, labels: Tensor | None, objective: Any) -> Any:
        return F.linear(hidden, self.weight) if objective is None else objective(self, hidden, labels)


class Tiny(nn.Module):
    """Embedding, blocks, head; tied or not. Has a buffer, so that filling one is tested."""

    scale: Tensor

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tied = tied
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(LAYERS))
        self.head = Head(DIM, VOCAB)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.empty(DIM))

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        objective: Any = None,
    ) -> Any:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if documents is not None:
            mask = mask & (documents[:, :, None] == documents[:, None, :])
        hidden = self.embed(x)
        hidden = hidden * self.scale.to(hidden.dtype)
        if positions is not None:
            hidden = hidden + (positions[..., None] / 10).to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(hidden, labels, objective)

    def specs(self) -> Specs:
        normal, ones, zeros = Init("normal", 0.3), Init("ones"), Init("zeros")
        tensors = {
            "embed.weight": TensorSpec(("vocab", "embed"), normal, "embedding"),
            "scale": TensorSpec(("embed",), ones, "vector"),
        }
        if not self.tied:
            tensors["head.weight"] = TensorSpec(("vocab", "embed"), normal, "head")
        for i in range(LAYERS):
            at = f"blocks.{i}."
            tensors |= {
                at + "norm.weight": TensorSpec(("embed",), ones, "vector"),
                at + "norm.bias": TensorSpec(("embed",), zeros, "vector"),
                at + "qkv.weight": TensorSpec((None, "embed"), normal, "matrix", fused=(DIM, DIM, DIM)),
                at + "out.weight": TensorSpec(("embed", None), normal, "matrix"),
                at + "up.weight": TensorSpec(("ffn", "embed"), normal, "matrix"),
                at + "up.bias": TensorSpec(("ffn",), zeros, "vector"),
                at + "down.weight": TensorSpec(("embed", "ffn"), normal, "matrix"),
            }
        ties = {"head.weight": "embed.weight"} if self.tied else {}
        residual = ModuleSpec((("batch", "sequence", "embed"),), (("batch", "sequence", "embed"),))
        paths = tuple(f"blocks.{i}" for i in range(LAYERS))
        return Specs(tensors, dict.fromkeys(paths, residual), paths, {"vocab": VOCAB, "ffn": 5}, ties)


class TiedTiny(Tiny):
    def __init__(self) -> None:
        super().__init__(tied=True)


def cross_entropy(head: Any, hidden: Tensor, labels: Tensor) -> LossTerms:
    """The objective, by torch's own cross-entropy, in at least fp32."""
    logits = F.linear(hidden, head.weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    return LossTerms(each.sum(), (labels != -100).sum(), {}, each.detach().view(labels.shape).sum(1))
