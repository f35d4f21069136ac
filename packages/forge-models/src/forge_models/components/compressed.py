"""Attention to compressed keys, chosen in `[model]`: `attention = { name = "compressed_mqa", window = 128 }`."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import IDENTITY, Component
from forge_core.specs import Matrix
from forge_models.shape import BlockContext, CompressedKeys

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn

CompressionKind = Literal["window", "sparse", "heavy"]


@dataclass(frozen=True, kw_only=True)
class CompressedMQA(Component):
    """Attention to a window of tokens, and by layer to compressed keys of all earlier ones (DeepSeek-V4, 2026).

    All heads share one key for each token, which is also its value. A `heavy` layer also sees a compressed key for each
    `heavy_rate` tokens. A `sparse` layer has one for each `sparse_rate` tokens, made of twice as many, of which an indexer picks
    `top_k` for each query; the indexer learns as that of `indexed_mla` does. What is seen is a mask, so a forward computes more
    products than it needs. The model's `kv_heads` is not used. `rope.partial` is the rotated share of each head, and
    `rope.local_theta` the base of `window` layers.
    """

    key_class: ClassVar = IDENTITY
    feature: ClassVar[str] = "compressed_keys"
    """Name of what tests must prove in each layout."""
    whole_rows: ClassVar[tuple[str, ...]] = ("model.attention, which compresses windows of a whole row",)
    """Reasons why ranks must not share rows."""

    kinds: tuple[CompressionKind, ...] | None = None
    """What each layer sees, one entry for each of `layers`: `window`, `sparse` or `heavy`. When absent, the first two layers are
    heavy, then heavy and sparse layers alternate (DeepSeek-V4-Pro). Modules for multi-token prediction have a window."""
    window: Annotated[int, Gt(0)] = 128
    """Number of positions that a position of every layer attends to, including itself."""
    q_lora_rank: Annotated[int, Gt(0)] = 1024
    """Width of the latent from which queries, also those of the indexer, are computed."""
    o_groups: Annotated[int, Gt(0)] = 8
    """Number of groups of heads, a divisor of `heads`, that share a matrix of the output projection."""
    o_lora_rank: Annotated[int, Gt(0)] = 1024
    """Number of outputs of the matrix of each group, which a last matrix projects to the residual stream."""
    sparse_rate: Annotated[int, Ge(2)] = 4
    """Number of tokens for each compressed key of a sparse layer."""
    heavy_rate: Annotated[int, Ge(2)] = 128
    """Number of tokens for each compressed key of a heavy layer."""
    index_heads: Annotated[int, Gt(0)] = 64
    """Number of heads of the indexer."""
    index_dim: Annotated[int, Gt(0)] = 128
    """Width of a head of the indexer, of which as many dimensions are rotated as of the model's heads."""
    top_k: Annotated[int, Gt(0)] = 512
    """Number of compressed keys that the indexer chooses for a query; at most the model's `max_length` / `sparse_rate`, which
    chooses all."""
    kl_weight: Annotated[float, Gt(0)] = 1.0
    """Weight of the indexer's loss: the mean over tokens of the divergence of its scores from the attention to the chosen keys,
    in nats, summed over layers."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[CompressedMQA]":
        """Returns small examples of all kinds of layers."""
        sizes: dict[str, Any] = {
            "window": 3,
            "q_lora_rank": 7,
            "o_groups": 2,
            "o_lora_rank": 6,
            "sparse_rate": 2,
            "heavy_rate": 3,
        }
        small = cls(**sizes, index_heads=3, index_dim=6, top_k=2)
        return (small, replace(small, kinds=("sparse", "window")), replace(small, kinds=("window", "sparse"), kl_weight=0.5))

    def kind_at(self, layer: int, layers: int) -> CompressionKind:
        """Returns what layer `layer` of a model with `layers` layers sees."""
        if layer >= layers:
            return "window"
        if self.kinds is not None:
            return self.kinds[layer]
        return "sparse" if layer > 1 and layer % 2 else "heavy"

    def check(self, context: BlockContext) -> None:
        """Checks the settings against the sizes of the model.

        Raises:
            ValueError: a setting does not fit the model.
        """
        layers = context.layers
        if self.kinds is not None and len(self.kinds) != layers:
            raise ValueError(f"kinds has {len(self.kinds)} entries, but the model has {layers} layers; give one for each")
        if context.kv_heads != context.heads:
            raise ValueError(f"compressed_mqa has one key for all heads; remove kv_heads {context.kv_heads}")
        if context.heads % self.o_groups:
            raise ValueError(f"o_groups {self.o_groups} must divide heads {context.heads}")
        if not hasattr(context.norm, "eps"):
            raise ValueError(f"compressed_mqa needs a norm with eps, and {type(context.norm).__name__} has no eps; use 'rmsnorm'")
        if context.rope.scaling == "dynamic":
            raise ValueError("compressed_mqa does not support rope.scaling = 'dynamic', which would turn compressed keys anew")
        kinds = {self.kind_at(layer, layers) for layer in range(layers)}
        turning = int(context.head_dim * context.rope.partial)
        if turning % 2 or not turning:
            raise ValueError(f"{turning} of head_dim {context.head_dim} dimensions rotate; the number must be even and positive")
        if context.rope.local_theta is not None and "window" not in kinds:
            raise ValueError(
                "rope.local_theta needs layers that see a window only; remove it, or add 'window' to attention.kinds"
            )
        if "sparse" not in kinds:
            return
        if self.index_dim < turning:
            raise ValueError(f"index_dim {self.index_dim} must be at least {turning}, the number of dimensions that rotate")
        if self.top_k > context.max_length // self.sparse_rate:
            raise ValueError(
                f"top_k {self.top_k} exceeds max_length {context.max_length} / sparse_rate {self.sparse_rate}, so a query would "
                "never have a choice; lower top_k"
            )

    def window_at(self, layer: int) -> int | None:
        """Returns the window of layer `layer`; None if it also sees compressed keys."""
        return self.window if self.kinds is not None and self.kind_at(layer, len(self.kinds)) == "window" else None

    def units(self, context: BlockContext) -> dict[str, int]:
        """Returns the number of indivisible units of each logical dimension that only this layer has."""
        return {"output_groups": self.o_groups}

    def matrices(self, context: BlockContext) -> dict[str, Matrix]:
        """Returns the linear layers by name. The matrices of groups of heads are none, and cannot have adapters."""
        dim, heads = context.dim, context.heads * context.head_dim
        made = {
            "q_a_proj": Matrix((self.q_lora_rank, dim), (None, "embed")),
            "q_b_proj": Matrix((heads, self.q_lora_rank), ("heads", None)),
            "kv_proj": Matrix((context.head_dim, dim), (None, "embed")),
            "o_b_proj": Matrix((dim, self.o_groups * self.o_lora_rank), ("embed", "heads")),
        }
        kind = self.kind_at(context.layer, context.layers)
        if kind == "window":
            return made
        made |= _of_compressor("compressor", dim, context.head_dim * (2 if kind == "sparse" else 1))
        if kind == "sparse":
            made |= _of_compressor("indexer.compressor", dim, 2 * self.index_dim)
            made["indexer.q_proj"] = Matrix((self.index_heads * self.index_dim, self.q_lora_rank), (None, None))
            made["indexer.weights_proj"] = Matrix((self.index_heads, dim), (None, "embed"))
        return made

    def other_products(self, context: BlockContext) -> int:
        """Returns the multiply-adds of one token with weights that are no linear layers: those of groups of heads."""
        return self.o_lora_rank * context.heads * context.head_dim

    def score_width(self, context: BlockContext) -> int:
        """Returns the multiply-adds of one query with one key and its value, summed over all heads."""
        return 2 * context.heads * context.head_dim

    def score_widths(self, context: BlockContext) -> dict[int | CompressedKeys | None, int]:
        """Returns the multiply-adds of one query with one key by the number of keys: those of the window, and compressed ones."""
        width, kind = self.score_width(context), self.kind_at(context.layer, context.layers)
        found: dict[int | CompressedKeys | None, int] = {self.window: width}
        if kind == "heavy":
            found[CompressedKeys(self.heavy_rate)] = width
        if kind == "sparse":
            found[CompressedKeys(self.sparse_rate, self.top_k)] = width
            found[CompressedKeys(self.sparse_rate)] = self.index_heads * self.index_dim
        return found

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.compressed_attention import CompressedAttention, SparseCompressedAttention, WindowAttention

        sizes: dict[str, Any] = {
            "window": self.window,
            "q_lora_rank": self.q_lora_rank,
            "o_groups": self.o_groups,
            "o_lora_rank": self.o_lora_rank,
        }
        kind = self.kind_at(context.layer, context.layers)
        if kind == "window":
            return WindowAttention(context, **sizes)
        if kind == "heavy":
            return CompressedAttention(context, rate=self.heavy_rate, **sizes)
        return SparseCompressedAttention(
            context,
            rate=self.sparse_rate,
            index_heads=self.index_heads,
            index_dim=self.index_dim,
            top_k=self.top_k,
            kl_weight=self.kl_weight,
            **sizes,
        )


def _of_compressor(path: str, dim: int, outputs: int) -> dict[str, Matrix]:
    return {f"{path}.{name}": Matrix((outputs, dim), (None, "embed")) for name in ("kv_proj", "gate_proj")}
