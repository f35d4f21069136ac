"""What recurrent layers have in common: the core that applies convolutions and a rule to whole rows, with or without a cache."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from forge_models.blocks.cache import LayerCache
from forge_models.blocks.chunks import document_runs
from forge_models.blocks.short_conv import causal_filter
from forge_models.inner_values import tap


class Rule(Protocol):
    """Reads and writes the states of all heads along whole rows."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        skip: Tensor | None,
        documents: Tensor | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs (B, T, heads, value width), and the state after the last token.

        Args:
            q, k, v: streams behind their convolutions; see `RecurrentCore.recur`.
            g, beta, skip: see `RecurrentCore.recur`.
            documents: what the core prepared.
            state: (B, heads, key width, value width) state before the first token; zeros if None.
        """
        ...


class LocalRecurrence:
    """Convolutions and a rule over whole rows on one device, with or without a cache."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Tensor | None:
        """Returns the number of the document of each position, (B, T); None if each row is one document."""
        del length, window, device
        return None if documents is None else document_runs(documents)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> None:
        """Prepares nothing: the cache has the state."""
        del slots, extent, window

    def recur(
        self,
        streams: Sequence[Tensor],
        filters: Sequence[tuple[Tensor, Tensor | None]],
        g: Tensor,
        beta: Tensor,
        shared: Tensor | None,
        cache: LayerCache | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """Returns the outputs of all heads, (B, T, heads, value width); see `RecurrentCore`."""
        state: Tensor | None = None
        after: list[Tensor] = []
        flat = [x.flatten(2) for x in streams]
        if cache is None:
            made = [causal_filter(x, weight, shared, bias) for x, (weight, bias) in zip(flat, filters, strict=True)]
        else:
            before, state = cache.recurrent
            made, counts = [], cache.counts(g.shape[1])
            valid = (torch.arange(g.shape[1], device=g.device) < counts[:, None]).unsqueeze(-1)
            beta = beta.where(valid, 0.0)  # padding leaves the state as it is
            g = g.where(valid if g.dim() == valid.dim() else valid.unsqueeze(-1), 0.0)
            for index, (x, (weight, bias)) in enumerate(zip(flat, filters, strict=True)):
                width = weight.shape[1] - 1
                earlier = x.new_zeros(x.shape[0], width, x.shape[2]) if before is None else before[index]
                joined = torch.cat((earlier, x), 1)
                made.append(causal_filter(joined, weight, None, bias)[:, width:])
                places = counts[:, None] + torch.arange(width, device=x.device)
                after.append(joined.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[2])))
        q, k, v = (x.unflatten(-1, stream.shape[2:]) for x, stream in zip(made, streams, strict=True))
        out, state = self.rule(q, k, v, g, beta, skip, shared, state)
        if cache is not None:
            cache.recurrent = tuple(after), state
        return out


def tap_heads(name: str, x: Tensor) -> Tensor:
    """Taps (B, T, heads, width) with heads before positions, as attention does."""
    return tap(name, x.transpose(1, 2)).transpose(1, 2)
