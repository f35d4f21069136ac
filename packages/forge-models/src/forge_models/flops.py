"""Parameter and FLOP counts of a decoder: weights from the module on the meta device, products as declared by its parts.

Convention: a multiply-add is 2 FLOPs; a backward costs twice its forward; only matrix products count (norms, activations,
rotation, softmax and embedding look-ups do not). The FLOPs per token are

    train = 6 * P + 6 * sum over layers of heads * (width of a key + width of a value) * T'

with P the number of weights in matrix products for one token (always with the head, never with the embedding table; a tied table
counts once, as head; no biases; of experts, the `top_k` that a token is sent to, the shared ones and the router) and T' the
number of keys per query. T' is T, or the window, the chunk or the number of chosen keys if that is smaller, for the full square
that most tables count ("PaLM" convention, Chowdhery et al., 2022); a causal kernel without a window needs (T + 1) / 2, and a
bidirectional one T. An indexer scores all T keys for the chosen ones. Of compressed keys there is one for every `rate` tokens.
Recomputation is not counted, and slots dropped because of capacity are not subtracted. MTP modules count in training only: each
has a projection of two widths to one and a block, and runs the head once more. They are counted for every token, although the
last k tokens of a row have no input for module k.

Several residual streams (n of width D) have products of weights, which are in P, and products of each token's own numbers: a part
of a block reads with n D multiply-adds and mixes with n^2 D, and the sum of the streams before the head has n D.

Of an adapter and its frozen base, the base has no gradients of its weights: 4 instead of 6 FLOPs per weight and token, and the
adapter's own weights have 6. The products of B A in DoRA, once for each forward, are not counted.

Parts declare their products: attentions, MLPs and routers in `matrices(context)`, attentions also in `score_width(context)`, and
those with weights that are no linear layers in `other_products(context)`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from forge_core.batch import Batch
from forge_models.shape import AttentionChunk, CompressedKeys, DecoderShape, RouterContext

Keys = int | CompressedKeys | None
"""Number of keys of a query: a window, a chunk, a number of chosen or of compressed keys; None = all."""

CONVENTION = "6 P + 6 L H (Dk + Dv) T' per token, embedding look-up excluded, head included"
"""Formula to print with every figure; with Dk = Dv = D the second term is the familiar 12 L H D T'."""


@dataclass(frozen=True)
class Counts:
    """Counts of one decoder.

    Attributes:
        embedding: weights of the token table (also the head's when tied), of learned positions, of tables of values, and of what
            makes the inputs of layers.
        attention: weights of all attention projections and their norms.
        mlp: weights of all feed-forward layers, including all experts and routers, and of what lets inputs of layers in.
        norms: weights of the norms of blocks and of the final norm, and of what mixes residual streams.
        head: weights of the output projection; 0 when tied.
        matrix: weights in matrix products for one token, including the head even if tied.
        idle: weights of experts that a token is not sent to; 0 in a dense model.
        mtp: weights of the MTP modules; of the fields above, only `idle` includes them.
        mtp_matrix: `matrix` of the MTP modules, including the head once for each module.
        mtp_widths: `widths` of the blocks of MTP modules.
        lora: weights of the adapters of a frozen base.
        lora_matrix: weights of adapters in matrix products for one token.
        tuned_matrix: of `matrix`, those that are trained beside adapters.
        mixing: multiply-adds for one token between residual streams and numbers that are computed from them; 0 with one stream.
        widths: by window (None = global), heads * (width of a key + width of a value), summed over the layers with this window:
            the multiply-adds of one query with one key.
        causal: whether a token sees only earlier tokens.
    """

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int
    matrix: int
    idle: int
    widths: Mapping[Keys, int]
    mtp: int = 0
    mtp_matrix: int = 0
    mtp_widths: Mapping[Keys, int] = field(default_factory=dict)
    lora: int = 0
    lora_matrix: int = 0
    tuned_matrix: int = 0
    mixing: int = 0
    causal: bool = True

    def beyond(self, batches: Sequence[Batch], frozen: Collection[str] = ()) -> float:
        """Returns forward and backward FLOPs of these batches that are not counted per token, such as those of images. `frozen`
        are the names of parameters that are not trained."""
        del batches, frozen
        return 0.0

    @property
    def note(self) -> str:
        """Description of what `beyond` counts; empty if it counts nothing."""
        return ""

    @property
    def parameters(self) -> int:
        """Number of all weights; a tied table counts once."""
        return self.embedding + self.attention + self.mlp + self.norms + self.head + self.mtp + self.lora

    @property
    def active(self) -> int:
        """Number of weights that one token uses; all weights of a dense model."""
        return self.parameters - self.idle

    def forward(self, length: int, causal: bool = False) -> float:
        """Returns forward FLOPs per token in rows of `length` tokens, without MTP. If `causal`, counts the keys of a causal
        kernel, see the module docstring."""
        matrix = self.matrix + self.mixing + self.lora_matrix
        return _products(matrix, self.widths, lambda window: _keys(length, window, causal and self.causal))

    def training(self, length: int, causal: bool = False) -> float:
        """Returns forward and backward FLOPs per token in rows of `length` tokens."""
        return self.training_with(lambda window: _keys(length, window, causal and self.causal))

    def training_with(self, keys: Callable[[Keys], float]) -> float:
        """Returns forward and backward FLOPs per token if a query has `keys(window)` keys on average, as in packed rows."""
        own, mtp = _products(self.matrix, self.widths, keys), _products(self.mtp_matrix, self.mtp_widths, keys)
        if self.lora:
            own -= _products(self.matrix - self.tuned_matrix, {}, keys) / 3  # no gradient of the base's weights
        return 3 * (own + mtp + _products(self.mixing + self.lora_matrix, {}, keys))


