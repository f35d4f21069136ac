"""Experts in groups, one group for each modality (MoMa, Lin et al., 2024); and experts that all tokens share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forge_models.inner_values import inside
from forge_models.shape import BlockContext, MoEShape
from forge_vlm.groups import Groups
from forge_vlm.modality import TEXT


class ModalityExperts(nn.Module):
    """shared(x) + the experts of its modality for each token. `layers` are called as
    `forge_models.blocks.moe.layer.ExpertLayer` is, with the tokens of their modality as one row, and where the layers need them
    the rows or sequences that they come from."""

    def __init__(
        self,
        names: tuple[str, ...],
        shape: MoEShape,
        mlp: Any,
        context: BlockContext,
        experts: Callable[[Any, Any, Any], nn.Module],
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: experts(replace(shape, shared=0), mlp, context) for name in names})
        shared = shape.shared * shape.ffn_dim
        self.shared: nn.Module | None = mlp.build(replace(context, ffn_dim=shared)) if shared else None
        self.balances_rows = bool(shape.losses.sequence)

    @property
    def added(self) -> tuple[str, ...]:
        """Modules in it that a text model does not have."""
        return tuple(f"layers.{name}" for name in self.layers if name != TEXT)

    def forward(
        self,
        x: Tensor,
        groups: Groups,
        token_mask: Tensor | None = None,
        tokens: Tensor | None = None,
        documents: Tensor | None = None,
        cached: bool = False,
    ) -> tuple[Tensor, tuple[Tensor | None, ...] | None]:
        """(B, T, dim) -> ((B, T, dim), the router statistics of each layer, None of one that is frozen; None in evaluation)."""
        parts = groups.apart(x)
        masks = [None] * len(parts) if token_mask is None else groups.apart(token_mask)
        ids = [None] * len(parts) if tokens is None else groups.apart(tokens)
        takes = any(hasattr(layer, "takes_sequences") for layer in self.layers.values())
        sources: list[Any] = [None] * len(parts)
        if takes:
            sources = groups.apart(_sequences(x, documents))
        elif self.balances_rows:
            sources = [groups.rows_of(place) for place in range(len(parts))]
        made, found = [], []
        for (name, layer), part, mask, known, source in zip(self.layers.items(), parts, masks, ids, sources, strict=True):
            more = () if source is None else (source,)
            y, router_stats = inside(f"{name}.", layer, part, mask, known, cached, *more)
            made.append(y)
            found.append(router_stats)
        y = groups.together(made, x)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, tuple(found) if self.training else None


def _sequences(x: Tensor, documents: Tensor | None) -> Tensor:
    """(B, T) int64, ascending over the flattened tokens: which sequence, a row or a document of one, each token belongs to."""
    begins = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
    begins[:, 0] = 1
    if documents is not None:
        begins[:, 1:] = (documents[:, 1:] != documents[:, :-1]).long()
    return begins.flatten().cumsum(0).view_as(begins) - 1
