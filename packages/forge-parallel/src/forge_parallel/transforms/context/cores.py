"""Attention cores for context parallelism: replaces a model's cores, and defines the core that gathers all keys and values.

`AllGatherAttention` gathers the keys and values of the whole row and attends to them from this rank's queries (Llama 3, 2024,
section 3.3.2).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.batch import Batch, MTPTargets
from forge_core.errors import ForgeError, PlanError
from forge_core.protocols.model import AttentionCore, PositionedCore, PositionedTokens, RecurrentCore
from forge_parallel.accelerator import flex_fault
from forge_parallel.placement.collectives import GatherWide, Ranks
from forge_parallel.placement.shares import exchange_refusal, ring_refusal, ulysses_refusal, whole_rows_refusal
from forge_parallel.transforms.context.heads import ExchangedRecurrence
from forge_parallel.transforms.context.ring import RingAttention
from forge_parallel.transforms.context.row_order import SequenceOrder
from forge_parallel.transforms.context.rows import (
    Alone,
    attend_alone,
    gathered_documents,
    gathered_places,
    held,
    held_places,
    options_of,
    prepare_alone,
)
from forge_parallel.transforms.context.ulysses import UlyssesAttention

if TYPE_CHECKING:
    from forge_core.protocols.model import Context


@dataclass(frozen=True, eq=False)
class AllGatherAttention:
    """Gathers keys and values, and runs the model's own core with the positions of queries and keys.

    For R ranks, rows of S positions, kv_heads heads of head_dim + width numbers and B rows, a rank receives
    (R - 1) / R * B * S * kv_heads * (head_dim + width) numbers per layer in the forward and equally many in the backward, and
    saves the gathered keys and values, R / (R - 1) of that, in between.

    Attributes:
        inner: the model's own core.
        order: which positions each rank holds.
        ranks: the group that shares a row.
    """

    inner: PositionedCore
    order: SequenceOrder
    ranks: Ranks

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Any:
        """Returns what `inner` needs for the T = `length` queries of this rank and the keys of all ranks."""
        order, where = self.order, torch.device(device)
        whole = gathered_documents(documents, self.ranks)
        queries = PositionedTokens(held_places(order, self.ranks.rank, length * order.ranks, where), documents)
        keys = PositionedTokens(gathered_places(order, length * order.ranks, where), whole)
        return self.inner.prepare_placed(queries, keys, window)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> Alone:
        """Prepares calls with a cache, which are not split over ranks."""
        return prepare_alone(self.inner, slots, extent, window)

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
        """q (B, heads, T, head_dim), k (B, kv_heads, T, head_dim), v (B, kv_heads, T, width), sinks (heads,) ->
        (B, heads, T, width)."""
        options = options_of(soft_cap, sinks)
        if isinstance(shared, Alone):
            return attend_alone(self.inner, q, k, v, shared, scale, **options)
        joined = torch.cat((k.movedim(2, 0), v.movedim(2, 0)), dim=-1)
        whole = GatherWide.apply(joined, self.ranks).movedim(0, 2)
        k, v = whole.split([k.shape[-1], v.shape[-1]], dim=-1)
        return self.inner(q, k, v, shared, scale, **options)


def replace_cores(part: nn.Module, context: "Context", kind: str, order: SequenceOrder) -> None:
    """Replaces `core` in all modules of each block of `part` that have one.

    Raises:
        PlanError: a block has no attention core, the model needs whole rows elsewhere, or `kind` does not support a core or
            the number of heads.
    """
    layout = context.topology.layout
    for why in (whole_rows_refusal(context.specs.whole_rows), exchange_refusal(context.specs.units, layout.cp, layout.tp)):
        if why:
            raise PlanError(why)
    ranks = Ranks.of(context.topology.group("cp"))
    replaced = _replacement(context, kind, order)
    for path in context.specs.blocks:
        modules = dict(part.get_submodule(path).named_modules(prefix=path))
        cores = {name: module for name, module in modules.items() if isinstance(getattr(module, "core", None), AttentionCore)}
        recurrent = [module for module in modules.values() if isinstance(getattr(module, "core", None), RecurrentCore)]
        for module in recurrent:
            module.core = ExchangedRecurrence(module.core, order, ranks)  # type: ignore[assignment]
        if not cores and not recurrent:
            raise PlanError(f"parallel.cp: {path} has no attention core to replace; set parallel.cp = 1")
        for name, module in cores.items():
            module.core = replaced(name, module.core)  # type: ignore[assignment]


def _replacement(context: "Context", kind: str, order: SequenceOrder) -> Callable[[str, Any], Any]:
    topology, layout = context.topology, context.topology.layout
    ranks = Ranks.of(topology.group("cp"))
    if kind == "ulysses":
        if why := ulysses_refusal(context.specs.units.get("heads", 0), layout.cp, layout.tp):
            raise PlanError(why)
        return lambda _, core: UlyssesAttention(core, ranks)
    if kind == "ring":
        if why := flex_fault(topology.device):
            raise PlanError(f"transforms.context.kind = 'ring': {why}; use 'all_gather' or 'ulysses'")
        return lambda name, core: RingAttention(_uncapped(name, core), order, ranks)
    return lambda name, core: AllGatherAttention(_placed(name, core), order, ranks)


def cut_rows(batch: Batch, order: SequenceOrder, rank: int, kind: str) -> Batch:
    """Returns the part of each row that `rank` holds, with positions.

    Raises:
        ForgeError: the length cannot be split, or the batch has extra inputs, for which no rule is known.
    """
    ranks, (rows, length) = order.ranks, batch.tokens.shape
    if length % order.pieces:
        raise ForgeError(
            f"rows of {length} tokens cannot be split for parallel.cp = {ranks} and transforms.context.kind = {kind!r}; "
            f"data.sequence_length must be a multiple of {order.pieces}"
        )
    if batch.extras or batch.targets:
        fields = ", ".join(sorted({**batch.extras, **batch.targets}))
        raise ForgeError(f"parallel.cp = {ranks} cannot split {fields} of the batch along rows; set parallel.cp = 1")

    def cut(tensor: Tensor) -> Tensor:
        return held(order, rank, tensor)

    positions = batch.positions
    if positions is None:
        places = held_places(order, rank, length, batch.tokens.device)
        positions = places.to(torch.int32).expand(rows, -1)
    else:
        positions = cut(positions)
    documents = None if batch.documents is None else cut(batch.documents)
    mtp_targets = None if batch.mtp_targets is None else MTPTargets(*map(cut, batch.mtp_targets))
    token_mask = None if batch.token_mask is None else cut(batch.token_mask)
    local = replace(batch, positions=positions, documents=documents, mtp_targets=mtp_targets, token_mask=token_mask)
    return replace(local, tokens=cut(batch.tokens), labels=cut(batch.labels))


def _placed(name: str, core: Any) -> PositionedCore:
    if not isinstance(core, PositionedCore):
        raise PlanError(
            f"transforms.context.kind = 'all_gather': {name}.core ({type(core).__name__}) does not accept key positions, because "
            "it has no prepare_placed; use 'ulysses' or 'ring'"
        )
    return core


def _uncapped(name: str, core: Any) -> AttentionCore:
    if why := ring_refusal(f"{name}.core", getattr(core, "capped", False), getattr(core, "causal", True)):
        raise PlanError(why)
    return core
