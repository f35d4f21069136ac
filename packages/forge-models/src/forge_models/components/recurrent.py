"""Recurrent layers and their mixture with attention, chosen in `[model]`: `attention = { name = "hybrid", full_every = 4 }`."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import FREE, IDENTITY, Component, Slot
from forge_core.specs import Matrix
from forge_models.components.attentions import GQA
from forge_models.shape import BlockContext, NormPlacement, RecurrentKernel

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn


@dataclass(frozen=True, kw_only=True)
class RecurrentLayer(Component):
    """Base class of the recurrent layers of this distribution."""

    kernel: Annotated[RecurrentKernel, FREE] = "torch"
    """What computes the states: `torch` on every device, or `fla`, the Triton kernels of flash-linear-attention on CUDA
    (`pip install 'forge-models[fla]'`). Before its first use, a kernel is tested against `torch` on the device. It multiplies in
    TF32 or 16 bits and chooses its tiles by timing them, so a resumed run has other bits. It is not compiled. Plans count the
    memory of `torch`."""

    def window_at(self, layer: int) -> int:
        """Returns 1: a token works with one state, whatever the length."""
        del layer
        return 1

    def rotates_at(self, layer: int) -> bool:
        """Whether layer `layer` has rotary positions: none has."""
        del layer
        return False

    def resolved(self, context: BlockContext) -> "RecurrentLayer":
        """Returns the component with every default of a model resolved."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GDN(RecurrentLayer):
    """Gated DeltaNet (Yang et al., 2024): a state of fixed size per head instead of keys and values of all tokens.

    Time and memory per token do not grow with the length. A document begins with an empty state. It has no rotary positions. The
    chunks are computed in plain torch, or with `kernel = "fla"`.
    """

    key_class: ClassVar = IDENTITY

    key_heads: Annotated[int, Gt(0)] | None = None
    """Number of heads of queries and keys, a divisor of `value_heads`; the model's `heads` when absent."""
    value_heads: Annotated[int, Gt(0)] | None = None
    """Number of heads of values, each with a state; `key_heads` when absent."""
    key_dim: Annotated[int, Gt(0)] | None = None
    """Width of a head of queries and keys; the model's `head_dim` when absent."""
    value_dim: Annotated[int, Gt(0)] | None = None
    """Width of a head of values; `key_dim` when absent."""
    conv_width: Annotated[int, Ge(1)] = 4
    """Number of positions that the causal convolution over queries, keys and values covers, including the current one."""
    negative_eigenvalues: bool = False
    """Whether the step size of the delta rule is in (0, 2) instead of (0, 1) (Grazzi et al., 2024)."""
    norm_eps: Annotated[float, Gt(0)] | None = None
    """`eps` of the norm of each head's output; the model's norm `eps`, or 1e-6, when absent."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[GDN]":
        """Returns examples with and without shared key heads."""
        return (cls(), cls(key_heads=2, value_heads=4, key_dim=6, value_dim=5, negative_eigenvalues=True, norm_eps=1e-5))

    def heads(self, context: BlockContext) -> tuple[int, int, int, int]:
        """Returns key heads, value heads, and their widths."""
        key_heads, key_dim = self.key_heads or context.heads, self.key_dim or context.head_dim
        return key_heads, self.value_heads or key_heads, key_dim, self.value_dim or key_dim

    def resolved(self, context: BlockContext) -> "GDN":
        """Returns the component with every default of a model resolved."""
        key_heads, value_heads, key_dim, value_dim = self.heads(context)
        sizes: dict[str, Any] = {"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim}
        return replace(self, **sizes, norm_eps=self.norm_eps or getattr(context.norm, "eps", 1e-6))

    def check(self, context: BlockContext) -> None:
        """Checks the settings against the sizes of the model.

        Raises:
            ValueError: a setting does not fit the model.
        """
        key_heads, value_heads, *_ = self.heads(context)
        if value_heads % key_heads:
            raise ValueError(f"key_heads {key_heads} must divide value_heads {value_heads}")

    def units(self, context: BlockContext) -> dict[str, int]:
        """Returns the number of indivisible units of each logical dimension that only this layer has."""
        return {"state_heads": self.heads(context)[0]}

    def matrices(self, context: BlockContext) -> dict[str, Matrix]:
        """Returns the linear layers by name."""
        key_heads, value_heads, key_dim, value_dim = self.heads(context)
        rows = {"q_proj": key_heads * key_dim, "k_proj": key_heads * key_dim, "v_proj": value_heads * value_dim}
        rows |= {"z_proj": value_heads * value_dim, "b_proj": value_heads, "a_proj": value_heads}
        made = {name: Matrix((count, context.dim), ("state_heads", "embed")) for name, count in rows.items()}
        return made | {"o_proj": Matrix((context.dim, value_heads * value_dim), ("embed", "state_heads"))}

    def score_width(self, context: BlockContext) -> int:
        """Returns the multiply-adds of one token with the states: a prediction, a write and a read in every head."""
        _, value_heads, key_dim, value_dim = self.heads(context)
        return 3 * value_heads * key_dim * value_dim

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.delta_net import GatedDeltaNet

        key_heads, value_heads, key_dim, value_dim = self.heads(context)
        return GatedDeltaNet(
            context,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_width=self.conv_width,
            negative_eigenvalues=self.negative_eigenvalues,
            norm_eps=self.norm_eps or getattr(context.norm, "eps", 1e-6),
            kernel=self.kernel,
        )


Kind = Literal["recurrent", "full"]


@dataclass(frozen=True, kw_only=True)
class Hybrid(Component):
    """Recurrent layers, and full attention in some layers: by default in every fourth, as in Qwen3-Next and OLMo Hybrid."""

    key_class: ClassVar = IDENTITY

    recurrent: Annotated[Component, Slot("forge.attentions", default="gated_delta_net")] = field(default_factory=GDN)
    """Layer that mixes tokens in all other layers."""
    full: Annotated[Component, Slot("forge.attentions", default="gqa")] = field(default_factory=GQA)
    """Attention of the layers that `full_every` or `kinds` select."""
    full_every: Annotated[int, Gt(0)] | None = None
    """Every n-th layer (the n-th, the 2n-th, ...) has full attention; 4 when `kinds` is absent too."""
    kinds: tuple[Kind, ...] | None = None
    """The kind of every layer, `recurrent` or `full`, one entry for each of `layers`. Modules for multi-token prediction have
    full attention."""
    recurrent_norm_placement: NormPlacement | None = None
    """`norm_placement` of the blocks with a recurrent layer; the model's when absent (OLMo Hybrid: `pre`, and `post` with full
    attention)."""

    def __post_init__(self) -> None:
        if self.full_every is not None and self.kinds is not None:
            raise ValueError("full_every and kinds exclude each other; set one")
        if not getattr(self.full, "causal", True):
            raise ValueError("full.causal = false does not go with recurrent layers, which are causal; set it to true")

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Hybrid]":
        """Returns examples with equal and with different placements of norms."""
        other = cls(full_every=2, full=GQA(qk_norm="head"), recurrent=GDN(conv_width=2), recurrent_norm_placement="sandwich")
        return (cls(full_every=2), other)

    def is_full(self, layer: int) -> bool:
        """Whether layer `layer` has full attention."""
        if self.kinds is not None:
            return layer >= len(self.kinds) or self.kinds[layer] == "full"
        return (layer + 1) % (self.full_every or 4) == 0

    def at(self, layer: int) -> Any:
        """Returns the component of layer `layer`."""
        return self.full if self.is_full(layer) else self.recurrent

    def check(self, context: BlockContext) -> None:
        """Checks the settings against the sizes of the model.

        Raises:
            ValueError: a setting does not fit the model.
        """
        if self.kinds is not None and len(self.kinds) != context.layers:
            raise ValueError(f"kinds has {len(self.kinds)} entries, but the model has {context.layers} layers; give one for each")
        kinds = {self.is_full(layer) for layer in range(context.layers)}
        if kinds == {True}:
            key = "kinds" if self.kinds is not None else f"full_every {self.full_every}"
            raise ValueError(f"{key} gives every layer full attention; choose attention {type(self.full).__name__} itself")
        tables: Any = getattr(self.full, "value_embeddings", None)
        if wrong := [layer for layer in (() if tables is None else tables.layers) if not self.is_full(layer)]:
            raise ValueError(f"full.value_embeddings.layers {wrong} are recurrent and have no values; leave them out")
        if getattr(self.full, "shared_kv_layers", 0):
            raise ValueError("full.shared_kv_layers does not go with recurrent layers, which have no keys to share; set it to 0")
        for part in (self.recurrent, self.full):
            check: Any = getattr(part, "check", None)
            if check is not None:
                check(context)

    def units(self, context: BlockContext) -> dict[str, int]:
        """Returns the units of both kinds of layers."""
        units: list[Any] = [getattr(part, "units", None) for part in (self.full, self.recurrent)]
        return {name: count for each in units if each is not None for name, count in each(context).items()}

    def norm_placement_at(self, layer: int) -> NormPlacement | None:
        """Returns the placement of norms in block `layer`; None = that of the model."""
        return None if self.is_full(layer) else self.recurrent_norm_placement

    def window_at(self, layer: int) -> int | None:
        """Returns the window of layer `layer`; None if the layer sees all positions."""
        window_at: Any = getattr(self.at(layer), "window_at", None)
        return None if window_at is None else window_at(layer)

    def rotates_at(self, layer: int) -> bool:
        """Whether layer `layer` has rotary positions."""
        rotates_at: Any = getattr(self.at(layer), "rotates_at", None)
        return rotates_at is None or rotates_at(layer)

    @property
    def whole_rows(self) -> tuple[str, ...]:
        """Reasons why ranks must not share rows."""
        return getattr(self.full, "whole_rows", ())

    @property
    def core(self) -> Any:
        """Kernel of the full attention."""
        return getattr(self.full, "core", None)

    @property
    def soft_cap(self) -> float | None:
        """Soft cap of the full attention's scores."""
        return getattr(self.full, "soft_cap", None)

    def matrices(self, context: BlockContext) -> dict[str, Matrix]:
        """Returns the linear layers of the context's layer by name."""
        return self.at(context.layer).matrices(context)

    def score_width(self, context: BlockContext) -> int:
        """Returns the multiply-adds of one query with one key and its value, or of one token with the states."""
        return self.at(context.layer).score_width(context)

    def build(self, context: BlockContext) -> "nn.Module":
        return self.at(context.layer).build(context)
