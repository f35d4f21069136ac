"""What a decoder tells the components that build its parts. Plain data: importing it needs no torch."""

from dataclasses import dataclass
from math import sqrt

from forge_core.component import Component
from forge_models.rope import Rope


@dataclass(frozen=True, kw_only=True)
class BlockContext:
    """Sizes and choices of a decoder, all resolved, as `build(context)` of an attention or MLP component sees them.

    Attributes:
        dim: width of the residual stream.
        layers: number of blocks in the whole model.
        layer: index of the block that is being built.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: width of one head.
        ffn_dim: hidden width of the feed-forward part.
        max_length: longest sequence in tokens.
        rope: rotary positions.
        init_std: standard deviation of hidden matrices.
        norm: component that builds a norm of a given width.
    """

    dim: int
    layers: int
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    max_length: int
    rope: Rope
    init_std: float
    norm: Component

    @property
    def output_std(self) -> float:
        """Standard deviation of projections that write to the residual stream: init_std / sqrt(2 * layers).

        Each block adds two terms, so the stream's variance stays the same for every depth (Radford et al., 2019).
        """
        return self.init_std / sqrt(2 * self.layers)


@dataclass(frozen=True, kw_only=True)
class RouterContext:
    """What `build(context)` of a router component is told.

    Attributes:
        dim: width of a token.
        experts: number of experts to choose from.
        top_k: how many are chosen.
        layer: index of the block.
        init_std: standard deviation of hidden matrices.
    """

    dim: int
    experts: int
    top_k: int
    layer: int
    init_std: float

    @classmethod
    def of(cls, context: BlockContext, experts: int, top_k: int) -> "RouterContext":
        """Of a block whose experts are these."""
        return cls(dim=context.dim, experts=experts, top_k=top_k, layer=context.layer, init_std=context.init_std)
