"""Attention that normalizes its values, or takes them from its keys (Gemma 4, 2026)."""

from typing import Any

from torch import Tensor

from forge_core.specs import ModuleSpec
from forge_models.blocks.attention import Attention
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.layers import unit_rms
from forge_models.blocks.rope import Rotation
from forge_models.inner_values import tap
from forge_models.shape import BlockContext


class ReusingAttention(Attention):
    """Attention whose values are W_v x, or with `keys_as_values` the projected keys before their norm and rotation. With a
    `v_norm`, its `eps`, each head of v is divided by its root mean square, without a weight."""

    def __init__(self, context: BlockContext, *, v_norm: float | None, keys_as_values: bool, **options: Any) -> None:
        super().__init__(context, **options)
        self.v_norm = v_norm
        if keys_as_values:
            self.v_proj = None  # type: ignore[assignment]

    def forward(self, x: Tensor, rotation: Rotation, attention_mask: Any, cache: LayerCache | None = None) -> Tensor:
        """(B, T, dim) -> (B, T, dim). `attention_mask` is the mask that the core prepared for this batch."""
        q, gate = self._queries(x)
        q = self._normed(tap("attention.q_projected", q), self.q_norm)
        k, v = self.keys_and_values(x)
        return self.o_proj(self.attend(q, k, v, rotation, attention_mask, cache, gate))

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, dim) -> k before rotation and v, each (B, kv_heads, T, head_dim)."""
        projected = tap("attention.k_projected", self._heads(self.k_proj(x)))
        v = projected if self.v_proj is None else self._heads(self.v_proj(x))
        v = v if self.v_norm is None else unit_rms(v, self.v_norm)
        return self._normed(projected, self.k_norm), tap("attention.v", v)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        return {name: spec for name, spec in super().module_specs().items() if not name or getattr(self, name) is not None}
