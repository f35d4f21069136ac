"""Multi-token prediction (MTP; DeepSeek-V3, 2024, section 2.2), for training and for drafting.

With h^0 the stream after the last block and t the tokens of a row, module k = 1, 2, ... computes at place i

    h^k_i = block_k(projection_k [norm(h^(k-1)_i) ; norm(embedding(t_(i+k)))])

and scores norm_k(h^k_i) with the model's head against t_(i+k+1). Embedding and head are the model's; each module has its
norms, projection and block. The minimized loss is

    sum of nll / D  +  weight / depth * sum over k of (sum of module k's nll / D)

with D the labels of the next token in the whole step: the paper divides each module's loss by the length of the row too,
not by the fewer labels that are left to it. So every layout gives the same numbers without another exchange.
"""

from typing import Any

import torch
from torch import Tensor, nn

from forge_core.protocols.model import LossTerms
from forge_core.specs import Dim, ModuleSpec, TensorSpec
from forge_models.autograd import with_gradient_of
from forge_models.blocks.block import Block
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.layers import Embedding, Linear, linear_specs
from forge_models.blocks.rope import Rotation
from forge_models.inner_values import tap
from forge_models.shape import DecoderShape

STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")


class MTPModule(nn.Module):
    """Module k. Its block is made as that of layer `layers + k - 1` would be."""

    def __init__(self, shape: DecoderShape, depth: int) -> None:
        super().__init__()
        norm: Any = shape.norm
        self.std = shape.init_std
        self.stream_norm: nn.Module = norm.build(shape.dim)
        self.token_norm: nn.Module = norm.build(shape.dim)
        self.projection = Linear(2 * shape.dim, shape.dim)
        self.block = Block(shape, shape.layers + depth - 1)
        self.norm: nn.Module = norm.build(shape.dim)

    def forward(
        self,
        x: Tensor,
        embedded: Tensor,
        rotation: Rotation,
        attention_mask: Any,
        cache: LayerCache | None = None,
        token_mask: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """h^(k-1) and embedded t_(i+k), each (B, T, dim) -> (h^k, its norm for the head, the router statistics or None).

        The other arguments are those of a block.
        """
        x = self.projection(torch.cat((self.stream_norm(x), self.token_norm(embedded)), dim=-1))
        router_stats: Tensor | None = None
        if self.block.sparse:
            x, router_stats = self.block(x, rotation, attention_mask, cache, token_mask, tokens)
        else:
            x = self.block(x, rotation, attention_mask, cache)
        return x, tap("norm", self.norm(x)), router_stats

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The projection; norms and block have their own."""
        return linear_specs("projection", self.projection, ("embed", None), self.std)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Layout of projection and norms, which strategies may split along the sequence."""
        norms = ("stream_norm", "token_norm", "norm")
        pair: tuple[Dim, ...] = ("batch", "sequence", None)
        return {"projection": ModuleSpec((pair,), (STREAM,))} | {name: ModuleSpec((STREAM,), (STREAM,)) for name in norms}


class MTPModules(nn.Module):
    """All modules of a decoder. `embed` is the model's table under a second name, for a pipeline part that has no other.

    `weight` is that of the current step.
    """

    def __init__(self, shape: DecoderShape, embed: Embedding) -> None:
        super().__init__()
        self.shape = shape
        self.weight = shape.mtp_weight
        self.embed = Embedding(shape.vocab_size, shape.dim)
        self.embed.weight = embed.weight
        self.depths = nn.ModuleDict({str(k): MTPModule(shape, k) for k in range(1, shape.mtp_depth + 1)})

    def at_step(self, step: int, steps: int) -> None:
        """The weight of optimizer step `step` of a run of `steps`."""
        schedule: Any = self.shape.mtp_schedule
        factor = 1.0 if schedule is None else schedule.build(steps)(step)
        self.weight = self.shape.mtp_weight * factor

    def add_gradient(self, terms: LossTerms, mtp_terms: list[LossTerms]) -> LossTerms:
        """`terms` of the next token with the gradient of all MTP losses added to its sum, whose value does not change.

        Metrics `mtp_1`, ...: the loss of each depth, unweighted.
        """
        mtp_loss = sum((one.sum for one in mtp_terms[1:]), mtp_terms[0].sum) * (self.weight / len(mtp_terms))
        metrics = {f"mtp_{k}": one.sum.detach() for k, one in enumerate(mtp_terms, 1)}
        return terms._replace(sum=with_gradient_of(terms.sum, mtp_loss), metrics={**terms.metrics, **metrics})
