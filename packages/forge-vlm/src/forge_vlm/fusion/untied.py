"""Attention over all tokens in their order, with projections and norms of each token's modality."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from forge_core.specs import ModuleSpec, TensorSpec
from forge_models.blocks.attention import HEADS, KV_HEADS, STREAM, Attention
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.rope import Rotation
from forge_vlm.groups import ByModality, Groups

MATRICES = {"q_proj": (STREAM, HEADS), "k_proj": (STREAM, KV_HEADS), "v_proj": (STREAM, KV_HEADS), "o_proj": (HEADS, STREAM)}


class UntiedAttention(Attention):
    """Its matrices and norms are those of one attention per modality; core, window and positions are one."""

    def __init__(self, copies: Mapping[str, nn.Module]) -> None:
        """
        Raises:
            ValueError: an attention that is not of this form.
        """
        nn.Module.__init__(self)
        first = next(iter(copies.values()))
        if type(first) is not Attention:
            raise ValueError(
                f"attention {type(first).__name__} has no form with weights for each modality; set model.attention.name = "
                "'gqa', or model.fusion.name = 'joint_decoder'"
            )
        for name in ("context", "qk_norm", "soft_cap", "core", "window", "rotary", "scale"):
            setattr(self, name, getattr(first, name))
        for part in (*MATRICES, "q_norm", "k_norm"):
            parts = {name: getattr(copy, part) for name, copy in copies.items()}
            setattr(self, part, None if getattr(first, part) is None else ByModality(parts))
        self._specs = first.tensor_specs()

    def forward(  # type: ignore[override]
        self, x: Tensor, rotation: Rotation, attention_mask: Any, cache: LayerCache | None, groups: Groups
    ) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        parts = groups.apart(x)
        made = (
            self._projected(parts, self.q_proj, self.q_norm),
            self._projected(parts, self.k_proj, self.k_norm),
            self._projected(parts, self.v_proj, None),
        )
        q, k, v = (self._heads(groups.together(part, x)) for part in made)
        out = self.attend(q, k, v, rotation, attention_mask, cache)
        projections: Any = self.o_proj
        return projections(out, groups)

    def _projected(self, parts: list[Tensor], matrices: Any, norms: Any) -> list[Tensor]:
        made = [matrix(part) for matrix, part in zip(matrices.values(), parts, strict=True)]
        if norms is None:
            return made
        if self.qk_norm == "full":
            return [norm(part) for norm, part in zip(norms.values(), made, strict=True)]
        return [norm(self._heads(part)).transpose(1, 2).flatten(2) for norm, part in zip(norms.values(), made, strict=True)]

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module, without those of its norms."""
        names: Any = self.q_proj
        split = [(*path.split("."), spec) for path, spec in self._specs.items()]
        return {f"{part}.{name}.{slot}": spec for part, slot, spec in split for name in names}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Modules whose inputs or outputs a strategy may lay out, by name relative to this module."""
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
