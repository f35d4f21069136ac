"""Parameter and FLOP counts of a decoder, from its description alone: importing and calling this needs no torch.

Convention: a multiply-add is 2 FLOPs; a backward costs twice its forward; only matrix products count (norms, activations,
rotation, softmax and the embedding's look-up do not). So per token

    train = 6 * P + 12 * layers * heads * head_dim * T'

with P the weights that take part in matrix products (the head always, the embedding's table never, a tied table once,
as head) and T' the keys that a query meets: T for the full square that most tables count ("PaLM" convention, Chowdhery
et al., 2022), (T + 1) / 2 for what a causal kernel needs. Recomputation is not counted.
"""

from dataclasses import dataclass

from forge_models.components.blocks import GQA, RMSNorm, SwiGLU
from forge_models.components.decoder import Decoder

CONVENTION = "6 P + 12 L H D T' per token, embedding look-up excluded, head included"
"""To be printed beside every figure."""


@dataclass(frozen=True)
class Counts:
    """Counts of one decoder.

    Attributes:
        embedding: weights of the token table (also the head's when tied).
        attention: weights of all attention projections and their norms.
        mlp: weights of all feed-forward parts.
        norms: weights of the blocks' norms and of the last norm.
        head: weights of the output projection; 0 when tied.
        matrix: weights that take part in matrix products, the head's included even when tied.
        width: layers * heads * head_dim, what one key costs a query in all layers.
    """

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int
    matrix: int
    width: int

    @property
    def parameters(self) -> int:
        """All weights, a tied table once."""
        return self.embedding + self.attention + self.mlp + self.norms + self.head

    def forward(self, length: int, causal: bool = False) -> float:
        """Forward FLOPs per token of rows of `length` tokens; see the module for `causal`."""
        keys = (length + 1) / 2 if causal else length
        return 2.0 * self.matrix + 4.0 * self.width * keys

    def training(self, length: int, causal: bool = False) -> float:
        """Forward and backward FLOPs per token of rows of `length` tokens."""
        return 3 * self.forward(length, causal)


def count(model: Decoder) -> Counts:
    """Counts of `model`.

    Raises:
        ValueError: when it has parts whose counts are not known here.
    """
    attention, mlp, norm = model.resolved_attention, model.resolved_mlp, model.resolved_norm
    unknown = [
        type(part).__name__ for part, known in ((attention, GQA), (mlp, SwiGLU), (norm, RMSNorm)) if type(part) is not known
    ]
    if unknown:
        raise ValueError(f"no FLOP formula for {', '.join(unknown)}")
    heads, kv_heads, head_dim = model.heads, model.resolved_kv_heads, model.resolved_head_dim
    projections = model.layers * 2 * model.dim * (heads + kv_heads) * head_dim
    qk_norms = model.layers * 2 * head_dim if isinstance(attention, GQA) and attention.qk_norm else 0
    feed_forward = model.layers * 3 * model.dim * model.resolved_ffn_dim
    table = model.vocab_size * model.dim
    return Counts(
        embedding=table,
        attention=projections + qk_norms,
        mlp=feed_forward,
        norms=(2 * model.layers + 1) * model.dim,
        head=0 if model.tied_embeddings else table,
        matrix=projections + feed_forward + table,
        width=model.layers * heads * head_dim,
    )