def counts_of(model: Any) -> Counts | None:
    """Returns the counts of a model component; None if it or one of its parts does not declare its products."""
    shape: DecoderShape | None = getattr(model, "shape", None)
    own: Callable[[], Counts] | None = getattr(model, "counts", None)
    try:
        if own is not None:
            return own()
        if shape is None:
            return None
        lora = getattr(model, "lora", None)
        return count_flops(shape) if lora is None else replace(count_flops(shape), **_adapters(shape, lora))
    except ValueError:  # a part of a plugin
        return None


def count_flops(shape: DecoderShape) -> Counts:
    """Returns the counts of the decoder with a shape.

    Raises:
        ValueError: a part does not declare its matrix products.
    """
    sizes, idle = _sizes(shape)
    products = _matrix_products(shape)
    connections = sum(map(shape.connections, range(shape.layers)))
    streams = 0 if shape.streams is None else shape.streams.count
    products["blocks"] += (connections * (streams + 2) + bool(streams)) * streams**2 * shape.dim
    table = (shape.labels or shape.vocab_size) * shape.dim
    return Counts(
        embedding=sizes["embedding"],
        attention=sizes["attention"],
        mlp=sizes["mlp"],
        norms=sizes["norms"],
        head=sizes["head"],
        matrix=products["blocks"] + table,
        idle=idle,
        widths=_widths(shape, range(shape.layers)),
        mtp=sizes["mtp"],
        mtp_matrix=products["mtp"] + shape.mtp_depth * table,
        mtp_widths=_widths(shape, range(shape.layers, shape.blocks)),
        mixing=(connections * (streams + 1) + bool(streams)) * streams * shape.dim,
        causal=shape.causal,
    )


def _adapters(shape: DecoderShape, lora: Any) -> dict[str, int]:
    """Returns the fields of `Counts` for the adapters of `lora` (`forge_models.components.lora.LoRAConfig`)."""
    hidden, experts = shape.matrices()
    whole = for_token = 0
    for name in lora.matched([*hidden, *experts]):
        outputs, inputs = (experts[name] if name in experts else hidden[name]).shape
        each = lora.rank * (outputs + inputs)
        stacked, chosen = (shape.moe.experts, shape.moe.top_k) if shape.moe is not None and name in experts else (1, 1)
        whole += stacked * each + (outputs if lora.dora else 0)
        for_token += chosen * each
    head = shape.vocab_size * shape.dim if "head" in lora.train else 0
    return {"lora": whole, "lora_matrix": for_token, "tuned_matrix": head}


