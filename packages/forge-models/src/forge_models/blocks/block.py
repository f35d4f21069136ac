"""One block of a decoder, and multi-token prediction (MTP; DeepSeek-V3, 2024, section 2.2), for training and for drafting.

With h^0 the residual stream after the last block and t the tokens of a row, module k = 1, 2, ... computes at position i

    h^k_i = block_k(projection_k [norm(h^(k-1)_i) ; norm(embedding(t_(i+k)))])

and predicts t_(i+k+1) from norm_k(h^k_i) with the model's head. The modules share the model's embedding and head; each has its
own norms, projection and block. The minimized loss is

    sum of nll / D  +  weight / depth * sum over k of (sum of module k's nll / D)

with D the number of next-token labels in the whole step. The paper also divides each module's loss by the length of the row, not
by the smaller number of labels of that module. Every layout therefore gives the same numbers without further communication.
"""

from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.protocols.model import LossTerms
from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.autograd import with_gradient_of
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.layer_inputs import LayerInput
from forge_models.blocks.layers import Embedding, Linear, linear_specs
from forge_models.blocks.moe.layer import ExpertLayer
from forge_models.blocks.rope import Rotation
from forge_models.blocks.streams import StreamConnection, joined
from forge_models.inner_values import tap
from forge_models.shape import DecoderShape


