"""Attention of a block, chosen in `[model]`: `attention = { name = "gqa", qk_norm = "head" }`."""

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import FREE, IDENTITY, Component
from forge_core.features import Feature
from forge_core.specs import Matrix
from forge_models.shape import AttentionChunk, AttentionKernel, BlockContext, ValueEmbeddings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn


@dataclass(frozen=True, kw_only=True)
class GQA(Component):
    """Attention with rotary positions and grouped key-value heads (Ainslie et al., 2023).

    The model's `kv_heads` sets the number of key-value heads: `heads` is multi-head attention, 1 is multi-query attention. With a
    `window`, every layer is local except those that `global_every` or `global_layers` select.
    """

    key_class: ClassVar = IDENTITY

    causal: bool = True
    """Whether a token sees only earlier tokens; without it, a token sees its whole document, which needs an objective such as
    `masked_lm`. Such a model cannot generate text token by token."""
    qkv_bias: bool = False
    """Whether the projections to q, k and v have biases."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    qk_norm: Literal["none", "head", "full", "unit"] = "none"
    """Normalizes q and k with the model's norm before the rotation: each head, or the full projection. `unit` divides each head
    after the rotation by its root mean square, with the `eps` of the model's norm and without weights, in layers with rotary
    positions (Llama 4)."""
    scale: Annotated[float, Gt(0)] | None = None
    """Multiplies the scores; 1 / sqrt(head_dim) when absent."""
    soft_cap: Annotated[float, Gt(0)] | None = None
    """Scores become soft_cap * tanh(scores / soft_cap) before the mask; no cap when absent."""
    window: Annotated[int, Gt(0)] | None = None
    """Number of positions that a position of a local layer attends to, including itself; no layer is local when absent."""
    chunk: Annotated[Annotated[int, Gt(0)] | None, Feature("attention_chunk", unless=None, plane="model")] = None
    """Instead of a window: number of positions of a chunk. A position of a local layer attends to earlier positions of its chunk;
    chunks are counted from the start of each document (Llama 4)."""
    global_every: Annotated[int, Gt(0)] | None = None
    """Every n-th layer (the n-th, the 2n-th, ...) is global."""
    global_layers: tuple[Annotated[int, Ge(0)], ...] | None = None
    """Indices, from 0, of the layers that are global."""
    global_head_dim: Annotated[int, Gt(0)] | None = None
    """Width of one head of global layers, even; the model's `head_dim` when absent."""
    global_kv_heads: Annotated[int, Gt(0)] | None = None
    """Number of key and value heads of global layers, a divisor of `heads`; the model's `kv_heads` when absent."""
    v_norm: bool = False
    """Whether each head of v is divided by its root mean square, with the `eps` of the model's norm and without a weight."""
    keys_as_values: Literal["none", "global", "all"] = "none"
    """Layers without `v_proj`, whose values are the projected keys before their norm and rotation."""
    shared_kv_layers: Annotated[int, Ge(0), Feature("shared_kv", unless=0, plane="model")] = 0
    """Number of last layers without keys and values of their own: each attends to those of the last layer before them of its
    kind, local or global (YOCO, Sun et al., 2024; Gemma 4). Not with a pipeline."""
    shared_kv_ffn_factor: Annotated[int, Ge(1)] = 1
    """Factor on the width of the feed-forward layers of these layers, which have fewer weights otherwise (Gemma 4 E2B: 2)."""
    nope_every: Annotated[int, Gt(0)] | None = None
    """Every n-th layer (the n-th, the 2n-th, ...) has no rotary positions (Yang et al., 2025; SmolLM3: 4)."""
    nope_layers: tuple[Annotated[int, Ge(0)], ...] | None = None
    """Indices, from 0, of the layers without rotary positions."""
    output_gate: bool = False
    """Whether the output of each head is multiplied with sigmoid(W x) before the output projection (Qiu et al., 2025). `q_proj`
    then has the rows of each head's query, followed by those of its gate."""
    sinks: bool = False
    """Whether one learned logit of each head enters the softmax and is dropped, so that a head can attend to nothing (Xiao et
    al., 2024; gpt-oss). It starts at 0."""
    temperature: Annotated[float, Gt(0)] | None = None
    """Multiplies the query at position p of its document with 1 + temperature * ln(1 + floor(p / temperature_length)), so that
    attention stays sharp over long documents (Nakanishi, 2025; Ministral 3); 1 when absent."""
    temperature_length: Annotated[int, Gt(0)] | None = None
    """Number of first positions whose factor is 1; needed by `temperature`."""
    temperature_shift: Annotated[int, Ge(0)] = 0
    """Number that is added to p in this factor (Llama 4: 1)."""
    temperature_layers: Literal["all", "nope"] = "all"
    """Layers with this factor: all, or those without rotary positions (Llama 4)."""
    value_embeddings: Annotated[ValueEmbeddings | None, Feature("value_embeddings", unless=None, plane="model")] = None
    """Tables of tokens whose rows are added to the values of some layers; no layer has one when absent."""
    core: Annotated[AttentionKernel, FREE] = "auto"
    """Kernel: `sdpa` (with a mask where needed), `flex` or `varlen` (CUDA only, no T x T mask), or what fits best."""

    def __post_init__(self) -> None:
        if self.nope_every is not None and self.nope_layers is not None:
            raise ValueError("nope_every and nope_layers exclude each other; set one")
        if self.global_every is not None and self.global_layers is not None:
            raise ValueError("global_every and global_layers exclude each other; set one")
        if self.window is not None and self.chunk is not None:
            raise ValueError("window and chunk exclude each other; set one")
        if self.window is None and self.chunk is None and (self.global_every is not None or self.global_layers is not None):
            raise ValueError("global_every and global_layers need a window or a chunk; without one every layer is global")
        if self.window is None and (self.global_head_dim is not None or self.global_kv_heads is not None):
            raise ValueError("global_head_dim and global_kv_heads need a window; without one set head_dim and kv_heads")
        if self.window is None and self.keys_as_values == "global":
            raise ValueError("keys_as_values = 'global' needs a window; without one every layer is global: set 'all'")
        if self.shared_kv_ffn_factor != 1 and not self.shared_kv_layers:
            raise ValueError("shared_kv_ffn_factor needs shared_kv_layers; set both, or neither")
        if not self.causal and self.shared_kv_layers:
            raise ValueError("causal = false does not support shared_kv_layers; remove one")
        if (self.temperature is None) != (self.temperature_length is None):
            raise ValueError("temperature and temperature_length need each other; set both, or neither")
        if self.temperature is None and (self.temperature_shift or self.temperature_layers != "all"):
            raise ValueError("temperature_shift and temperature_layers need a temperature; set one, or remove them")
        if self.value_embeddings is not None:
            others = {
                "v_norm": False,
                "keys_as_values": "none",
                "global_head_dim": None,
                "global_kv_heads": None,
                "shared_kv_layers": 0,
            }
            if used := [name for name, value in others.items() if getattr(self, name) != value]:
                raise ValueError(f"value_embeddings does not support {used[0]}; remove one of them")
        if not self.causal and self.chunk is not None:
            raise ValueError("causal = false does not support a chunk; remove chunk, or set causal = true")
        if not self.causal and self.window is not None:
            raise ValueError("causal = false does not support a window; remove window, or set causal = true")
        if self.core == "varlen" and self.soft_cap is not None:
            raise ValueError("core 'varlen' does not support soft_cap; use 'flex', 'sdpa' or 'auto'")
        if self.core == "varlen" and self.sinks:
            raise ValueError("core 'varlen' does not support sinks; use 'flex', 'sdpa' or 'auto'")

    @property
    def feature(self) -> str:
        """Name of what tests must prove in each layout; empty for causal attention, which all tests have."""
        return "" if self.causal else "bidirectional"

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[GQA]":
        """Returns examples with and without each option that changes the computation."""
        return (
            cls(),
            cls(qkv_bias=True, qk_norm="full"),
            cls(qk_norm="head", soft_cap=2.0),
            cls(window=3, global_every=2),
            cls(nope_every=1),
            cls(output_gate=True),
            cls(sinks=True, window=3),
            cls(temperature=0.5, temperature_length=3),
            cls(window=3, global_layers=(0,), global_head_dim=10, global_kv_heads=1, v_norm=True, keys_as_values="global"),
            cls(keys_as_values="all", qk_norm="head"),
            cls(chunk=3, global_every=2, nope_every=2, qk_norm="unit"),
            cls(nope_every=2, temperature=0.5, temperature_length=3, temperature_shift=1, temperature_layers="nope"),
            cls(causal=False),
            cls(value_embeddings=ValueEmbeddings(layers=(0,), gate_channels=3)),
        )

    def check(self, context: BlockContext) -> None:
        """Checks the settings against the sizes of the model.

        Raises:
            ValueError: a setting does not fit the model.
        """
        for name in ("global_layers", "nope_layers"):
            if wrong := [layer for layer in getattr(self, name) or () if layer >= context.layers]:
                raise ValueError(f"{name} {wrong} do not exist; layers are numbered 0 to {context.layers - 1}")
        if self.value_embeddings is not None:
            if wrong := [layer for layer in self.value_embeddings.layers if layer >= context.layers]:
                raise ValueError(f"value_embeddings.layers {wrong} do not exist; layers are numbered 0 to {context.layers - 1}")
            if self.value_embeddings.gate_channels > context.dim:
                raise ValueError(
                    f"value_embeddings.gate_channels {self.value_embeddings.gate_channels} exceeds dim {context.dim}; lower it"
                )
        if context.rope.local_theta is not None and self.window is None and self.chunk is None:
            raise ValueError("rope.local_theta needs local layers; set attention.window or attention.chunk")
        if self.qk_norm == "unit" and not hasattr(context.norm, "eps"):
            raise ValueError(f"qk_norm 'unit' needs a norm with eps, and {type(context.norm).__name__} has no eps; use 'head'")
        for name in ("global_head_dim", "global_kv_heads"):
            if getattr(self, name) is not None and not any(self._is_global(layer) for layer in range(context.layers)):
                raise ValueError(f"{name} needs global layers; set global_every or global_layers, or remove it")
        if self.shared_kv_layers >= context.layers:
            raise ValueError(f"shared_kv_layers {self.shared_kv_layers} must be fewer than the model's {context.layers} layers")
        own = context.layers - self.shared_kv_layers
        kinds = {self._kind(layer) for layer in range(own)} if self.shared_kv_layers else set[str]()
        missing = {self._kind(layer) for layer in range(own, context.layers)} - kinds
        if missing:
            raise ValueError(
                f"shared_kv_layers {self.shared_kv_layers} leaves no {missing.pop()} layer with keys and values; lower it"
            )
        if self.global_kv_heads is not None and context.heads % self.global_kv_heads:
            raise ValueError(f"global_kv_heads {self.global_kv_heads} must divide heads {context.heads}")
        widths = {"head_dim": context.head_dim, "global_head_dim": self.global_head_dim}
        for name, width in widths.items():
            if width is None:
                continue
            turning = int(width * context.rope.partial)
            if turning % 2 or not turning or width % 2:
                raise ValueError(f"{turning} of {name} {width} dimensions rotate; the number must be even and positive")
            if not context.rope.proportion * turning // 2:
                raise ValueError(f"rope.proportion {context.rope.proportion} of {turning // 2} pairs of {name} is none; raise it")

    def window_at(self, layer: int) -> int | None:
        """Returns the window of layer `layer`, or its `AttentionChunk`; None if the layer is global."""
        listed = self.global_layers is not None and layer in self.global_layers
        counted = self.global_every is not None and (layer + 1) % self.global_every == 0
        return None if listed or counted else self.window if self.chunk is None else AttentionChunk(self.chunk)

    def _is_global(self, layer: int) -> bool:
        return self.window is not None and self.window_at(layer) is None

    def _kind(self, layer: int) -> str:
        return "global" if self.window_at(layer) is None else "local"

    def takes(self, layer: int, layers: int) -> str | None:
        """Returns the kind of the keys and values that layer `layer` of a model with `layers` layers takes from an earlier one of
        this kind; None if it has its own."""
        return self._kind(layer) if layers - self.shared_kv_layers <= layer < layers else None

    def gives(self, layer: int, layers: int) -> str | None:
        """Returns the kind of the layers that take the keys and values of layer `layer`; None if none does."""
        own, kind = layers - self.shared_kv_layers, self._kind(layer)
        if not self.shared_kv_layers or layer >= own:
            return None
        later = any(self._kind(other) == kind for other in range(layer + 1, own))
        taken = any(self._kind(other) == kind for other in range(own, layers))
        return kind if taken and not later else None

    def ffn_factor_at(self, layer: int, layers: int) -> int:
        """Returns the factor on the width of the feed-forward layer of layer `layer`."""
        return 1 if self.takes(layer, layers) is None else self.shared_kv_ffn_factor

    def of_layer(self, context: BlockContext) -> BlockContext:
        """Returns the context with the sizes of heads of its layer."""
        if not self._is_global(context.layer):
            return context
        head_dim, kv_heads = self.global_head_dim or context.head_dim, self.global_kv_heads or context.kv_heads
        return replace(context, head_dim=head_dim, kv_heads=kv_heads)

    def units(self, context: BlockContext) -> dict[str, int]:
        """Returns the number of indivisible units of each logical dimension, if layers differ in it."""
        if self.global_kv_heads in (None, context.kv_heads):
            return {}
        common = gcd(self.global_kv_heads, context.kv_heads)
        return {"kv_heads": common, "common_kv_heads": common}

    def has_values(self, layer: int) -> bool:
        """Whether layer `layer` projects values of its own."""
        return self.keys_as_values == "none" or (self.keys_as_values == "global" and not self._is_global(layer))

    def rotates_at(self, layer: int) -> bool:
        """Whether layer `layer` has rotary positions."""
        listed = self.nope_layers is not None and layer in self.nope_layers
        return not listed and (self.nope_every is None or (layer + 1) % self.nope_every != 0)

    def matrices(self, context: BlockContext) -> dict[str, Matrix]:
        """Returns the linear layers by name."""
        context = self.of_layer(context)
        heads, kv_heads = context.heads * context.head_dim, context.kv_heads * context.head_dim
        keys, own = Matrix((kv_heads, context.dim), ("kv_heads", "embed")), self.takes(context.layer, context.layers) is None
        return {
            "q_proj": Matrix((2 * heads if self.output_gate else heads, context.dim), ("heads", "embed")),
            **({"k_proj": keys} if own else {}),
            **({"v_proj": keys} if own and self.has_values(context.layer) else {}),
            "o_proj": Matrix((context.dim, heads), ("embed", "heads")),
        }

    def score_width(self, context: BlockContext) -> int:
        """Returns the multiply-adds of one query with one key and its value, summed over all heads."""
        return 2 * context.heads * self.of_layer(context).head_dim

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.attention import Attention
        from forge_models.blocks.rope import Temperature

        rotates = self.rotates_at(context.layer)
        temperature = None
        if self.temperature is not None and not (rotates and self.temperature_layers == "nope"):
            temperature = Temperature(self.temperature, self.temperature_length or 1, self.temperature_shift)
        options: dict[str, Any] = {
            "qkv_bias": self.qkv_bias,
            "output_bias": self.output_bias,
            "qk_norm": self.qk_norm,
            "scale": self.scale,
            "soft_cap": self.soft_cap,
            "window": self.window_at(context.layer),
            "rotates": rotates,
            "output_gate": self.output_gate,
            "sinks": self.sinks,
            "temperature": temperature,
            "causal": self.causal,
            "core": self.core,
        }
        settings, context = self.value_embeddings, self.of_layer(context)
        if settings is not None and context.layer in settings.layers:
            from forge_models.blocks.value_embeddings import ValueEmbeddedAttention

            return ValueEmbeddedAttention(context, settings, **options)
        takes, gives = self.takes(context.layer, context.layers), self.gives(context.layer, context.layers)
        if self.v_norm or self.keys_as_values != "none" or takes or gives:
            from forge_models.blocks.reuse import ReusingAttention

            eps = getattr(context.norm, "eps", 1e-6) if self.v_norm else None
            equal = not self.has_values(context.layer)
            return ReusingAttention(context, v_norm=eps, keys_as_values=equal, takes=takes, gives=gives, **options)
        return Attention(context, **options)


