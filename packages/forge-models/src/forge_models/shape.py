"""What a decoder is once every default is resolved: the component makes it, modules, outline, FLOPs and HF writers read it.

Plain data one floor below all of them: importing it needs no torch.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from forge_core.component import IDENTITY, Component
from forge_models.context import BlockContext
from forge_models.kernels import ExpertKernel
from forge_models.rope import Rope

NormPlacement = Literal["pre", "post", "sandwich"]

LAYOUT_DEPENDENT = ("micro_batch", "pooled")
"""Losses whose value depends on how rows are assigned to ranks and micro-batches. All others are the same in every layout."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Losses that balance experts and keep logits small, each added to the loss with its weight; see `forge_models.moe.losses`.

    The key names the scope over which loads are counted.
    """

    key_class: ClassVar = IDENTITY

    sequence: Annotated[float, Ge(0)] = 0.0
    """Balance within each row (DeepSeek-V3, 2024, equations 17 to 20)."""
    micro_batch: Annotated[float, Ge(0)] = 0.0
    """Balance within what one rank sees in one forward (Switch, Fedus et al., 2021): depends on layout and micro-batch size.
    1 for each layer when the load is even; transformers' loss is counted otherwise, see `pooled`."""
    global_batch: Annotated[float, Ge(0)] = 0.0
    """Balance over the whole batch of all ranks (Qiu et al., 2025), with the loads of the step before."""
    pooled: Annotated[float, Ge(0)] = 0.0
    """Balance as transformers counts it (its `router_aux_loss_coef`): `top_k` times `micro_batch`, with loads and probabilities
    added up over all layers before they are multiplied, instead of a loss for each layer."""
    z: Annotated[float, Ge(0)] = 0.0
    """Mean square of the router's log partition function (ST-MoE, Zoph et al., 2022)."""

    def any(self) -> bool:
        """Whether there is a loss at all."""
        return any((self.sequence, self.micro_batch, self.global_batch, self.pooled, self.z))


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """The experts of a decoder. The fields are those of `[model.moe]`; `capacity` None means that no slot is dropped."""

    experts: int
    top_k: int
    shared: int
    every: int
    first_dense: int
    ffn_dim: int
    capacity: float | None
    kernel: ExpertKernel
    router: Component
    losses: Losses

    def has(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has experts."""
        return layer >= self.first_dense and (layer + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The fields are those of `[model]`. None means: no cap, no experts. Parts are components, built with a `BlockContext`."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_length: int
    rope: Rope
    tied_embeddings: bool
    soft_cap: float | None
    norm_placement: NormPlacement
    embed_multiplier: float
    residual_multiplier: float
    init_std: float
    attention: Component
    mlp: Component
    norm: Component
    moe: MoEShape | None
    mtp_depth: int
    mtp_weight: float
    mtp_schedule: Component | None

    @property
    def blocks(self) -> int:
        """Number of blocks, those of MTP modules included."""
        return self.layers + self.mtp_depth

    def has_experts(self, layer: int) -> bool:
        """Whether block `layer` has experts in the place of the feed-forward part."""
        return self.moe is not None and self.moe.has(layer)

    def windows(self) -> tuple[int | None, ...]:
        """The attention window of every block; None = it sees all positions."""
        window_at = getattr(self.attention, "window_at", lambda _: None)
        return tuple(window_at(layer) for layer in range(self.blocks))

    def context(self, layer: int) -> BlockContext:
        """What the components of block `layer` are given."""
        return BlockContext(
            dim=self.dim,
            layers=self.layers,
            layer=layer,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn_dim=self.ffn_dim,
            max_length=self.max_length,
            rope=self.rope,
            init_std=self.init_std,
            norm=self.norm,
        )
