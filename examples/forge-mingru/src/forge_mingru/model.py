"""Embedding, recurrent layers, norm, head. With state h, gate z and candidate c, elementwise,

    h_t = (1 - z_t) h_(t-1) + z_t c_t,    z_t = sigmoid(Z x_t),    c_t = C x_t.

Gate and candidate do not depend on the state, so that all steps of a row are computed in log2(T) rounds.
"""

from typing import Any

import torch
from torch import Tensor, nn

from forge_core import Init, Specs, TensorSpec
from forge_core.protocols import LossTerms, Objective
from forge_models.blocks import Embedding, Head, Linear, RMSNorm, linear_specs

EPS = 1e-5


class MinGRU(nn.Module):
    """Implements `forge_core.protocols.Model`."""

    def __init__(self, *, dim: int, layers: int, expand: int, vocab_size: int, init_std: float) -> None:
        super().__init__()
        self.std = init_std
        self.embed: Embedding | None = Embedding(vocab_size, dim)
        self.blocks = nn.ModuleDict({str(layer): Layer(dim, expand * dim, init_std) for layer in range(layers)})
        self.norm: RMSNorm | None = RMSNorm(dim, EPS)
        self.head: Head | None = Head(dim, vocab_size, init_std)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        objective: Objective | None = None,
        **extras: Any,
    ) -> Tensor | LossTerms:
        """(B, T) tokens -> (B, T, vocab) logits, or the terms of the objective. The state starts at 0 with each document."""
        goes_on = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)  # whether a token has a state before it
        goes_on[:, 0] = False
        if documents is not None:
            goes_on[:, 1:] = documents[:, 1:] == documents[:, :-1]
        x = x if self.embed is None else self.embed(x)
        for layer in self.blocks.values():
            x = x + layer(x, goes_on)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x, labels, objective)

    def specs(self) -> Specs:
        table = TensorSpec(("vocab", "embed"), Init("normal", self.std), "embedding")
        tensors = {} if self.embed is None else {"embed.weight": table}
        for path, module in self.named_modules():
            for name, spec in getattr(module, "tensor_specs", dict)().items():
                tensors[f"{path}.{name}"] = spec
        entry = () if self.embed is None else ("embed",)
        leave = tuple(name for name in ("norm", "head") if getattr(self, name) is not None)
        blocks = tuple(f"blocks.{name}" for name in self.blocks)
        recurrent = ("the recurrence, which passes a state from token to token",)
        return Specs(tensors, {}, blocks, {}, entry=entry, exit=leave, whole_rows=recurrent, whole_stream=recurrent)


class Layer(nn.Module):
    """(B, T, dim) -> (B, T, dim), what is added to the stream."""

    def __init__(self, dim: int, state: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.norm = RMSNorm(dim, EPS)
        self.gate, self.candidate, self.leave = Linear(dim, state), Linear(dim, state), Linear(state, dim)

    def forward(self, x: Tensor, goes_on: Tensor) -> Tensor:
        """`goes_on` (B, T) bool: whether the token before is of the same document."""
        x = self.norm(x)
        gate = self.gate(x).sigmoid()
        return self.leave(states((1 - gate) * goes_on.unsqueeze(-1), gate * self.candidate(x)))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return {
            **linear_specs("gate", self.gate, ("ffn", "embed"), self.std),
            **linear_specs("candidate", self.candidate, ("ffn", "embed"), self.std),
            **linear_specs("leave", self.leave, ("embed", "ffn"), self.std),
        }


def states(keep: Tensor, added: Tensor) -> Tensor:
    """Solves h_t = keep_t h_(t-1) + added_t with h before the first token 0: (B, T, n), (B, T, n) -> (B, T, n)."""
    distance = 1
    while distance < keep.shape[1]:  # Hillis and Steele, 1986
        earlier, kept = added[:, :-distance], keep[:, distance:]
        added = torch.cat((added[:, :distance], added[:, distance:] + kept * earlier), 1)
        keep = torch.cat((keep[:, :distance], kept * keep[:, :-distance]), 1)
        distance *= 2
    return added
