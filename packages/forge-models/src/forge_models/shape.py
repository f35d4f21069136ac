"""Shape of a decoder with every default resolved: plain data without torch, for modules, specs, checks, FLOPs and converters."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import gcd, prod, sqrt
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from forge_core.component import IDENTITY, Component
from forge_core.specs import Matrix

AttentionKernel = Literal["auto", "sdpa", "flex", "varlen"]
ExpertKernel = Literal["auto", "grouped", "loop"]
RouterScores = Literal["sigmoid", "sqrt_softplus"]

RecurrentKernel = Literal["torch", "fla"]


class AttentionChunk(int):
    """Number of positions of a chunk, in the place of a window: a position attends to earlier positions of its own chunk."""


@dataclass(frozen=True)
class CompressedKeys:
    """Number of keys of a query that stand for `rate` earlier tokens each, in the place of a window: at most `limit` of them."""

    rate: int
    limit: int | None = None

    def of(self, tokens: int) -> int:
        """Returns the number of keys of a query that sees `tokens` tokens, itself included."""
        keys = tokens // self.rate
        return keys if self.limit is None else min(keys, self.limit)

    def mean(self, length: int) -> float:
        """Returns the mean number of keys over the queries of a causal row of `length` tokens."""
        most = self.of(length)  # queries from most * rate on see as many; before, rate queries see each smaller number
        return (self.rate * most * (most - 1) / 2 + most * (length - most * self.rate + 1)) / length


RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn"]

ROPE_SCALINGS_OF: Mapping[str, tuple[RopeScaling, ...]] = MappingProxyType(
    {
        "factor": ("linear", "dynamic", "llama3", "yarn"),
        "original_max_length": ("dynamic", "llama3", "yarn"),
        **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
        **dict.fromkeys(("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"), ("yarn",)),
    }
)
"""Fields that only some scalings use, and these scalings."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Angles position / theta^(2i / width) (Su et al., 2021), and how they are stretched for longer sequences.

    `linear` divides all frequencies by `factor` (Chen et al., 2023); `dynamic` raises theta once a sequence is longer
    than `original_max_length`; `llama3` divides the low frequencies only (Llama 3.1); `yarn` ramps between the two
    (Peng et al., 2023).
    """

    key_class: ClassVar = IDENTITY

    theta: Annotated[float, Gt(0)] = 10000.0
    """Base of the angles."""
    local_theta: Annotated[float, Gt(0)] | None = None
    """Base of the angles of local (windowed) layers, which are then never scaled and turn in all pairs; same as other layers when
    absent."""
    partial: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of each head's width that is rotated."""
    proportion: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the rotated pairs that turn, those of the highest frequencies (p-RoPE, Barbero et al., 2024; Gemma 4: 0.25). The
    others keep their places but have angle 0, and frequencies are those of the whole width, unlike with `partial`."""
    scaling: RopeScaling = "none"
    """Scaling of frequencies for longer sequences."""
    factor: Annotated[float, Gt(0)] | None = None
    """Factor by which sequences get longer; needed by every scaling."""
    original_max_length: Annotated[int, Gt(0)] | None = None
    """Maximum sequence length in tokens before scaling; needed by `dynamic`, `llama3` and `yarn`."""
    low_freq_factor: Annotated[float, Gt(0)] = 1.0
    """`llama3`: frequencies with wavelengths above original_max_length / low_freq_factor are divided by `factor`."""
    high_freq_factor: Annotated[float, Gt(0)] = 4.0
    """`llama3`: frequencies with wavelengths below original_max_length / high_freq_factor do not change."""
    beta_fast: Annotated[float, Gt(0)] = 32.0
    """`yarn`: dimensions with more full turns than this over original_max_length do not change."""
    beta_slow: Annotated[float, Gt(0)] = 1.0
    """`yarn`: frequencies of dimensions with fewer full turns than this are divided by `factor`."""
    truncate: bool = True
    """`yarn`: whether the ramp begins and ends at integer dimensions."""
    attention_factor: Annotated[float, Gt(0)] | None = None
    """`yarn`: factor on cosines and sines; 0.1 ln(factor) + 1 when absent."""
    mscale: float | None = None
    """`yarn`: if `mscale_all_dim` is set too, the attention factor is the ratio of 0.1 m ln(factor) + 1 for m = `mscale` and
    m = `mscale_all_dim` (DeepSeek)."""
    mscale_all_dim: float | None = None
    """`yarn`: see `mscale`; MLA also multiplies its scale by the square of 0.1 m ln(factor) + 1 for m = `mscale_all_dim`."""

    def __post_init__(self) -> None:
        if self.scaling != "none" and self.factor is None:
            raise ValueError(f"scaling {self.scaling!r} needs a factor")
        if self.scaling in ("dynamic", "llama3", "yarn") and self.original_max_length is None:
            raise ValueError(f"scaling {self.scaling!r} needs original_max_length, the tokens of a sequence before stretching")
        if self.proportion != 1 and self.scaling not in ("none", "linear"):
            raise ValueError(f"proportion {self.proportion} does not support scaling {self.scaling!r}; use 'linear' or 'none'")
        if self.scaling == "llama3" and self.low_freq_factor > self.high_freq_factor:
            raise ValueError(f"high_freq_factor {self.high_freq_factor} must not be below low_freq_factor {self.low_freq_factor}")
        for item in fields(self):
            readers = ROPE_SCALINGS_OF.get(item.name, (self.scaling,))
            if self.scaling not in readers and getattr(self, item.name) != item.default:
                raise ValueError(f"{item.name} has no effect with scaling {self.scaling!r}; it belongs to {', '.join(readers)}")

    def of_layer(self, local: bool) -> "Rope":
        """Returns the positions of a local or a global layer."""
        if not local or self.local_theta is None:
            return self
        return Rope(theta=self.local_theta, partial=self.partial)


@dataclass(frozen=True)
class ClampedGate:
    """The activation (up + shift) * gate * sigmoid(slope * gate) of clamped values: gate by `limit` from above, up by `limit` on
    both sides (gpt-oss)."""

    limit: float
    slope: float
    shift: float = 1.0


Activation = str | ClampedGate
"""Name of an elementwise function, or a function of both gate and up."""


@dataclass(frozen=True, kw_only=True)
class ValueEmbeddings:
    """Tables of tokens whose rows are added to the values of some attention layers, with a gate for each key-value head.

    Values become v + scale * sigmoid(W x[:gate_channels]) * E[token], where x is the input of the layer (nanochat; Karpathy,
    2025).
    """

    key_class: ClassVar = IDENTITY

    layers: tuple[Annotated[int, Ge(0)], ...]
    """Indices, from 0, of the layers that have a table each, of `vocab_size` rows of `kv_heads` * `head_dim` numbers (nanochat:
    every second layer, the last one included)."""
    gate_channels: Annotated[int, Gt(0)] = 12
    """Number of first channels of the input of the layer from which its gates are computed."""
    scale: Annotated[float, Gt(0)] = 3.0
    """Largest factor on a row. Gates start at half of it."""

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers {list(self.layers)} must name at least one layer, and each once; remove value_embeddings")


@dataclass(frozen=True, kw_only=True)
class BlockContext:
    """Argument of `build(context)` of attention and MLP components: resolved sizes and settings of a decoder.

    Attributes:
        dim: width of the residual stream.
        layers: number of blocks in the whole model.
        layer: index of the block that is being built.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: width of one head.
        ffn_dim: hidden width of the feed-forward part.
        max_length: maximum sequence length in tokens.
        rope: rotary positions.
        init_std: standard deviation of hidden matrices.
        norm: component that builds a norm of a given width.
        vocab_size: number of token ids; 0 where blocks process no tokens.
    """

    dim: int
    layers: int
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    max_length: int
    rope: Rope
    init_std: float
    norm: Component
    vocab_size: int = 0

    def of_any_layer(self) -> "BlockContext":
        """Returns the context without the number of the block, to compare blocks."""
        return replace(self, layer=0)

    @property
    def output_std(self) -> float:
        """Standard deviation of projections that write to the residual stream: init_std / sqrt(2 * layers).

        Each block adds two terms, so the variance of the stream does not depend on the depth (Radford et al., 2019).
        """
        return self.init_std / sqrt(2 * self.layers)


@dataclass(frozen=True, kw_only=True)
class RouterContext:
    """Argument of `build(context)` of router components.

    Attributes:
        dim: width of a token.
        experts: number of experts to choose from.
        top_k: number of experts chosen for each token.
        layer: index of the block.
        init_std: standard deviation of hidden matrices.
        vocab_size: number of token ids; 0 where blocks process no tokens.
    """

    dim: int
    experts: int
    top_k: int
    layer: int
    init_std: float
    vocab_size: int = 0

    @classmethod
    def of(cls, context: BlockContext, experts: int, top_k: int) -> "RouterContext":
        """Returns the context of a router in a block with `experts` experts, `top_k` of them per token."""
        sizes = {"dim": context.dim, "experts": experts, "top_k": top_k, "vocab_size": context.vocab_size}
        return cls(**sizes, layer=context.layer, init_std=context.init_std)

    def of_any_layer(self) -> "RouterContext":
        """Returns the context without the number of the block, to compare blocks."""
        return replace(self, layer=0)


NormPlacement = Literal["pre", "post", "sandwich"]


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Several residual streams, which each part of a block mixes, instead of one (mHC; Xie et al., 2025; DeepSeek-V4).

    A part reads a weighted sum of the streams and adds its output to each of them with another weight; a matrix, nearly doubly
    stochastic, mixes the streams. All weights depend on the token. See `blocks.streams` for the formulas.
    """

    key_class: ClassVar = IDENTITY

    count: Annotated[int, Ge(2)] = 4
    """Number of streams. The activations between blocks, and between stages of a pipeline, are as many times larger."""
    sinkhorn: Annotated[int, Gt(0)] = 20
    """Number of iterations that make the rows and columns of the mixing matrix sum to one."""
    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the weights of reading and of mixing, and to the sums by which the iterations divide."""
    norm_eps: Annotated[float, Gt(0)] | None = None
    """Added to the mean square of the streams from which weights are computed; the `eps` of the model's norm when absent."""

    def resolved_norm_eps(self, norm: Component) -> float:
        """Returns `norm_eps`, or the `eps` of a norm.

        Raises:
            ValueError: there is neither.
        """
        eps = getattr(norm, "eps", None) if self.norm_eps is None else self.norm_eps
        if eps is None:
            raise ValueError(f"streams need norm_eps, because the norm {type(norm).__name__} has no eps; set streams.norm_eps")
        return eps


