"""Parameter and FLOP counts of a decoder, from its description alone: importing and calling this needs no torch.

Convention: a multiply-add is 2 FLOPs; a backward costs twice its forward; only matrix products count (norms, activations,
rotation, softmax and the embedding's look-up do not). So per token

    train = 6 * P + 6 * sum over layers of heads * (width of a key + width of a value) * T'

with P the weights that take part in matrix products for one token (the head always, the embedding's table never, a tied
table once, as head; biases never; of experts the `top_k` that a token goes to, the shared ones and the router) and T' the
keys that a query meets: T, or the window if that is less, for the full square that most tables count ("PaLM" convention,
Chowdhery et al., 2022); what a causal kernel needs is (T + 1) / 2 without a window.
Recomputation is not counted, nor is what capacity saves where it drops slots. MTP modules count in
training only: each has a projection of two widths to one and a block, and scores its token with the head once more. They too are
counted for every token, though the last k of a row have nothing that module k could read.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from forge_core.component import Component
from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import Decoder
from forge_models.components.mlps import GELU, GeGLU, ReLU, ReLU2, SwiGLU
from forge_models.components.norms import LayerNorm, RMSNorm
from forge_models.components.routers import Hash, SigmoidTopK, SoftmaxTopK

CONVENTION = "6 P + 6 L H (Dk + Dv) T' per token, embedding look-up excluded, head included"
"""To be printed beside every figure; with Dk = Dv = D the second term is the familiar 12 L H D T'."""


@dataclass(frozen=True)
class Counts:
    """Counts of one decoder.

    Attributes:
        embedding: weights of the token table (also the head's when tied).
        attention: weights of all attention projections and their norms.
        mlp: weights of all feed-forward parts, every expert and router included.
        norms: weights of the blocks' norms and of the last norm.
        head: weights of the output projection; 0 when tied.
        matrix: weights that take part in matrix products for one token, the head's included even when tied.
        idle: weights of experts that a token does not go to; 0 in a dense model.
        mtp: weights of the MTP modules, which are in none of the above but `idle`.
        mtp_matrix: `matrix` of these modules, the head once for each.
        mtp_widths: `widths` of their blocks.
        widths: per window (None = global), heads * (width of a key + width of a value), summed over the layers that have
            it: multiply-adds that one key costs a query.
    """

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int
    matrix: int
    idle: int
    widths: Mapping[int | None, int]
    mtp: int = 0
    mtp_matrix: int = 0
    mtp_widths: Mapping[int | None, int] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """All weights, a tied table once."""
        return self.embedding + self.attention + self.mlp + self.norms + self.head + self.mtp

    @property
    def active(self) -> int:
        """Weights that one token uses: all of a dense model."""
        return self.parameters - self.idle

    def forward(self, length: int, causal: bool = False) -> float:
        """Forward FLOPs per token of rows of `length` tokens, of the next token only; see the module for `causal`."""
        return _products(self.matrix, self.widths, length, causal)

    def training(self, length: int, causal: bool = False) -> float:
        """Forward and backward FLOPs per token of rows of `length` tokens."""
        mtp = _products(self.mtp_matrix, self.mtp_widths, length, causal)
        return 3 * (self.forward(length, causal) + mtp)


def count(model: Decoder) -> Counts:
    """Counts of `model`.

    Raises:
        ValueError: when it has parts whose counts are not known here.
    """
    dim, layers = model.dim, model.layers
    depth = 0 if model.mtp is None else model.mtp.depth
    attention = _attention(model, model.resolved_attention)
    dense, biases = _mlp(model, model.resolved_mlp)
    sparse = _experts(model, model.resolved_mlp)
    sparse_layers = sum(model.moe is not None and model.moe.has(layer) for layer in range(layers))
    dense_layers = layers - sparse_layers
    block_norms = 4 if model.norm_placement == "sandwich" else 2
    norms = block_norms * layers + 1
    table = model.vocab_size * dim
    behind = sum(model.moe is not None and model.moe.has(layer) for layer in range(layers, layers + depth))
    block = attention.weights + 2 * dim * dim
    mtp = depth * (block + attention.others + (block_norms + 3) * _norm(model.resolved_norm, dim))
    mtp += (depth - behind) * (dense + biases) + behind * (sparse.active + sparse.idle)
    return Counts(
        embedding=table,
        attention=layers * (attention.weights + attention.others),
        mlp=dense_layers * (dense + biases) + sparse_layers * (sparse.active + sparse.idle),
        norms=norms * _norm(model.resolved_norm, dim),
        head=0 if model.tied_embeddings else table,
        matrix=layers * attention.weights + dense_layers * dense + sparse_layers * sparse.active + table,
        idle=(sparse_layers + behind) * sparse.idle,
        widths=_widths(model, model.resolved_attention, range(layers)),
        mtp=mtp,
        mtp_matrix=depth * (block + table) + (depth - behind) * dense + behind * sparse.active,
        mtp_widths=_widths(model, model.resolved_attention, range(layers, layers + depth)),
    )


