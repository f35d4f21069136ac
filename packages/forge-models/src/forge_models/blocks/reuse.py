"""Attention that normalizes its values, takes them from its keys, or attends to those of an earlier layer (Gemma 4, 2026)."""

from typing import Any, ClassVar

from torch import Tensor

from forge_core.specs import ModuleSpec
from forge_models.blocks.attention import Attention
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.layers import unit_rms
from forge_models.blocks.rope import Rotation, rotate
from forge_models.inner_values import tap
from forge_models.shape import BlockContext


class ReusingAttention(Attention):
    """Attention whose values are W_v x, or with `keys_as_values` the projected keys before their norm and rotation. With a
    `v_norm`, its `eps`, each head of v is divided by its root mean square, without a weight.

    A layer that `takes` has no keys and values of its own, and one that `gives` also returns its own, for layers of this kind."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(
        self,
        context: BlockContext,
        *,
        v_norm: float | None,
        keys_as_values: bool,
        takes: str | None = None,
        gives: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(context, **options)
        self.v_norm, self.takes, self.gives = v_norm, takes, gives
        self.reads = ("key_values",) if takes else ()
        if keys_as_values or takes:
            self.v_proj = None  # type: ignore[assignment]
        if takes:
            self.k_proj = self.k_norm = None  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        rotation: Rotation,
        attention_mask: Any,
        cache: LayerCache | None = None,
        key_values: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """(B, T, dim) -> (B, T, dim), and with `gives` rotated k and v, those of the cache included. `attention_mask` is the mask
        that the core prepared for this batch, `key_values` are those of the layer from which this one takes them."""
        q, gate = self._queries(x)
        q = self._turned(self._normed(tap("attention.q_projected", q), self.q_norm), rotation)
        if rotation.query_factor is not None:
            q = (q * rotation.query_factor).to(q.dtype)
        if self.takes is None:
            k, v = self.keys_and_values(x)
            k = self._turned(k, rotation)
            q, k = tap("attention.q", q), tap("attention.k", k)
            k, v = (k, v) if cache is None else cache.update(k, v)
        else:
            assert key_values is not None
            k, v = key_values
            q, k = tap("attention.q", q), k if cache is not None else tap("attention.k", k)
        out = self.o_proj(self.scored(q, k, v, attention_mask, gate))
        return out if self.gives is None else (out, (k, v))

    def _turned(self, x: Tensor, rotation: Rotation) -> Tensor:
        if not self.rotates:
            return x
        norm: Any = self.context.norm
        return unit_rms(rotate(x, rotation), norm.eps) if self.qk_norm == "unit" else rotate(x, rotation)

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, dim) -> k before rotation and v, each (B, kv_heads, T, head_dim)."""
        keys: Any = self.k_proj
        values: Any = self.v_proj
        projected = tap("attention.k_projected", self._heads(keys(x)))
        v = projected if values is None else self._heads(values(x))
        v = v if self.v_norm is None else unit_rms(v, self.v_norm)
        return self._normed(projected, self.k_norm), tap("attention.v", v)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        return {name: spec for name, spec in super().module_specs().items() if not name or getattr(self, name) is not None}