def _sizes(shape: DecoderShape) -> tuple[Counter[str], int]:
    """Returns the number of weights by part of the model, and of experts that a token is not sent to."""
    import torch

    from forge_models.decoder import Decoder

    with torch.device("meta"):
        module = Decoder(shape)
    sizes, idle = Counter[str](), 0
    for name, parameter in module.named_parameters():
        sizes[_part(name)] += parameter.numel()
        if shape.moe is not None and ".mlp.experts." in name:
            idle += parameter.numel() // shape.moe.experts * (shape.moe.experts - shape.moe.top_k)
    return sizes, idle


def _part(name: str) -> str:
    """Returns the field of `Counts` that a parameter belongs to."""
    first, *rest = name.split(".")
    if name.endswith(".value_embedding.weight"):
        return "embedding"
    if first == "blocks" and rest[1] in ("attention", "mlp"):
        return rest[1]
    if first == "blocks" and rest[1] == "layer_input":
        return "mlp"
    return {"embed": "embedding", "positions": "embedding", "layer_inputs": "embedding", "head": "head", "mtp": "mtp"}.get(
        first, "norms"
    )


def _matrix_products(shape: DecoderShape) -> Counter[str]:
    """Returns the weights in matrix products for one token, of `blocks` and of `mtp` modules, without the head."""
    _require(shape.attention, "matrices", "score_width")
    _require(shape.mlp, "matrices")
    found, experts = shape.matrices()
    products = Counter[str]()
    for path, matrix in found.items():
        products["mtp" if path.startswith("mtp.") else "blocks"] += prod(matrix.shape)
    at: Any = getattr(shape.attention, "at", lambda _: shape.attention)
    for layer in range(shape.blocks):
        others: Any = getattr(at(layer), "other_products", lambda _: 0)
        products["blocks" if layer < shape.layers else "mtp"] += others(shape.context(layer))
    for settings in filter(None, map(shape.value_embeddings, range(shape.layers))):
        products["blocks"] += shape.kv_heads * settings.gate_channels
    if shape.moe is not None:
        for path, matrix in experts.items():
            products[path.partition(".")[0]] += shape.moe.top_k * prod(matrix.shape)
        router: Any = shape.moe.router
        _require(router, "matrices")
        for layer in filter(shape.has_experts, range(shape.blocks)):
            linear = router.matrices(RouterContext.of(shape.context(layer), shape.moe.experts, shape.moe.top_k))
            gate = shape.dim if shape.moe.shared_gate else 0
            products["blocks" if layer < shape.layers else "mtp"] += gate + sum(prod(matrix.shape) for matrix in linear.values())
    return products


def _require(part: Any, *methods: str) -> None:
    if missing := [name for name in methods if not hasattr(part, name)]:
        raise ValueError(f"{type(part).__name__} does not declare its FLOPs; define {' and '.join(missing)}(context)")


def _widths(shape: DecoderShape, layers: Iterable[int]) -> Mapping[Keys, int]:
    """Returns the multiply-adds per key of some layers, by window."""
    widths = Counter[Keys]()
    for layer in layers:
        widths.update(shape.score_widths(layer))
    return widths


def _products(matrix: int, widths: Mapping[Keys, int], keys: Callable[[Keys], float]) -> float:
    return 2.0 * matrix + 2.0 * sum(width * keys(window) for window, width in widths.items())


def _keys(length: int, window: Keys, causal: bool) -> float:
    """Returns the average number of keys per query in a row; position t of a causal kernel has min(t, window) keys, and in a
    chunk those of the chunk."""
    if isinstance(window, CompressedKeys):
        return window.mean(length) if causal else window.of(length)
    seen = length if window is None else min(window, length)
    if causal and isinstance(window, AttentionChunk):
        full, rest = divmod(length, window)
        return (full * window * (window + 1) + rest * (rest + 1)) / (2 * length)
    return seen - seen * (seen - 1) / (2 * length) if causal else seen
