"""Attention of a block: grouped-query attention, with its core.

The core computes softmax(q k^T * scale + mask) v with the kernel that fits device, mask and soft cap. A mask lets a query see
earlier keys in its window and document, or all keys of its document if attention is bidirectional.

With chunks (Llama 4), a query sees the earlier keys of its own chunk, counted from the start of its document. A chunk is to its
layer what a document is to others, so every kernel and every kind of context parallelism applies: `chunk_numbers` takes the place
of the numbers of documents.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from inspect import signature
from math import sqrt
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from forge_core.protocols.model import AttentionCore, PositionedTokens
from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models import accelerator
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.layers import Linear, linear_specs, unfilled, unit_rms
from forge_models.blocks.rope import Rotary, Rotation, Temperature, rotate
from forge_models.flex_limits import takes_flex
from forge_models.inner_values import tap
from forge_models.shape import AttentionChunk, AttentionKernel, BlockContext

NARROWEST_OF_FLEX = 16
"""Width of heads from which flex attention has a kernel on a GPU."""


class LocalAttention:
    """Attention with a kernel chosen by `kind`.

    "auto" chooses on a CPU `scaled_dot_product_attention`, with a boolean mask for documents and windows (flex and varlen have no
    backward there), and likewise on accelerators other than CUDA, for which no other kernel is proven. On CUDA it chooses torch's
    causal kernels, in the fastest order for the device, if nothing else is masked; varlen, if the starts of documents are known
    and the kernel supports dtype and width of heads; otherwise flex. None of these holds a T x T mask. With a soft cap or
    sinks, flex computes the softmax on CUDA, and it is written out elsewhere, where no fused kernel supports them. Rows for which
    flex is not proven get a mask if they are short, and are refused otherwise (`forge_models.flex_limits`).

    Attributes:
        in_compiled_block: whether calls are part of a compiled block; whoever compiles it sets this.
    """

    in_compiled_block = False

    def __init__(
        self,
        kind: AttentionKernel = "auto",
        capped: bool = False,
        width: int | None = None,
        sinks: bool = False,
        causal: bool = True,
    ) -> None:
        """`capped` says that calls will have a soft cap, `sinks` that they will have sinks. `width` is that of the heads of
        queries, keys and values; None if they differ. Without `causal`, queries see later keys too; a window is not supported
        then."""
        self.kind: AttentionKernel = kind
        self.capped = capped
        self.unusual = capped or sinks
        self.width = width
        self.causal = causal

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Any:
        """Returns what the kernel needs for this batch: a boolean mask (B or 1, 1, T, T) with True = visible, a `BlockMask`,
        `Boundaries`, or for whole rows in which nothing but future positions is hidden None or the `KernelOrder` of this GPU.

        Raises:
            ValueError: the device does not support the kernel, or the kernel is not proven for the length.
        """
        window = _hiding(window, length)
        plain = documents is None and window is None
        masks = self.unusual or not plain
        cuda = accelerator.has_flex(torch.device(device), masks and self.kind == "auto")
        if not cuda and self.kind in ("flex", "varlen"):
            raise ValueError(f"attention core {self.kind!r} needs a CUDA device; use 'auto' or 'sdpa'")
        if self.kind == "varlen":
            return boundaries(documents, length, window, device, causal=self.causal)
        if (self.kind == "flex" or (self.kind == "auto" and cuda and masks)) and self._takes_flex(length, length):
            return block_mask(documents, length, window, device, self.causal)
        if plain:
            return whole_rows(device, self.causal) if cuda and not self.unusual else None
        return mask(documents, length, window, device, self.causal)

    def prepare_packed(self, documents: Tensor | None, starts: Tensor | None, length: int, window: int | None, x: Tensor) -> Any:
        """Like `prepare`, with the starts of documents (n,) int32 in the flattened rows, if known; `x` has q's dtype and
        device."""
        window = _hiding(window, length)
        plain, known = documents is None and window is None, documents is None or starts is not None
        fits = not (plain or self.unusual) and takes_lengths(self.width, x.dtype, x.device)
        if known and ((self.kind == "varlen" and accelerator.has_flex(x.device)) or (self.kind == "auto" and fits)):
            return boundaries(documents, length, window, x.device, starts, self.causal)
        return self.prepare(documents, length, window, x.device)

    def prepare_placed(self, queries: PositionedTokens, keys: PositionedTokens, window: int | None) -> Any:
        """Returns what the kernel needs for queries and keys in any order: a boolean mask (B or 1, 1, T, S) or a `BlockMask`.

        Raises:
            ValueError: the kernel supports only whole rows, the device does not support the kernel, or the kernel is not proven
                for the lengths.
        """
        cuda = accelerator.has_flex(queries.places.device, self.kind == "auto")
        if self.kind == "varlen":
            raise ValueError("attention core 'varlen' takes whole rows only; use 'auto', 'flex' or 'sdpa'")
        if not cuda and self.kind == "flex":
            raise ValueError("attention core 'flex' needs a CUDA device; use 'auto' or 'sdpa'")
        lengths = len(queries.places), len(keys.places)
        if self.kind == "sdpa" or not cuda or not self._takes_flex(*lengths):
            return placed_mask(queries, keys, window, self.causal)
        return placed_block_mask(queries, keys, window, self.causal)

    def _takes_flex(self, queries: int, keys: int) -> bool:
        compiled = self.in_compiled_block or torch.compiler.is_compiling()
        return takes_flex(self.kind, queries, keys, compiled, self.capped and torch.is_grad_enabled())

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> Tensor:
        """Returns the boolean mask (B, 1, T, extent) of queries at `slots` (B, T) over the first `extent` slots of a cache;
        `window` may be an `AttentionChunk`."""
        keys = torch.arange(extent, device=slots.device)
        seen = visible(slots[:, :, None] - keys, None if isinstance(window, AttentionChunk) else window)
        if isinstance(window, AttentionChunk):
            seen &= slots[:, :, None] // window == keys // window
        return seen.unsqueeze(1)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: Any,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q (B, heads, T, head_dim), k (B, kv_heads, S, head_dim), v (B, kv_heads, S, width), sinks (heads,) ->
        (B, heads, T, width)."""
        if isinstance(shared, Boundaries):
            return varlen(q, k, v, shared, scale)
        if isinstance(shared, KernelOrder):
            if soft_cap is None and sinks is None:
                return shared.attention(q, k, v, scale)
            shared = None
        if shared is not None and not isinstance(shared, Tensor):
            if q.dtype != torch.float64:
                return flex(q, k, v, shared, scale, soft_cap, sinks)
            shared = dense(shared, q, k)  # flex has no fp64 kernel; fp64 serves comparisons, not speed
        if soft_cap is not None or sinks is not None:
            seen = mask(None, q.shape[2], None, q.device, self.causal) if shared is None else shared
            return _written_out(q, k, v, seen, scale, soft_cap, sinks)
        hides, shares = shared is None and self.causal, q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=shared, is_causal=hides, scale=scale, enable_gqa=shares)


