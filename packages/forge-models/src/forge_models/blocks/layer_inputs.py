"""Inputs of layers besides the residual stream (per-layer embeddings; Gemma 3n, 2025, and Gemma 4, 2026).

Of token t with embedding x (B, T, dim), layer l receives a vector of width d,

    p_l = (norm(W_l x / sqrt(dim)) + sqrt(d) E_l[t]) / sqrt(2)

with a second table E of all layers and one norm for all of them. The block ends with x + norm(U (act(V x) * p_l)).
"""

from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.blocks.layers import ACTIVATIONS, STREAM, Embedding, Linear, linear_specs
from forge_models.inner_values import tap
from forge_models.shape import BlockContext, LayerInputsShape

NARROW: tuple[Dim, ...] = ("batch", "sequence", None)
VECTORS: tuple[Dim, ...] = ("batch", "sequence", None, None)


class LayerInputs(nn.Module):
    """The table, projection and norm that make the vectors of all layers."""

    def __init__(self, shape: LayerInputsShape, context: BlockContext) -> None:
        super().__init__()
        norm: Any = context.norm
        self.shape, self.context = shape, context
        self.table = Embedding(shape.vocab_size, context.layers * shape.dim)
        self.projection = Linear(context.dim, context.layers * shape.dim)
        self.norm: nn.Module = norm.build(shape.dim)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """(B, T, dim), (B, T) int64 -> (B, T, layers, d)."""
        width = self.shape.dim
        projected = (self.projection(x) * self.context.dim**-0.5).unflatten(-1, (-1, width))
        embedded = self.table(tokens)
        embedded = (embedded * torch.tensor(sqrt(width), dtype=embedded.dtype)).unflatten(-1, (-1, width))
        return (self.norm(projected) + embedded) * sqrt(0.5)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of table and projection; the norm describes itself. No strategy splits the table by tokens."""
        std = self.context.init_std
        table = {"table.weight": TensorSpec((None, None), Init("normal", std), "embedding")}
        return table | linear_specs("projection", self.projection, (None, "embed"), std)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout: tokens come whole with a stream that may be split along the sequence."""
        own = {"projection": ModuleSpec((STREAM,), (NARROW,)), "norm": ModuleSpec((VECTORS,), (VECTORS,))}
        return {"": ModuleSpec((STREAM, ("batch", "sequence")), (VECTORS,)), **own}


class LayerInput(nn.Module):
    """x + norm(U (act(V x) * p)) with the vector p of this layer."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, shape: LayerInputsShape, context: BlockContext, activation: str) -> None:
        super().__init__()
        norm: Any = context.norm
        self.context, self.activation = context, activation
        self.gate = Linear(context.dim, shape.dim)
        self.projection = Linear(shape.dim, context.dim)
        self.norm: nn.Module = norm.build(context.dim)

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        """(B, T, dim), (B, T, d) -> (B, T, dim)."""
        hidden = ACTIVATIONS[self.activation](self.gate(x)) * tap("layer_input.vector", vectors)
        return x + tap("layer_input.added", self.norm(self.projection(hidden)))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of both matrices; the norm describes itself."""
        enter = linear_specs("gate", self.gate, (None, "embed"), self.context.init_std)
        return enter | linear_specs("projection", self.projection, ("embed", None), self.context.output_std)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout: the stream and the vectors may be split along the sequence."""
        matrices = {"gate": ModuleSpec((STREAM,), (NARROW,)), "projection": ModuleSpec((NARROW,), (STREAM,))}
        return {**matrices, "norm": ModuleSpec((STREAM,), (STREAM,))}
