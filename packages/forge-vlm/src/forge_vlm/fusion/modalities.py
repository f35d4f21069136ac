"""Weights per modality: the mixture of transformers, its block, attention and experts, and the grouping of tokens.

Tokens are sorted by modality once per forward. A module with one copy per modality runs each copy on its own tokens, then all
tokens return to their positions. A copy without tokens runs too, so that the collectives of all ranks match.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_core.specs import ModuleSpec, TensorSpec
from forge_models.blocks.attention import HEADS, KV_HEADS, STREAM, Attention
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.moe.layer import ExpertLayer
from forge_models.blocks.moe.routers import RowIndex
from forge_models.blocks.rope import Rotation
from forge_models.inner_values import inside, tap
from forge_models.shape import BlockContext, DecoderShape, MoEShape
from forge_vlm.context import TEXT, FusionContext
from forge_vlm.fusion.fusion import FusionBase, ImageAttention, Inputs, no_tokens_of, seen_with_images, with_zero_gradient


class MoTFusion(FusionBase):
    """Every modality has its own weights, and all share one attention (Liang et al., 2024, equations 2 and 3)."""

    def __init__(self, context: FusionContext, *, image_attention: ImageAttention = "causal") -> None:
        super().__init__(context)
        self.image_attention: ImageAttention = image_attention

    def block(self, shape: DecoderShape, layer: int) -> nn.Module:
        """See `Fusion`."""
        return ModalityBlock(shape, layer, self.context.modalities.names, untied=True)

    def shared(self, inputs: Inputs) -> dict[str, Any]:
        """Returns the positions of each modality's tokens."""
        modalities = self.context.modalities
        return {"groups": ModalityGroups.of(modalities.of(inputs.tokens), len(modalities.names))}

    def seen(self, mask: Any, inputs: Inputs, window: int | None, x: Tensor) -> Any:
        """See `Fusion`."""
        return seen_with_images(mask, self.image_attention, self.context, inputs, window, x)


def is_real(x: Tensor) -> bool:
    """Whether a tensor has values; tensors on the meta device and those of a dry run do not."""
    return not x.is_meta and type(x) is Tensor