def _hiding(window: int | None, length: int) -> int | None:
    """Returns None for a window that hides nothing of a row, otherwise the window."""
    return None if window is None or window >= length else window


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Computes the softmax in fp32 (fp64 for fp64) over capped scores and the sink of each head, which has no value; heads that
    share keys are one dimension of the product."""
    groups = q.unflatten(1, (k.shape[1], -1))
    scores = (groups @ k.unsqueeze(2).transpose(-1, -2)) * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~seen.unsqueeze(1), float("-inf"))
    if sinks is None:
        weights = wide.softmax(-1)
    else:
        sink = sinks.to(wide.dtype).view(k.shape[1], -1, 1, 1).expand(*wide.shape[:-1], 1)
        weights = torch.cat((wide, sink), dim=-1).softmax(-1)[..., :-1]
    return (weights.to(q.dtype) @ v.unsqueeze(2)).flatten(1, 2)


class Boundaries(NamedTuple):
    """Shared by variable-length kernels for a batch: starts (n,) int32 in the flattened rows, as in `Batch`."""

    starts: Tensor
    length: int
    window: int | None
    causal: bool = True


class KernelOrder(NamedTuple):
    """torch's fused kernels, the best first; a kernel that does not support a call is skipped."""

    kernels: tuple[SDPBackend, ...]
    causal: bool = True

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Computes attention over whole rows."""
        groups = q.shape[1] != k.shape[1]
        with attention.sdpa_kernel(list(self.kernels), set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale, enable_gqa=groups)


def whole_rows(device: Any, causal: bool = True) -> KernelOrder | None:
    """Returns the order of kernels for attention over whole rows on a device; None for torch's own order."""
    return _order()._replace(causal=causal) if accelerator.is_hopper(torch.device(device)) else None