class Block(nn.Module):
    """x + after(attention(before(x))), then the same with the feed-forward layer.

    `before` and `after` are norms or the identity, depending on `norm_placement`: `pre` has only the first, `post` only the
    second, `sandwich` both. With a `parallel_residual`, the feed-forward layer reads x as well: x + attention + feed-forward.
    With a `shared_norm` too, both parts read the output of one norm. Experts with `branch_norms` read the stream itself. A
    `sparse` block has experts instead of the feed-forward layer, and an `attention_only` block has neither. `layer_input` then
    adds to the stream what the token's vector for this layer gates. With a `layer_scalar`, the result is multiplied by the buffer
    `scalar`.

    With several residual streams, `x` is (B, T, streams, dim). Connections (`forge_models.blocks.streams`) then compute the input
    of each part from all streams, and add its output to all of them.

    `reads` has the names of the inputs that a block needs besides the stream, its rotation, mask and cache. An attention module
    declares its own in an attribute of the same name; they follow the cache in its forward.
    """

    scalar: Tensor | None

    def __init__(self, shape: DecoderShape, layer: int) -> None:
        super().__init__()
        context = shape.context(layer)
        norm: Any = shape.norm
        attention: Any = shape.attention
        mlp: Any = shape.mlp
        placement = shape.norm_placement_at(layer)
        before, after = placement != "post", placement != "pre"
        self.multiplier = shape.residual_multiplier
        self.parallel = shape.parallel_residual
        self.shares_norm = shape.shared_norm
        self.attention_norm: nn.Module | None = norm.build(shape.dim) if before else None
        self.attention: nn.Module = attention.build(context)
        self.attention_post_norm: nn.Module | None = norm.build(shape.dim) if after else None
        whole = shape.has_feed_forward(layer)
        moe = shape.moe if shape.has_experts(layer) else None
        normed = whole and not shape.shared_norm and (moe is None or not moe.branch_norms)
        self.mlp_norm: nn.Module | None = norm.build(shape.dim) if before and normed else None
        self.sparse = moe is not None
        self.observed: bool = getattr(self.attention, "observes", False)
        self.attention_reads: tuple[str, ...] = getattr(self.attention, "reads", ())
        self.takes: str | None = getattr(self.attention, "takes", None)
        self.gives: str | None = getattr(self.attention, "gives", None)
        self.mlp: nn.Module | None = None
        if whole:
            self.mlp = mlp.build(context) if moe is None else ExpertLayer(moe, mlp, context)
        self.mlp_post_norm: nn.Module | None = norm.build(shape.dim) if after and whole else None
        inputs = shape.layer_inputs if layer < shape.layers else None
        self.layer_input: LayerInput | None = None if inputs is None else LayerInput(inputs, context, mlp.activation)
        others = (*(("token_mask", "tokens") if self.sparse else ()), *(() if inputs is None else ("layer_input",)))
        self.reads = tuple(dict.fromkeys((*self.attention_reads, *others)))
        self.register_buffer("scalar", torch.full((1,), nan) if shape.layer_scalar else None)
        self.attention_streams = StreamConnection(shape) if shape.streams is not None else None
        self.mlp_streams = StreamConnection(shape) if shape.streams is not None and whole else None

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        attention_mask: Any,
        cache: LayerCache | None = None,
        token_mask: Tensor | None = None,
        tokens: Tensor | None = None,
        key_values: tuple[Tensor, Tensor] | None = None,
        layer_input: Tensor | None = None,
    ) -> Tensor | tuple[Any, ...]:
        """(B, T, dim) -> (B, T, dim); a sparse block also returns its router statistics, and one whose attention has an indexer
        both router statistics, which may be None, and those of the attention. One whose attention `gives` returns router
        statistics, which may be None, and keys and values.

        Args:
            x: residual stream, or streams (B, T, streams, dim).
            rotation: rotation of this layer.
            attention_mask: mask that the attention core prepared for this batch.
            cache: keys and values of earlier tokens.
            token_mask: (B, T) False for padding; used by sparse blocks and by indexers only.
            tokens: (B, T) token ids, for routers that need them, and for attention with value embeddings.
            key_values: keys and values of an earlier layer, if the attention `takes` them.
            layer_input: (B, T, d) the vector of each token for this layer, if the model has them.
        """
        x = tap("residual", x)
        read, weights = _read(x, self.attention_streams)
        normed = _normed(read, self.attention_norm)
        given = {"token_mask": token_mask, "tokens": tokens, "key_values": key_values}
        result = self.attention(normed, rotation, attention_mask, cache, *(given[name] for name in self.attention_reads))
        inner, *seen = result if isinstance(result, tuple) else (result,)
        inner = tap("attention.output", inner)
        added = tap("attention.added", self._scaled(inner, self.attention_post_norm))
        if self.mlp is None:
            x = self._leave(_added(x, added, weights), layer_input)
            return (x, None, *seen) if seen else x
        if self.parallel:
            inner, x = normed if self.shares_norm else _normed(x, self.mlp_norm), x + added
        else:
            x = tap("residual_mid", _added(x, added, weights))
            read, weights = _read(x, self.mlp_streams)
            inner = _normed(read, self.mlp_norm)
        if not self.sparse:
            x = self._end(x, self.mlp(inner), weights, layer_input)
            return (x, None, *seen) if seen else x
        inner, router_stats = self.mlp(inner, token_mask, tokens, cache is not None)
        return self._end(x, inner, weights, layer_input), router_stats, *seen

    def observe(self, router_stats: Tensor | None, attention_stats: Tensor | None = None) -> None:
        """Passes what a forward returned besides the residual stream to the modules whose statistics it is."""
        mlp: Any = self.mlp
        attention: Any = self.attention
        if router_stats is not None:
            mlp.observe(router_stats)
        if self.observed:
            attention.observe(attention_stats)

    def _end(self, x: Tensor, inner: Tensor, weights: tuple[Tensor, ...], layer_input: Tensor | None) -> Tensor:
        added = tap("mlp.added", self._scaled(tap("mlp.output", inner), self.mlp_post_norm))
        return self._leave(_added(x, added, weights), layer_input)

    def _leave(self, x: Tensor, layer_input: Tensor | None) -> Tensor:
        if self.layer_input is not None:
            x = self.layer_input(x, layer_input)
        return tap("residual_after", x if self.scalar is None else x * self.scalar.to(x.dtype))

    def _scaled(self, inner: Tensor, norm: nn.Module | None) -> Tensor:
        inner = _normed(inner, norm)
        return inner if self.multiplier == 1 else inner * self.multiplier

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the spec of the block's own buffer; its parts describe themselves."""
        return {} if self.scalar is None else {"scalar": TensorSpec((None,), Init("ones"), "vector")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout of the norms, which strategies may shard along the sequence."""
        stream = ModuleSpec((("batch", "sequence", "embed"),), (("batch", "sequence", "embed"),))
        names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
        return {name: stream for name in names if getattr(self, name) is not None}


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)


def _read(x: Tensor, connection: nn.Module | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the input of a part of the block, and the weights with which its output is added; none without connections."""
    if connection is None:
        return x, ()
    read, *weights = connection(x)
    return read, tuple(weights)


def _added(x: Tensor, added: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    return joined(x, added, *weights) if weights else x + added


STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")


class MTPModule(nn.Module):
    """MTP module k; its block is built like the block of layer `layers + k - 1`."""

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
    ) -> tuple[Any, ...]:
        """h^(k-1) and embedded t_(i+k), each (B, T, dim) -> (h^k, its norm for the head, and what else the block returns).

        The other arguments are those of a block.
        """
        x = self.projection(torch.cat((self.stream_norm(x), self.token_norm(embedded)), dim=-1))
        given = {"token_mask": token_mask, "tokens": tokens}
        found = self.block(x, rotation, attention_mask, cache, **{name: given[name] for name in self.block.reads})
        x, *further = found if isinstance(found, tuple) else (found,)
        return x, tap("norm", self.norm(x)), *further

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the projection; norms and block describe themselves."""
        return linear_specs("projection", self.projection, ("embed", None), self.std)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout of projection and norms, which strategies may shard along the sequence."""
        norms = ("stream_norm", "token_norm", "norm")
        pair: tuple[Dim, ...] = ("batch", "sequence", None)
        return {"projection": ModuleSpec((pair,), (STREAM,))} | {name: ModuleSpec((STREAM,), (STREAM,)) for name in norms}


class MTPModules(nn.Module):
    """All MTP modules of a decoder.

    `embed` shares the model's embedding table, because the last pipeline stage may have no other copy of it. `weight` is the
    loss weight of the current step.
    """

    def __init__(self, shape: DecoderShape, embed: Embedding) -> None:
        super().__init__()
        self.shape = shape
        self.weight = shape.mtp_weight
        self.embed = Embedding(shape.vocab_size, shape.dim)
        self.embed.weight = embed.weight
        self.depths = nn.ModuleDict({str(k): MTPModule(shape, k) for k in range(1, shape.mtp_depth + 1)})

    def at_step(self, step: int, steps: int) -> None:
        """Sets the loss weight for optimizer step `step` of a run of `steps` steps."""
        schedule: Any = self.shape.mtp_schedule
        factor = 1.0 if schedule is None else schedule.build(steps)(step)
        self.weight = self.shape.mtp_weight * factor

    def add_gradient(self, terms: LossTerms, mtp_terms: list[LossTerms]) -> LossTerms:
        """Returns `terms` with the gradient of all MTP losses added to `sum`; the value of `sum` does not change.

        The metrics `mtp_1`, ... are the unweighted losses of each depth.
        """
        mtp_loss = sum((one.sum for one in mtp_terms[1:]), mtp_terms[0].sum) * (self.weight / len(mtp_terms))
        metrics = {f"mtp_{k}": one.sum.detach() for k, one in enumerate(mtp_terms, 1)}
        return terms._replace(sum=with_gradient_of(terms.sum, mtp_loss), metrics={**terms.metrics, **metrics})
