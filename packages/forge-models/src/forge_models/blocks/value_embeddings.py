"""Value embeddings: rows of a second table of tokens, which are added to the values of some attention layers.

The form is that of nanochat (Karpathy, 2025; `nanochat/gpt.py` of github.com/karpathy/nanochat), after modded-nanogpt
(github.com/KellerJordan/modded-nanogpt) and the value residual of Zhou et al. (2024). For key-value head h of a token t whose
input of the layer is x, with the table E and gates w_h of the layer,

    v_h <- v_h + scale * sigmoid(w_h . x[:gate_channels]) * E[t]_h
"""

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.blocks.attention import KV_HEADS, Attention
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.layers import look_up, unfilled
from forge_models.blocks.rope import Rotation
from forge_models.inner_values import tap
from forge_models.shape import BlockContext, ValueEmbeddings

TOKENS: tuple[Dim, ...] = ("batch", "sequence")


class ValueEmbedding(nn.Module):
    """Gated rows of the table of one layer. Strategies split table and gates by key-value heads."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: BlockContext, settings: ValueEmbeddings) -> None:
        super().__init__()
        self.head_dim, self.channels, self.scale = context.head_dim, settings.gate_channels, settings.scale
        self.std = context.init_std
        self.weight = unfilled(context.vocab_size, context.kv_heads * context.head_dim)
        self.gate = unfilled(context.kv_heads, settings.gate_channels)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """(B, T) int64 ids and (B, T, dim) -> (B, T, kv_heads * head_dim)."""
        gate = self.scale * F.linear(x[..., : self.channels], self.gate).sigmoid()
        return (look_up(self.weight, tokens).unflatten(-1, (-1, self.head_dim)) * gate.unsqueeze(-1)).flatten(2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs: the table is an embedding, and gates start at zero, so that the factor is scale / 2."""
        return {
            "weight": TensorSpec((None, "kv_heads"), Init("normal", self.std), "embedding"),
            "gate": TensorSpec(("kv_heads", None), Init("zeros"), "matrix"),
        }

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout: ids and the input of the layer are whole, and the output has heads."""
        return {"": ModuleSpec((TOKENS, ("batch", "sequence", None)), (KV_HEADS,))}


class ValueEmbeddedAttention(Attention):
    """Attention whose values are those of `Attention` plus the rows of its tokens; it is called with their ids as well."""

    treats_blocks_alike: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("tokens",)

    def __init__(self, context: BlockContext, settings: ValueEmbeddings, **options: Any) -> None:
        super().__init__(context, **options)
        self.value_embedding = ValueEmbedding(context, settings)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        attention_mask: Any,
        cache: LayerCache | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """(B, T, dim) -> (B, T, dim); `tokens` (B, T) int64 are the ids of the tokens of `x`.

        Raises:
            ValueError: there are no ids.
        """
        if tokens is None:
            raise ValueError("value embeddings need the ids of all tokens; call this part of the model with tokens=")
        q, gate = self._queries(x)
        q = self._normed(tap("attention.q_projected", q), self.q_norm)
        k = self._normed(tap("attention.k_projected", self._heads(self.k_proj(x))), self.k_norm)
        v = tap("attention.v", self._heads(self.v_proj(x) + self.value_embedding(tokens, x)))
        return self.o_proj(self.attend(q, k, v, rotation, attention_mask, cache, gate))