LAYOUT_DEPENDENT = ("micro_batch", "pooled")
"""Losses whose value depends on how rows are assigned to ranks and micro-batches. All others are the same in every layout."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Weights of the losses that balance experts and keep logits small; see `blocks.moe.routers`.

    Each key names the scope over which loads are counted.
    """

    key_class: ClassVar = IDENTITY

    sequence: Annotated[float, Ge(0)] = 0.0
    """Balance within each row (DeepSeek-V3, 2024, equations 17 to 20)."""
    micro_batch: Annotated[float, Ge(0)] = 0.0
    """Balance within the tokens of one rank in one forward (Switch, Fedus et al., 2021): depends on layout and micro-batch size.
    1 for each layer if the load is even; transformers counts its loss differently, see `pooled`."""
    global_batch: Annotated[float, Ge(0)] = 0.0
    """Balance over the whole batch of all ranks (Qiu et al., 2025), with the loads of the previous step."""
    pooled: Annotated[float, Ge(0)] = 0.0
    """Balance as in transformers (`router_aux_loss_coef`): `top_k` times `micro_batch`, but with loads and probabilities summed
    over all layers before they are multiplied, instead of one loss for each layer."""
    z: Annotated[float, Ge(0)] = 0.0
    """Mean square of the router's log partition function (ST-MoE, Zoph et al., 2022)."""

    def any(self) -> bool:
        """Whether any loss has a weight other than 0."""
        return any((self.sequence, self.micro_batch, self.global_batch, self.pooled, self.z))


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """Experts of a decoder. The fields are those of `[model.moe]`; if `capacity` is None, no slot is dropped."""

    experts: int
    top_k: int
    shared: int
    shared_gate: bool
    weigh_inputs: bool
    every: int
    first_dense: int
    ffn_dim: int
    capacity: float | None
    kernel: ExpertKernel
    router: Component
    losses: Losses
    branch_norms: bool = False
    latent_dim: int | None = None

    def has(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has experts."""
        return layer >= self.first_dense and (layer + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class LayerInputsShape:
    """Inputs of layers besides the residual stream. The fields are those of `[model.layer_inputs]`."""

    dim: int
    vocab_size: int


def _apart(matrix: Matrix) -> Matrix:
    """Returns a matrix whose tokens are not those of the residual stream."""
    outputs, inputs = (None if dim == "embed" else dim for dim in matrix.dims)
    return matrix._replace(dims=(outputs, inputs))


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Shape of a decoder. The fields are those of `[model]`; None means no cap and no experts, and 0 labels a head of words.
    Parts are components, whose modules are built with a `BlockContext`."""

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
    learned_positions: bool
    soft_cap: float | None
    norm_placement: NormPlacement
    parallel_residual: bool
    shared_norm: bool
    embed_multiplier: float
    residual_multiplier: float
    logit_multiplier: float
    init_std: float
    attention: Component
    mlp: Component
    norm: Component
    moe: MoEShape | None
    mtp_depth: int
    mtp_weight: float
    mtp_schedule: Component | None
    labels: int = 0
    attention_only: tuple[int, ...] = ()
    layer_scalar: bool = False
    streams: Streams | None = None
    layer_inputs: LayerInputsShape | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks, including those of MTP modules."""
        return self.layers + self.mtp_depth

    def has_experts(self, layer: int) -> bool:
        """Whether block `layer` has experts instead of a feed-forward layer."""
        return self.moe is not None and self.moe.has(layer) and self.has_feed_forward(layer)

    def has_feed_forward(self, layer: int) -> bool:
        """Whether block `layer` has a feed-forward layer or experts behind its attention."""
        return layer not in self.attention_only

    @property
    def causal(self) -> bool:
        """Whether a token sees only earlier tokens."""
        return getattr(self.attention, "causal", True)

    def windows(self) -> tuple[int | None, ...]:
        """Returns the attention window of every block; None = all positions."""
        window_at = getattr(self.attention, "window_at", lambda _: None)
        return tuple(window_at(layer) for layer in range(self.blocks))

    def score_widths(self, layer: int) -> Mapping[int | CompressedKeys | None, int]:
        """Returns the multiply-adds of one query with one key in block `layer`, by the number of keys of a query; None = all."""
        at: Any = getattr(self.attention, "at", lambda _: self.attention)
        part, context = at(layer), self.context(layer)
        widths: Any = getattr(part, "score_widths", None)
        return {self.windows()[layer]: part.score_width(context)} if widths is None else widths(context)

    def norm_placement_at(self, layer: int) -> NormPlacement:
        """Returns the placement of norms in block `layer`."""
        placement_at: Any = getattr(self.attention, "norm_placement_at", lambda _: None)
        return placement_at(layer) or self.norm_placement

    def context(self, layer: int) -> BlockContext:
        """Returns the context that the components of block `layer` receive."""
        ffn_factor_at: Any = getattr(self.attention, "ffn_factor_at", lambda *_: 1)
        return BlockContext(
            dim=self.dim,
            layers=self.layers,
            layer=layer,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn_dim=self.ffn_dim * ffn_factor_at(layer, self.layers),
            max_length=self.max_length,
            rope=self.rope,
            init_std=self.init_std,
            norm=self.norm,
            vocab_size=self.vocab_size,
        )

    def value_embeddings(self, layer: int) -> ValueEmbeddings | None:
        """Returns the settings of the table of values in block `layer`; None if the block has no such table."""
        at: Any = getattr(self.attention, "at", lambda _: self.attention)
        settings: ValueEmbeddings | None = getattr(at(layer), "value_embeddings", None)
        return settings if settings is not None and layer in settings.layers else None

    @property
    def has_dense(self) -> bool:
        """Whether any block has a feed-forward layer without experts."""
        return any(self.has_feed_forward(layer) and not self.has_experts(layer) for layer in range(self.blocks))

    @property
    def units(self) -> dict[str, int]:
        """Number of indivisible units of each logical dimension; see `Specs`."""
        units = {
            "embed": self.dim,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "ffn": self.ffn_dim,
            "vocab": self.vocab_size,
        }
        extra: Any = getattr(self.attention, "units", None)
        units |= {} if extra is None else extra(self.context(0))
        if self.moe is None:
            return units
        return units | {"ffn": gcd(self.ffn_dim if self.has_dense else 0, self.moe.ffn_dim), "expert": self.moe.experts}

    @property
    def whole_rows(self) -> tuple[str, ...]:
        """Settings, other than attention, that need whole rows at once."""
        ropes = (self.rope.of_layer(window is not None) for window in self.windows())
        dynamic = self.rope.scaling == "dynamic" and any(rope.scaling == "dynamic" for rope in ropes)
        reads = ("model.rope.scaling = 'dynamic', which reads how long each document is",) if dynamic else ()
        return (*reads, *getattr(self.attention, "whole_rows", ()), *self._row_losses)

    @property
    def whole_stream(self) -> tuple[str, ...]:
        """Settings that need whole sequences of the residual stream."""
        return self._row_losses

    @property
    def _row_losses(self) -> tuple[str, ...]:
        reasons = {
            "sequence": "which counts the loads of a row (losses.global_batch is the same in every layout)",
            "pooled": "which joins the loads of rows over all layers",
        }
        losses = None if self.moe is None else self.moe.losses
        return tuple(f"model.moe.losses.{name}, {why}" for name, why in reasons.items() if getattr(losses, name, 0))

    @property
    def stream(self) -> tuple[int, ...]:
        """Shape of the hidden states of one token between blocks: (dim,), or (count, dim) with several residual streams."""
        return (self.dim,) if self.streams is None else (self.streams.count, self.dim)

    def connections(self, layer: int) -> int:
        """Returns the number of parts of block `layer` that mix residual streams."""
        return 0 if self.streams is None else 1 + self.has_feed_forward(layer)

    @property
    def declares_matrices(self) -> bool:
        """Whether `matrices` is known and complete: attention and MLP declare their linear layers."""
        return hasattr(self.attention, "matrices") and hasattr(self.mlp, "matrices")

    def matrices(self) -> tuple[dict[str, Matrix], dict[str, Matrix]]:
        """Returns hidden matrices by path, and the matrices of one expert by parameter; routers are left out."""
        attention: Any = self.attention
        mlp: Any = self.mlp
        hidden: dict[str, Matrix] = {}
        experts: dict[str, Matrix] = {}
        if self.layer_inputs is not None:
            hidden["layer_inputs.projection"] = Matrix((self.layers * self.layer_inputs.dim, self.dim), (None, "embed"))
        for layer in range(self.blocks):
            block, context = f"blocks.{layer}", self.context(layer)
            if layer >= self.layers:
                depth = f"mtp.depths.{layer - self.layers + 1}"
                hidden[f"{depth}.projection"] = Matrix((self.dim, 2 * self.dim), ("embed", None))
                block = f"{depth}.block"
            hidden |= {f"{block}.attention.{name}": matrix for name, matrix in attention.matrices(context).items()}
            if self.layer_inputs is not None and layer < self.layers:
                width = self.layer_inputs.dim
                hidden[f"{block}.layer_input.gate"] = Matrix((width, self.dim), (None, "embed"))
                hidden[f"{block}.layer_input.projection"] = Matrix((self.dim, width), ("embed", None))
            moe = self.moe
            if not self.has_feed_forward(layer):
                continue
            if moe is None or not self.has_experts(layer):
                hidden |= {f"{block}.mlp.{name}": matrix for name, matrix in mlp.matrices(context).items()}
                continue
            if moe.shared:
                shared = mlp.matrices(replace(context, ffn_dim=moe.shared * moe.ffn_dim))
                hidden |= {f"{block}.mlp.shared.{name}": matrix for name, matrix in shared.items()}
            if (width := moe.latent_dim) is not None:
                hidden[f"{block}.mlp.latent_in"] = Matrix((width, self.dim), (None, "embed"))
                hidden[f"{block}.mlp.latent_out"] = Matrix((self.dim, width), ("embed", None))
                context = replace(context, dim=width)
            stacked = mlp.matrices(replace(context, ffn_dim=moe.ffn_dim))
            if width is not None:
                stacked = {name: _apart(matrix) for name, matrix in stacked.items()}
            experts |= {f"{block}.mlp.experts.{name}": matrix for name, matrix in stacked.items()}
        return hidden, experts

    @property
    def elements(self) -> int:
        """Number of parameters without norms, biases and routers; 0 if attention does not declare its matrices."""
        attention: Any = self.attention
        if not hasattr(attention, "matrices"):
            return 0
        each = sum(prod(matrix.shape) for matrix in attention.matrices(self.context(0)).values())
        wide = (3 if getattr(self.mlp, "gated", True) else 2) * self.dim
        moe, layers = self.moe, self.blocks
        sparse = 0 if moe is None else max(0, layers // moe.every - moe.first_dense // moe.every)
        feed_forward = wide * self.ffn_dim * max(0, layers - sparse - len(self.attention_only))
        if moe is not None:
            routed, latent = wide, moe.latent_dim
            if latent is not None:
                routed = wide // self.dim * latent
                feed_forward += 2 * self.dim * latent * sparse
            feed_forward += moe.ffn_dim * (routed * moe.experts + wide * moe.shared) * sparse
        head = self.labels or (0 if self.tied_embeddings else self.vocab_size)
        tables = (self.vocab_size + head) * self.dim
        tables += self.max_length * self.dim if self.learned_positions else 0
        settings: Any = getattr(getattr(attention, "full", attention), "value_embeddings", None)
        tables += 0 if settings is None else len(settings.layers) * self.vocab_size * self.kv_heads * self.head_dim
        if (inputs := self.layer_inputs) is not None:
            tables += layers * inputs.dim * (inputs.vocab_size + 3 * self.dim)
        return tables + layers * each + feed_forward