def even_split(total: int, count: int) -> list[int]:
    """Returns the sizes of `count` parts that are as equal as possible, which are assumed for tokens without values."""
    return [total // count + (place < total % count) for place in range(count)]


class ModalityGroups(NamedTuple):
    """Positions of each modality's tokens.

    Attributes:
        at: for each modality, (n,) int64 positions in the flattened (B * T) tokens, ascending.
        back: (B * T,) int64 index of each token in the concatenation of `at`.
        rows: number of rows B.
        whole: number of the modality that has all tokens, so that no token has to move; None if several modalities have tokens.
    """

    at: tuple[Tensor, ...]
    back: Tensor
    rows: int
    whole: int | None = None

    @classmethod
    def of(cls, modality: Tensor, count: int) -> "ModalityGroups":
        """Builds groups from (B, T) numbers of modalities below `count`. The host waits for the sizes, once per forward."""
        flat = modality.flatten()
        sizes = torch.bincount(flat, minlength=count).tolist() if is_real(flat) else even_split(len(flat), count)
        if max(sizes) == len(flat):
            every, whole = torch.arange(len(flat), device=flat.device), sizes.index(len(flat))
            return cls(tuple(every if place == whole else every[:0] for place in range(count)), every, len(modality), whole)
        order = flat.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return cls(tuple(order.split(sizes)), back, len(modality))

    def rows_of(self, place: int) -> RowIndex:
        """Returns the original rows of the tokens of modality number `place`, which `apart` joins into one row."""
        return RowIndex(self.at[place] // (len(self.back) // self.rows), self.rows)

    def apart(self, x: Tensor) -> list[Tensor]:
        """Splits (B, T, ...) into (1, n, ...) for each modality."""
        flat = x.flatten(0, 1)
        if self.whole is not None:
            none = no_tokens_of(x)
            return [flat.unsqueeze(0) if place == self.whole else none for place in range(len(self.at))]
        return [flat.index_select(0, at).unsqueeze(0) for at in self.at]

    def together(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """Merges (1, n, width) of each modality into (B, T, width), with B and T of `like`."""
        if self.whole is not None:
            rest = [part for place, part in enumerate(parts) if place != self.whole]
            return with_zero_gradient(parts[self.whole].squeeze(0).unflatten(0, like.shape[:2]), *rest)
        joined = torch.cat([part.squeeze(0) for part in parts])
        return joined.index_select(0, self.back).unflatten(0, like.shape[:2])


class ByModality(nn.ModuleDict):
    """One copy of a module per modality; a copy takes (1, n, width) tokens. The gradient of a copy without tokens is zero, not
    None."""

    def __init__(self, copies: Mapping[str, nn.Module]) -> None:
        super().__init__(copies)

    @property
    def added(self) -> tuple[str, ...]:
        """Names of the copies that a text model does not have."""
        return tuple(name for name in self if name != TEXT)

    def forward(self, x: Tensor, groups: ModalityGroups) -> Tensor:
        """(B, T, width) -> (B, T, output width of the copies)."""
        parts = zip(self.items(), groups.apart(x), strict=True)
        return groups.together([inside(f"{name}.", copy, part) for (name, copy), part in parts], x)


class ModalityBlock(nn.Module):
    """x + after(attention(before(x))), then the same with the feed-forward part, as `forge_models.blocks.block.Block`.

    The feed-forward part has separate weights per modality; with `untied`, attention and norms too. A `sparse` block has a group
    of experts per modality instead of the feed-forward part.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layer: int,
        names: tuple[str, ...],
        *,
        untied: bool,
        experts: Callable[[Any, Any, Any], nn.Module] = ExpertLayer,
    ) -> None:
        super().__init__()
        if shape.parallel_residual:
            raise ValueError(
                "blocks with weights for each modality add attention before the feed-forward layer; set "
                "model.parallel_residual = false, or model.fusion.name = 'joint_decoder'"
            )
        if "indexer" in (getattr(shape.attention, "feature", ""), getattr(getattr(shape.attention, "full", None), "feature", "")):
            raise ValueError(
                "blocks with weights for each modality do not support attention with an indexer; choose another "
                "model.attention.name, or set model.fusion.name = 'joint_decoder'"
            )
        if getattr(shape.attention, "feature", "") == "compressed_keys":
            raise ValueError(
                "blocks with weights for each modality do not support compressed keys; choose another model.attention.name, or "
                "set model.fusion.name = 'joint_decoder'"
            )
        if shape.attention_only:
            raise ValueError(
                "blocks with weights for each modality have a feed-forward layer each; leave out model.attention_only, or set "
                "model.fusion.name = 'joint_decoder'"
            )
        if shape.layer_scalar:
            raise ValueError(
                "blocks with weights for each modality have no scalar; set model.layer_scalar = false, or model.fusion.name = "
                "'joint_decoder'"
            )
        context = shape.context(layer)
        norm: Any = shape.norm
        attention: Any = shape.attention
        mlp: Any = shape.mlp

        def each(build: Callable[[], nn.Module]) -> nn.Module:
            return ByModality({name: build() for name in names}) if untied else build()

        def norm_of(wanted: bool) -> nn.Module | None:
            return each(lambda: norm.build(shape.dim)) if wanted else None

        placement = shape.norm_placement_at(layer)
        before, after = placement != "post", placement != "pre"
        self.untied, self.multiplier = untied, shape.residual_multiplier
        self.attention_norm = norm_of(before)
        copies = {name: attention.build(context) for name in names} if untied else {}
        self.attention: nn.Module = UntiedAttention(copies) if untied else attention.build(context)
        self.attention_post_norm = norm_of(after)
        self.mlp_norm = norm_of(before)
        moe = shape.moe if shape.has_experts(layer) else None
        self.sparse = moe is not None
        self.mlp: nn.Module = (
            ByModality({name: mlp.build(context) for name in names})
            if moe is None
            else ModalityExperts(names, moe, mlp, context, experts)
        )
        self.mlp_post_norm = norm_of(after)
        self.reads = ("groups", *(("token_mask", "tokens", "documents") if self.sparse else ()))

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        attention_mask: Any,
        cache: LayerCache | None = None,
        groups: ModalityGroups | None = None,
        **routing: Tensor | None,
    ) -> Tensor | tuple[Tensor, Any]:
        """(B, T, dim) -> (B, T, dim); a sparse block also returns the router statistics of its layers of experts.

        Args:
            x: residual stream.
            rotation: rotation of this layer.
            attention_mask: mask that the attention core prepared for this batch.
            cache: keys and values of earlier tokens.
            groups: positions of each modality's tokens.
            routing: further inputs of the experts.
        """
        assert groups is not None
        x = tap("residual", x)
        extra = (groups,) if self.untied else ()
        inner = self.attention(self._normed(x, self.attention_norm, groups), rotation, attention_mask, cache, *extra)
        inner = self._scaled(tap("attention.output", inner), self.attention_post_norm, groups)
        x = tap("residual_mid", x + tap("attention.added", inner))
        inner = self._normed(x, self.mlp_norm, groups)
        if not self.sparse:
            return self._end(x, self.mlp(inner, groups), groups)
        inner, router_stats = self.mlp(inner, groups, cached=cache is not None, **routing)
        return self._end(x, inner, groups), router_stats

    def observed(self, router_stats: tuple[Tensor | None, ...]) -> list[tuple[Any, Tensor]]:
        """Returns the layers of experts with their statistics, without frozen layers, which have none."""
        experts: Any = self.mlp
        layers = zip(experts.layers.values(), router_stats, strict=True)
        return [(layer, statistics) for layer, statistics in layers if statistics is not None]

    def _normed(self, x: Tensor, norm: nn.Module | None, groups: ModalityGroups) -> Tensor:
        if norm is None:
            return x
        return norm(x, groups) if self.untied else norm(x)

    def _end(self, x: Tensor, inner: Tensor, groups: ModalityGroups) -> Tensor:
        added = tap("mlp.added", self._scaled(tap("mlp.output", inner), self.mlp_post_norm, groups))
        return tap("residual_after", x + added)

    def _scaled(self, inner: Tensor, norm: nn.Module | None, groups: ModalityGroups) -> Tensor:
        inner = self._normed(inner, norm, groups)
        return inner if self.multiplier == 1 else inner * self.multiplier

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout of the norms, which strategies may split along the sequence."""
        stream = ModuleSpec((STREAM,), (STREAM,))
        names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
        norms = [(name, norm) for name in names if (norm := getattr(self, name)) is not None]
        if self.untied:
            return {f"{name}.{copy}": stream for name, norm in norms for copy in norm}
        return {name: stream for name, _ in norms}


MATRICES = {"q_proj": (STREAM, HEADS), "k_proj": (STREAM, KV_HEADS), "v_proj": (STREAM, KV_HEADS), "o_proj": (HEADS, STREAM)}


class UntiedAttention(Attention):
    """Attention over all tokens in their order, with separate projections and norms per modality."""

    def __init__(self, copies: Mapping[str, nn.Module]) -> None:
        """
        Raises:
            ValueError: the copies are of another class than `Attention`.
        """
        nn.Module.__init__(self)
        first = next(iter(copies.values()))
        if type(first) is not Attention:
            raise ValueError(
                f"attention {type(first).__name__} cannot have weights for each modality; set model.attention.name = "
                "'gqa', or model.fusion.name = 'joint_decoder'"
            )
        for option, used in (("output_gate", first.output_gate), ("sinks", first.sinks is not None)):
            if used:
                raise ValueError(
                    f"attention with {option} cannot have weights for each modality; set model.attention.{option} = false, or "
                    "model.fusion.name = 'joint_decoder'"
                )
        for name in ("context", "qk_norm", "output_gate", "sinks", "soft_cap", "core", "window", "rotary", "rotates", "scale"):
            setattr(self, name, getattr(first, name))
        for part in (*MATRICES, "q_norm", "k_norm"):
            parts = {name: getattr(copy, part) for name, copy in copies.items()}
            setattr(self, part, None if getattr(first, part) is None else ByModality(parts))
        self._specs = first.tensor_specs()

    def forward(  # type: ignore[override]
        self, x: Tensor, rotation: Rotation, attention_mask: Any, cache: LayerCache | None, groups: ModalityGroups
    ) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        parts = groups.apart(x)
        projected = (
            self._projected(parts, self.q_proj, self.q_norm),
            self._projected(parts, self.k_proj, self.k_norm),
            self._projected(parts, self.v_proj, None),
        )
        q, k, v = (self._heads(groups.together(part, x)) for part in projected)
        out = self.attend(q, k, v, rotation, attention_mask, cache)
        projections: Any = self.o_proj
        return projections(out, groups)

    def _projected(self, parts: list[Tensor], matrices: Any, norms: Any) -> list[Tensor]:
        projected = [matrix(part) for matrix, part in zip(matrices.values(), parts, strict=True)]
        if norms is None:
            return projected
        if self.qk_norm == "full":
            return [norm(part) for norm, part in zip(norms.values(), projected, strict=True)]
        return [norm(self._heads(part)).transpose(1, 2).flatten(2) for norm, part in zip(norms.values(), projected, strict=True)]

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the parameters by name relative to this module, without those of its norms."""
        names: Any = self.q_proj
        split = [(*path.split("."), spec) for path, spec in self._specs.items()]
        return {f"{part}.{name}.{slot}": spec for part, slot, spec in split for name in names}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may lay out, by name relative to this module."""
        names: Any = self.q_proj
        specs = {"": ModuleSpec((STREAM,), (STREAM,))}
        specs |= {f"{part}.{name}": ModuleSpec((a,), (b,)) for part, (a, b) in MATRICES.items() for name in names}
        if self.qk_norm == "full":
            for name in names:
                specs |= {
                    f"q_norm.{name}": ModuleSpec((HEADS,), (HEADS,)),
                    f"k_norm.{name}": ModuleSpec((KV_HEADS,), (KV_HEADS,)),
                }
        return specs


class ModalityExperts(nn.Module):
    """shared(x) + the experts of each token's modality (MoMa, Lin et al., 2024).

    Each of `layers` is called like `ExpertLayer`, with the tokens of its modality as one row. Layers that need it also receive
    the original row or sequence of each token.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        shape: MoEShape,
        mlp: Any,
        context: BlockContext,
        experts: Callable[[Any, Any, Any], nn.Module],
    ) -> None:
        super().__init__()
        if shape.branch_norms:
            raise ValueError("experts of modalities have no norms of their own; set model.moe.branch_norms = false")
        if shape.latent_dim is not None:
            raise ValueError("experts of modalities have the width of the model; remove model.moe.latent_dim")
        if shape.shared_gate:
            raise ValueError("shared experts of all modalities have no gate; set model.moe.shared_gate = false")
        self.layers = nn.ModuleDict({name: experts(replace(shape, shared=0), mlp, context) for name in names})
        shared = shape.shared * shape.ffn_dim
        self.shared: nn.Module | None = mlp.build(replace(context, ffn_dim=shared)) if shared else None
        self.balances_rows = bool(shape.losses.sequence)

    @property
    def added(self) -> tuple[str, ...]:
        """Names of the layers that a text model does not have."""
        return tuple(f"layers.{name}" for name in self.layers if name != TEXT)

    def forward(
        self,
        x: Tensor,
        groups: ModalityGroups,
        token_mask: Tensor | None = None,
        tokens: Tensor | None = None,
        documents: Tensor | None = None,
        cached: bool = False,
    ) -> tuple[Tensor, tuple[Tensor | None, ...] | None]:
        """(B, T, dim) -> ((B, T, dim), router statistics of each layer, or None if it is frozen; None in evaluation)."""
        parts = groups.apart(x)
        masks = [None] * len(parts) if token_mask is None else groups.apart(token_mask)
        ids = [None] * len(parts) if tokens is None else groups.apart(tokens)
        takes = any(hasattr(layer, "takes_sequences") for layer in self.layers.values())
        sources: list[Any] = [None] * len(parts)
        if takes:
            sources = groups.apart(_sequences(x, documents))
        elif self.balances_rows:
            sources = [groups.rows_of(place) for place in range(len(parts))]
        outputs, statistics = [], []
        for (name, layer), part, mask, known, source in zip(self.layers.items(), parts, masks, ids, sources, strict=True):
            more = () if source is None else (source,)
            y, router_stats = inside(f"{name}.", layer, part, mask, known, cached, *more)
            outputs.append(y)
            statistics.append(router_stats)
        y = groups.together(outputs, x)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, tuple(statistics) if self.training else None


def _sequences(x: Tensor, documents: Tensor | None) -> Tensor:
    """Returns (B, T) int64: the number of each token's document (or row, without documents), ascending in flattened order."""
    begins = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
    begins[:, 0] = 1
    if documents is not None:
        begins[:, 1:] = (documents[:, 1:] != documents[:, :-1]).long()
    return begins.flatten().cumsum(0).view_as(begins) - 1