@dataclass(frozen=True, kw_only=True)
class MLA(Component):
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one small latent.

    A cache holds only the latent and the shared rotary key, kv_lora_rank + qk_rope_head_dim numbers per token. The model's
    `kv_heads` and `head_dim` are not used.
    """

    key_class: ClassVar = IDENTITY

    q_lora_rank: Annotated[int, Gt(0)] | None = None
    """Width of the latent from which queries are computed; without it, queries are projected from the residual stream."""
    kv_lora_rank: Annotated[int, Gt(0)] = 512
    """Width of the latent from which keys and values are computed."""
    qk_nope_head_dim: Annotated[int, Gt(0)] = 128
    """Width of the part of each head's q and k that is not rotated."""
    qk_rope_head_dim: Annotated[int, Gt(0)] = 64
    """Width of the rotated part of each head's q and k; all heads share its key."""
    v_head_dim: Annotated[int, Gt(0)] = 128
    """Width of each head's value."""
    rotates: bool = True
    """Whether the part of width qk_rope_head_dim is rotated. Without it the layer has no positions (Kimi Linear)."""
    norm_eps: Annotated[float, Gt(0)] | None = None
    """`eps` of the norms of the latents; the model's norm `eps` when absent (DeepSeek-V3 always uses 1e-6 here)."""
    core: Annotated[AttentionKernel, FREE] = "auto"
    """Kernel: `sdpa` (with a mask where needed), `flex` or `varlen` (CUDA only, no T x T mask), or what fits best."""

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} must be even, because rotary positions rotate pairs")

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[MLA]":
        """Returns small examples with and without a query latent."""
        small = cls(kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
        return (small, replace(small, q_lora_rank=7, norm_eps=1e-6), replace(small, rotates=False))

    def check(self, context: BlockContext) -> None:
        """Checks the settings against the sizes of the model.

        Raises:
            ValueError: a setting does not fit the model.
        """
        if context.kv_heads != context.heads:
            raise ValueError(f"mla does not use kv_heads; remove kv_heads {context.kv_heads}")
        if context.rope.partial != 1 or context.rope.local_theta is not None:
            raise ValueError("mla uses qk_rope_head_dim and has no local layers; remove rope.partial and rope.local_theta")
        if self.norm_eps is not None and not hasattr(context.norm, "eps"):
            raise ValueError(f"norm_eps needs a norm with eps, and {type(context.norm).__name__} has no eps; remove norm_eps")

    def rotates_at(self, layer: int) -> bool:
        """Whether layer `layer` has rotary positions."""
        del layer
        return self.rotates

    def norm(self, context: BlockContext) -> Component:
        """Returns the norm of the latents."""
        norm: Any = context.norm
        return norm if self.norm_eps is None else replace(norm, eps=self.norm_eps)

    def matrices(self, context: BlockContext) -> dict[str, Matrix]:
        """Returns the linear layers by name."""
        heads, dim, rank = context.heads, context.dim, self.q_lora_rank
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        made = {"q_proj": Matrix((queries, dim), ("heads", "embed"))}
        if rank is not None:
            made = {"q_a_proj": Matrix((rank, dim), (None, "embed")), "q_b_proj": Matrix((queries, rank), ("heads", None))}
        return made | {
            "kv_a_proj": Matrix((self.kv_lora_rank + self.qk_rope_head_dim, dim), (None, "embed")),
            "kv_b_proj": Matrix((heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank), ("heads", None)),
            "o_proj": Matrix((dim, heads * self.v_head_dim), ("embed", "heads")),
        }

    def score_width(self, context: BlockContext) -> int:
        """Returns the multiply-adds of one query with one key and its value, summed over all heads."""
        return context.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.latent_attention import LatentAttention

        return LatentAttention(
            context,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            norm=self.norm(context),
            rotates=self.rotates,
            core=self.core,
        )


@dataclass(frozen=True, kw_only=True)
class IndexedMLA(MLA):
    """MLA to the `top_k` keys that an indexer chooses for each query (DeepSeek-V3.2, 2025).

    The indexer has few small heads, and learns from the attention of the layer: the divergence of its scores from the summed
    attention weights is part of the minimized loss, and trains nothing else. Chosen keys are a mask, so a forward computes no
    fewer products than MLA does.
    """

    key_class: ClassVar = IDENTITY
    feature: ClassVar[str] = "indexer"
    """Name of what tests must prove in each layout."""
    whole_rows: ClassVar[tuple[str, ...]] = ("model.attention.top_k, which chooses among the keys of a whole row",)
    """Reasons why ranks must not share rows."""

    q_lora_rank: Annotated[int, Gt(0)] = 1536  # type: ignore[override]  # the indexer has no other queries
    """Width of the latent from which queries, also those of the indexer, are computed."""
    index_heads: Annotated[int, Gt(0)] = 64
    """Number of heads of the indexer."""
    index_dim: Annotated[int, Gt(0)] = 128
    """Width of a head of the indexer, whose first qk_rope_head_dim dimensions are rotated."""
    top_k: Annotated[int, Gt(0)] = 2048
    """Number of keys that the indexer chooses for a query; at most the model's `max_length`."""
    keys: Literal["chosen", "all"] = "chosen"
    """Keys to which a query attends: those that the indexer chooses, or all, to warm up an indexer whose choice nothing depends
    on yet (then freeze all other parameters with `[[parameters.groups]]`)."""
    kl_weight: Annotated[float, Gt(0)] = 1.0
    """Weight of the indexer's loss: the mean over tokens of the divergence of its scores from attention, in nats, summed over
    layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index_dim < self.qk_rope_head_dim:
            raise ValueError(f"index_dim {self.index_dim} must be at least qk_rope_head_dim {self.qk_rope_head_dim}")
        if not self.rotates:
            raise ValueError("rotates = false does not go with an indexer, whose queries and keys rotate; use attention 'mla'")
        if self.core not in ("auto", "sdpa"):
            raise ValueError(f"core {self.core!r} does not support chosen keys; use 'sdpa' or 'auto'")

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[IndexedMLA]":
        """Returns small examples with chosen and with all keys."""
        latent: dict[str, Any] = {
            "q_lora_rank": 7,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
        }
        small = cls(**latent, index_heads=3, index_dim=6, top_k=2)
        return (small, replace(small, keys="all", kl_weight=0.5))

    def check(self, context: BlockContext) -> None:
        """Checks the settings against the sizes of the model.

        Raises:
            ValueError: a setting does not fit the model.
        """
        super().check(context)
        if self.top_k > context.max_length:
            raise ValueError(
                f"top_k {self.top_k} exceeds max_length {context.max_length}, so a query would never have a choice; lower top_k, "
                "or use attention 'mla'"
            )

    def matrices(self, context: BlockContext) -> dict[str, Matrix]:
        """Returns the linear layers by name."""
        return super().matrices(context) | {
            "indexer.q_proj": Matrix((self.index_heads * self.index_dim, self.q_lora_rank), (None, None)),
            "indexer.k_proj": Matrix((self.index_dim, context.dim), (None, "embed")),
            "indexer.weights_proj": Matrix((self.index_heads, context.dim), (None, "embed")),
        }

    def score_width(self, context: BlockContext) -> int:
        """Returns the multiply-adds of one query with one key, for the indexer and for attention."""
        return sum(self.score_widths(context).values())

    def score_widths(self, context: BlockContext) -> dict[int | None, int]:
        """Returns the multiply-adds of one query with one key by the number of keys: the indexer scores all of them (None), and
        attention has `top_k`."""
        index, attention = self.index_heads * self.index_dim, super().score_width(context)
        return {None: index, self.top_k: attention} if self.keys == "chosen" else {None: index + attention}

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.indexer import IndexedAttention

        return IndexedAttention(
            context,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            norm=self.norm(context),
            index_heads=self.index_heads,
            index_dim=self.index_dim,
            top_k=self.top_k,
            chooses=self.keys == "chosen",
            kl_weight=self.kl_weight,
        )