@dataclass(frozen=True)
class _Attention:
    """One layer's weights in matrix products and its other weights."""

    weights: int
    others: int


def _attention(model: Decoder, part: Component) -> _Attention:
    dim, heads, norm = model.dim, model.heads, model.resolved_norm
    if type(part) is GQA:
        width, kv_width = heads * model.resolved_head_dim, model.resolved_kv_heads * model.resolved_head_dim
        normed = {"none": (), "head": (model.resolved_head_dim,) * 2, "full": (width, kv_width)}[part.qk_norm]
        others = sum(_norm(norm, size) for size in normed)
        others += (width + 2 * kv_width if part.qkv_bias else 0) + (dim if part.output_bias else 0)
        return _Attention(2 * dim * (width + kv_width), others)
    if type(part) is MLA:
        key, rank = part.qk_nope_head_dim + part.qk_rope_head_dim, part.q_lora_rank
        queries = dim * heads * key if rank is None else rank * (dim + heads * key)
        latent = dim * (part.kv_lora_rank + part.qk_rope_head_dim)
        made = part.kv_lora_rank * heads * (part.qk_nope_head_dim + part.v_head_dim)
        others = _norm(norm, part.kv_lora_rank) + (0 if rank is None else _norm(norm, rank))
        weights = queries + latent + made + heads * part.v_head_dim * dim
        return _Attention(weights, others)
    raise _unknown(part)


def _widths(model: Decoder, part: Component, layers: range) -> Mapping[int | None, int]:
    """Multiply-adds per key of some layers, by window."""
    if isinstance(part, MLA):
        key = part.qk_nope_head_dim + part.qk_rope_head_dim
        return {None: len(layers) * model.heads * (key + part.v_head_dim)}
    assert isinstance(part, GQA)
    widths = Counter[int | None]()
    for layer in layers:
        widths[part.window_at(layer)] += 2 * model.heads * model.resolved_head_dim
    return widths


def _products(matrix: int, widths: Mapping[int | None, int], length: int, causal: bool) -> float:
    return 2.0 * matrix + 2.0 * sum(width * _keys(length, window, causal) for window, width in widths.items())


def _mlp(model: Decoder, part: Component, ffn_dim: int | None = None) -> tuple[int, int]:
    """One layer's weights in matrix products, and its biases; `ffn_dim` is the model's when None."""
    width = model.resolved_ffn_dim if ffn_dim is None else ffn_dim
    if type(part) not in (SwiGLU, GeGLU, GELU, ReLU, ReLU2):
        raise _unknown(part)
    assert isinstance(part, SwiGLU | GeGLU | GELU | ReLU | ReLU2)
    entries = 2 if part.gated else 1
    biases = entries * width + model.dim if part.bias else 0
    return (entries + 1) * model.dim * width, biases


@dataclass(frozen=True)
class _Experts:
    """Weights of one layer of experts that a token uses, and those that it does not."""

    active: int
    idle: int


def _experts(model: Decoder, part: Component) -> _Experts:
    moe = model.moe
    if moe is None:
        return _Experts(0, 0)
    router = moe.resolved_router
    if type(router) not in (SoftmaxTopK, SigmoidTopK, Hash):
        raise _unknown(router)
    matrices, biases = _mlp(model, part, moe.ffn_dim)
    assert not biases
    routing = 0 if type(router) is Hash else moe.experts * model.dim
    return _Experts((moe.top_k + moe.shared) * matrices + routing, (moe.experts - moe.top_k) * matrices)


def _norm(part: Component, width: int) -> int:
    if type(part) is RMSNorm:
        return width
    if type(part) is LayerNorm:
        return 2 * width if part.bias else width
    raise _unknown(part)


def _unknown(part: Component) -> ValueError:
    return ValueError(f"no FLOP formula for {type(part).__name__}")


def _keys(length: int, window: int | None, causal: bool) -> float:
    """Keys that a query meets, on average over a row: min(t, window) at the t-th place of a causal kernel."""
    seen = length if window is None else min(window, length)
    return seen - seen * (seen - 1) / (2 * length) if causal else seen