@cache
def _order() -> KernelOrder:
    """Returns the order for Hopper GPUs, where torch would use FlashAttention-2, which was made for the previous generation.
    cuDNN's kernels are about twice as fast there, and so is FlashAttention-3, which this call activates if it is installed."""
    rest = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    if find_spec("flash_attn_interface") is not None and hasattr(attention, "activate_flash_attention_impl"):
        attention.activate_flash_attention_impl("FA3")
        return KernelOrder((SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *rest))
    return KernelOrder((SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, *rest))


def takes_lengths(width: int | None, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a variable-length kernel supports heads of this width (FlashAttention: Ampere and later, 16 bits)."""
    fits = width is not None and width <= 256 and width % 8 == 0
    return fits and dtype in (torch.bfloat16, torch.float16) and accelerator.takes_lengths(device)


@cache
def _compiled(name: str) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, name), dynamic=False)


def block_mask(documents: Tensor | None, length: int, window: int | None, device: Any, causal: bool = True) -> Any:
    """Returns a `BlockMask`. Compiled, because the eager function builds the whole T x T mask first."""

    def sees(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = visible(q - k, window, causal)
        return seen if documents is None else seen & (documents[b, q] == documents[b, k])

    rows = None if documents is None else documents.shape[0]
    return _compiled("create_block_mask")(sees, rows, None, length, length, device=device)


def placed_block_mask(queries: PositionedTokens, keys: PositionedTokens, window: int | None, causal: bool = True) -> Any:
    """Returns a `BlockMask` for queries and keys in any order."""
    places, documents = queries
    key_places, key_documents = keys

    def sees(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = visible(places[q] - key_places[k], window, causal)
        return seen if documents is None or key_documents is None else seen & (documents[b, q] == key_documents[b, k])

    rows = None if documents is None else documents.shape[0]
    return _compiled("create_block_mask")(sees, rows, None, len(places), len(key_places), device=places.device)


def flex(
    q: Tensor, k: Tensor, v: Tensor, blocks: Any, scale: float, soft_cap: float | None, sinks: Tensor | None = None
) -> Tensor:
    """Computes attention with a `BlockMask`. Heads for which there is no kernel get zeros, which change no score.

    With the log-sum-exp l of a query's scores, a sink s scales what it sees by exp(l) / (exp(l) + exp(s)).
    """
    from torch.nn.attention.flex_attention import flex_attention

    width = v.shape[-1]
    q, k, v = (_widened(x) for x in (q, k, v))

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return soft_cap * (score / soft_cap).tanh()  # type: ignore[operator]

    run = flex_attention if torch.compiler.is_compiling() else _compiled("flex_attention")
    cap = None if soft_cap is None else capped
    options: dict[str, Any] = {"score_mod": cap, "block_mask": blocks, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if sinks is None:
        out = run(q, k, v, **options)
    else:
        from torch.nn.attention.flex_attention import AuxRequest

        out, aux = run(q, k, v, **options, return_aux=AuxRequest(lse=True))
        sums: Any = aux.lse
        out = (out * (sums - sinks.to(sums.dtype).unsqueeze(-1)).sigmoid().unsqueeze(-1)).to(q.dtype)
    return out if out.shape[-1] == width else out[..., :width]


def _widened(x: Tensor) -> Tensor:
    lack = NARROWEST_OF_FLEX - x.shape[-1]
    return x if lack <= 0 else F.pad(x, (0, lack))


def dense(blocks: Any, q: Tensor, k: Tensor) -> Tensor:
    """Returns the boolean mask (B, 1, T, S) of a `BlockMask`."""
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(blocks.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device))


def boundaries(
    documents: Tensor | None,
    length: int,
    window: int | None,
    device: Any,
    starts: Tensor | None = None,
    causal: bool = True,
) -> Boundaries:
    """Returns the boundaries of documents, which must be runs of equal numbers. Without documents, each row is one. Without
    `starts`, the host waits for the device to count them."""
    if documents is None:
        return Boundaries(torch.empty(0, dtype=torch.int32, device=device), length, window, causal)
    if starts is None:
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        places = begins.flatten().nonzero().squeeze(1)  # its size is unknown on the host, so this synchronizes
        starts = torch.cat((places, places.new_full((1,), documents.numel()))).to(torch.int32)
    return Boundaries(starts, length, window, causal)


@cache
def _shares_heads() -> bool:
    """Returns whether torch's variable-length attention takes fewer heads of keys than of queries (torch 2.12 and later)."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


def varlen(q: Tensor, k: Tensor, v: Tensor, shared: Boundaries, scale: float) -> Tensor:
    """Computes attention within each document and window."""
    from torch.nn.attention.varlen import varlen_attn

    rows, _, length, _ = q.shape
    starts = shared.starts
    if not starts.numel():
        starts = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)
    left = -1 if shared.window is None else shared.window - 1
    shares: dict[str, Any] = {}
    if (groups := q.shape[1] // k.shape[1]) > 1:
        if _shares_heads():
            shares["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    window = (left, 0 if shared.causal else -1)
    out = varlen_attn(flat_q, flat_k, flat_v, starts, starts, length, length, scale=scale, window_size=window, **shares)
    assert isinstance(out, Tensor)
    return out.unflatten(0, (rows, length)).transpose(1, 2)


def visible(distance: Tensor, window: int | None, causal: bool = True) -> Tensor:
    """Returns True where a query sees a key `distance` positions before it."""
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance < window)


def chunk_numbers(documents: Tensor | None, positions: Tensor, size: int, longest: int, rows: int) -> Tensor:
    """Returns the number of each token's chunk, (B, T) int64, different for chunks of different documents of a row.

    Args:
        documents: (B, T) document of each token; None: each row is one document.
        positions: (T,) or (B, T) position of each token in its document, in any order.
        size: number of positions of a chunk.
        longest: maximum length of a document.
        rows: B.
    """
    parts = torch.div(positions.to(torch.int64), size, rounding_mode="floor")
    if documents is None:
        return parts.expand(rows, -1)
    return documents.to(torch.int64) * -(-longest // size) + parts


def mask(documents: Tensor | None, length: int, window: int | None, device: Any, causal: bool = True) -> Tensor:
    """Returns the mask (B or 1, 1, T, T) of whole rows, bool, True = visible."""
    row = PositionedTokens(torch.arange(length, device=device), documents)
    return placed_mask(row, row, window, causal)


def placed_mask(queries: PositionedTokens, keys: PositionedTokens, window: int | None, causal: bool = True) -> Tensor:
    """Returns the mask (B or 1, 1, T, S), bool, of T queries and S keys in any order."""
    seen = visible(queries.places[:, None] - keys.places[None, :], window, causal)
    if queries.documents is None or keys.documents is None:
        return seen[None, None]
    return (seen & (queries.documents[:, :, None] == keys.documents[:, None, :])).unsqueeze(1)


STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")
HEADS: tuple[Dim, ...] = ("batch", "sequence", "heads")
KV_HEADS: tuple[Dim, ...] = ("batch", "sequence", "kv_heads")


class Attention(nn.Module):
    """softmax(q k^T * scale) v with rotary positions; each key-value head serves heads / kv_heads query heads. With an
    `output_gate`, the output of each head is multiplied with sigmoid(W x) before the output projection. With `sinks`, one learned
    logit of each head enters the softmax and is dropped. With a `temperature`, a factor on queries grows with their
    position.

    Parallel strategies replace `core`. `window` is the number of positions that one position attends to (None = all), `chunk`
    that of a chunk outside of which it sees nothing, `rotary` the position embedding of this layer, which is unused if it does
    not rotate.
    """

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(
        self,
        context: BlockContext,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: Literal["none", "head", "full", "unit"] = "none",
        scale: float | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
        rotates: bool = True,
        output_gate: bool = False,
        sinks: bool = False,
        temperature: Temperature | None = None,
        causal: bool = True,
        core: AttentionKernel = "auto",
    ) -> None:
        super().__init__()
        self.context = context
        self.qk_norm = qk_norm
        self.output_gate = output_gate
        self.rotates = rotates
        self.soft_cap = soft_cap
        self.core: AttentionCore = LocalAttention(
            core, capped=soft_cap is not None, width=context.head_dim, sinks=sinks, causal=causal
        )
        self.chunk = window if isinstance(window, AttentionChunk) else None
        self.window = window if self.chunk is None else None
        if self.chunk is not None:
            self.mask_key = ("chunk", self.chunk)
        rope = context.rope.of_layer(window is not None)
        self.rotary = Rotary(int(context.head_dim * context.rope.partial), rope, temperature)
        self.scale = scale or 1 / sqrt(context.head_dim)
        heads, kv_heads = context.heads * context.head_dim, context.kv_heads * context.head_dim
        self.q_proj = Linear(context.dim, 2 * heads if output_gate else heads, qkv_bias)
        self.k_proj = Linear(context.dim, kv_heads, qkv_bias)
        self.v_proj = Linear(context.dim, kv_heads, qkv_bias)
        self.o_proj = Linear(heads, context.dim, output_bias)
        self.sinks = unfilled(context.heads) if sinks else None
        norm: Any = context.norm
        widths = {"head": (context.head_dim, context.head_dim), "full": (heads, kv_heads)}.get(qk_norm)
        self.q_norm: nn.Module | None = norm.build(widths[0]) if widths else None
        self.k_norm: nn.Module | None = norm.build(widths[1]) if widths else None

    def forward(self, x: Tensor, rotation: Rotation, attention_mask: Any, cache: LayerCache | None = None) -> Tensor:
        """(B, T, dim) -> (B, T, dim). `attention_mask` is the mask that the core prepared for this batch."""
        q, gate = self._queries(x)
        q = self._normed(tap("attention.q_projected", q), self.q_norm)
        k = self._normed(tap("attention.k_projected", self._heads(self.k_proj(x))), self.k_norm)
        v = tap("attention.v", self._heads(self.v_proj(x)))
        return self.o_proj(self.attend(q, k, v, rotation, attention_mask, cache, gate))

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the projected queries and, if the output is gated, its gate, each (B, heads, T, head_dim). Each head has the
        rows of its query, then those of its gate, so that strategies cut both by heads."""
        projected = self.q_proj(x)
        if not self.output_gate:
            return self._heads(projected), None
        q, gate = projected.unflatten(-1, (-1, 2 * self.context.head_dim)).transpose(1, 2).chunk(2, dim=-1)
        return q, gate

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation,
        attention_mask: Any,
        cache: LayerCache | None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Rotates q and k, if this layer does, attends, and multiplies with the sigmoid of the gate, if there is one: q, k, v
        and gate (B, heads, T, head_dim) -> (B, T, heads * head_dim)."""
        if self.rotates:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if self.rotates and self.qk_norm == "unit":
            norm: Any = self.context.norm
            q, k = unit_rms(q, norm.eps), unit_rms(k, norm.eps)
        if rotation.query_factor is not None:
            q = (q * rotation.query_factor).to(q.dtype)
        q, k = tap("attention.q", q), tap("attention.k", k)
        if cache is not None:
            k, v = cache.update(k, v)
        return self.scored(q, k, v, attention_mask, gate)

    def scored(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, gate: Tensor | None = None) -> Tensor:
        """Attends with rotated q and k, of which the cache's are a part; otherwise like `attend`."""
        options: dict[str, Any] = {} if self.soft_cap is None else {"soft_cap": self.soft_cap}
        if self.sinks is not None:
            options["sinks"] = self.sinks
        out = self.core(q, k, v, attention_mask, self.scale, **options)
        if gate is not None:
            out = out * tap("attention.gate", gate.sigmoid())
        return tap("attention.heads", out).transpose(1, 2).flatten(2)

    def _normed(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is None:
            return x
        return self._heads(norm(x.transpose(1, 2).flatten(2))) if self.qk_norm == "full" else norm(x)

    def _heads(self, x: Tensor) -> Tensor:
        # The number of heads is inferred, because a strategy may have split the projections.
        return x.unflatten(-1, (-1, self.context.head_dim)).transpose(1, 2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module, without those of its norms."""
        enter = self.context.init_std
        return {
            **linear_specs("q_proj", self.q_proj, ("heads", "embed"), enter),
            **linear_specs("k_proj", self.k_proj, ("kv_heads", "embed"), enter),
            **linear_specs("v_proj", self.v_proj, ("kv_heads", "embed"), enter),
            **linear_specs("o_proj", self.o_proj, ("embed", "heads"), self.context.output_std),
            **({} if self.sinks is None else {"sinks": TensorSpec(("heads",), Init("zeros"), "vector")}),
        }

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        specs = {
            "": ModuleSpec((STREAM,), (STREAM,)),
            "q_proj": ModuleSpec((STREAM,), (HEADS,)),
            "k_proj": ModuleSpec((STREAM,), (KV_HEADS,)),
            "v_proj": ModuleSpec((STREAM,), (KV_HEADS,)),
            "o_proj": ModuleSpec((HEADS,), (STREAM,)),
        }
        if self.qk_norm == "full":
            specs |= {"q_norm": ModuleSpec((HEADS,), (HEADS,)), "k_norm": ModuleSpec((KV_HEADS,), (KV_HEADS,))}
        return specs
