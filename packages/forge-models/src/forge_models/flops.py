"""Parameter and FLOP counts of a decoder: weights from the module on the meta device, products from what its parts declare.

Convention: a multiply-add is 2 FLOPs; a backward costs twice its forward; only matrix products count (norms, activations,
rotation, softmax and the embedding's look-up do not). So per token

    train = 6 * P + 6 * sum over layers of heads * (width of a key + width of a value) * T'

with P the weights that take part in matrix products for one token (the head always, the embedding's table never, a tied
table once, as head; biases never; of experts the `top_k` that a token goes to, the shared ones and the router) and T' the
keys that a query meets: T, or the window if that is less, for the full square that most tables count ("PaLM" convention,
Chowdhery et al., 2022); what a causal kernel needs is (T + 1) / 2 without a window.
Recomputation is not counted, nor is what capacity saves where it drops slots. MTP modules count in training
only: each has a projection of two widths to one and a block, and runs the head once more. They too are counted for every token,
though the last k of a row have no input for module k.

Parts declare their products: attentions, MLPs and routers by `matrices(context)`, attentions also by `score_width(context)`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from forge_core.batch import Batch
from forge_models.outline import matrices
from forge_models.shape import DecoderShape, RouterContext

CONVENTION = "6 P + 6 L H (Dk + Dv) T' per token, embedding look-up excluded, head included"
"""To be printed with every figure; with Dk = Dv = D the second term is the familiar 12 L H D T'."""


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

    def beyond(self, batches: Sequence[Batch], frozen: Collection[str] = ()) -> float:
        """Forward and backward FLOPs of these batches that do not go by tokens, such as those of images; `frozen` are names of
        parameters that are not trained."""
        del batches, frozen
        return 0.0

    @property
    def note(self) -> str:
        """What `beyond` counts, for people; empty where it counts nothing."""
        return ""

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
        return _products(self.matrix, self.widths, lambda window: _keys(length, window, causal))

    def training(self, length: int, causal: bool = False) -> float:
        """Forward and backward FLOPs per token of rows of `length` tokens."""
        return self.training_with(lambda window: _keys(length, window, causal))

    def training_with(self, keys: Callable[[int | None], float]) -> float:
        """The same where a query of a layer meets `keys(window)` keys on average, as in rows of several documents."""
        own, mtp = _products(self.matrix, self.widths, keys), _products(self.mtp_matrix, self.mtp_widths, keys)
        return 3 * (own + mtp)


def counts_of(model: Any) -> Counts | None:
    """Counts of a model's component; None of one, or with a part, that does not declare its products."""
    shape: DecoderShape | None = getattr(model, "shape", None)
    own: Callable[[], Counts] | None = getattr(model, "counts", None)
    try:
        if own is not None:
            return own()
        return None if shape is None else count(shape)
    except ValueError:  # a plugin's part
        return None


def count(shape: DecoderShape) -> Counts:
    """Counts of the decoder of a shape.

    Raises:
        ValueError: a part does not declare its matrix products.
    """
    sizes, idle = _sizes(shape)
    products = _matrix_products(shape)
    table = shape.vocab_size * shape.dim
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
    )


def _sizes(shape: DecoderShape) -> tuple[Counter[str], int]:
    """Weights by part of the model, and those of experts that a token does not go to."""
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
    """The field of `Counts` that a parameter belongs to."""
    first, *rest = name.split(".")
    if first == "blocks" and rest[1] in ("attention", "mlp"):
        return rest[1]
    return {"embed": "embedding", "head": "head", "mtp": "mtp"}.get(first, "norms")


def _matrix_products(shape: DecoderShape) -> Counter[str]:
    """Weights in the matrix products of one token: of the blocks, and of MTP modules; without the head."""
    _require(shape.attention, "matrices", "score_width")
    _require(shape.mlp, "matrices")
    found, experts = matrices(shape)
    products = Counter[str]()
    for path, matrix in found.items():
        products[path.partition(".")[0]] += prod(matrix.shape)
    if shape.moe is not None:
        for path, matrix in experts.items():
            products[path.partition(".")[0]] += shape.moe.top_k * prod(matrix.shape)
        router: Any = shape.moe.router
        _require(router, "matrices")
        for layer in filter(shape.has_experts, range(shape.blocks)):
            linear = router.matrices(RouterContext.of(shape.context(layer), shape.moe.experts, shape.moe.top_k))
            products["blocks" if layer < shape.layers else "mtp"] += sum(prod(matrix.shape) for matrix in linear.values())
    return products


def _require(part: Any, *methods: str) -> None:
    if missing := [name for name in methods if not hasattr(part, name)]:
        raise ValueError(f"{type(part).__name__} does not declare its FLOPs; define {' and '.join(missing)}(context)")


def _widths(shape: DecoderShape, layers: Iterable[int]) -> Mapping[int | None, int]:
    """Multiply-adds per key of some layers, by window."""
    attention: Any = shape.attention
    windows, widths = shape.windows(), Counter[int | None]()
    for layer in layers:
        widths[windows[layer]] += attention.score_width(shape.context(layer))
    return widths


def _products(matrix: int, widths: Mapping[int | None, int], keys: Callable[[int | None], float]) -> float:
    return 2.0 * matrix + 2.0 * sum(width * keys(window) for window, width in widths.items())


def _keys(length: int, window: int | None, causal: bool) -> float:
    """Keys that a query meets, on average over a row: min(t, window) at the t-th place of a causal kernel."""
    seen = length if window is None else min(window, length)
    return seen - seen * (seen - 1) / (2 * length) if causal else seen
