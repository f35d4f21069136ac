"""Ring attention: keys and values are passed around the ranks, and each rank attends to one block at a time (Liu et al., 2023).

Each rank holds two pieces of a row, in the balanced order. Of an earlier rank's keys, all queries see the first piece; of a later
rank's keys, the second piece of queries sees all. So every step but the first is half a square without a mask, on every rank
(balancing the pieces is an idea of Brandon et al., 2023).

The compiler and recomputation see forward and backward as one operator each, so blocks in transit are neither saved nor sent
twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.protocols.model import AttentionCore, PositionedTokens
from forge_parallel.placement.collectives import Ranks
from forge_parallel.torch_private import resolve_process_group
from forge_parallel.transforms.context import flash_cpu, flex_blocks
from forge_parallel.transforms.context.row_order import SequenceOrder
from forge_parallel.transforms.context.rows import Alone, attend_alone, gathered_documents, held_places, options_of, prepare_alone


class Masks(NamedTuple):
    """The masks of a batch, shared by all layers.

    Attributes:
        tensors: the masks of all steps, one after the other.
        counts: number of tensors of each step; 0: nothing is masked (first step: causal), -1: no query sees a key.
    """

    tensors: list[Tensor]
    counts: list[int]


class RingStep(NamedTuple):
    """The queries (rows) of a rank that see keys (columns) in a step, as slices of its T positions."""

    rows: slice
    columns: slice
    source: int


def steps(rank: int, ranks: int, length: int) -> Iterator[RingStep]:
    """Yields the steps of `rank` of `ranks` with `length` positions each, one for the keys of each rank."""
    for index in range(ranks):
        source = (rank - index) % ranks
        rows = slice(length // 2, length) if source > rank else slice(0, length)
        columns = slice(0, length // 2) if source < rank else slice(0, length)
        yield RingStep(rows, columns, source)


@dataclass(frozen=True, eq=False)
class RingAttention:
    """Online softmax over the blocks of all ranks.

    For R ranks, rows of S positions, B rows and n = B * S / R * kv_heads * (head_dim + width), a rank receives (R - 1) * n
    numbers per layer in the forward, again in the backward, and equally many for the gradients, in at least fp32. It saves only
    its own q, k, v, output and one number per query and head. While one block is computed, the next one is received.

    Soft caps are not supported.

    Attributes:
        inner: the model's own core, for calls with a cache.
        order: which positions each rank holds; balanced.
        ranks: the group that shares a row.
    """

    inner: AttentionCore
    order: SequenceOrder
    ranks: Ranks

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Masks:
        """Returns the masks of this rank's T = `length` queries for each block."""
        where, rank, ranks = torch.device(device), self.ranks.rank, self.ranks.size
        kernel = _kernel(where)
        whole = gathered_documents(documents, self.ranks)
        if window is not None and window >= ranks * length:
            window = None
        held = [
            PositionedTokens(held_places(self.order, source, ranks * length, where), _share(whole, source, length))
            for source in range(ranks)
        ]
        tensors: list[Tensor] = []
        counts = []
        for step in steps(rank, ranks, length):
            own = step.source == rank
            # Distance of the nearest query and key; in the first step, a query sees itself.
            apart = (abs(step.source - rank) - 1) * (length // 2) + 1
            if window is not None and apart >= window:
                counts.append(-1)
            elif whole is None and window is None and not (own and kernel.CAUSAL_IS_A_MASK):
                counts.append(0)
            else:
                mask = kernel.mask_between(_cut(held[rank], step.rows), _cut(held[step.source], step.columns), window)
                tensors += mask
                counts.append(len(mask))
        return Masks(tensors, counts)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> Alone:
        """Prepares calls with a cache, which are not split over ranks."""
        return prepare_alone(self.inner, slots, extent, window)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, shared: Masks | Alone, scale: float, *, sinks: Tensor | None = None
    ) -> Tensor:
        """q (B, heads, T, head_dim), k (B, kv_heads, T, head_dim), v (B, kv_heads, T, width), sinks (heads,) ->
        (B, heads, T, width)."""
        if isinstance(shared, Alone):
            return attend_alone(self.inner, q, k, v, shared, scale, **options_of(None, sinks))
        ranks = self.ranks
        return attend(q, k, v, sinks, shared.tensors, shared.counts, scale, ranks.rank, ranks.size, ranks.name)[0]


def _kernel(device: torch.device) -> Any:
    """Returns the module with `mask_between`, `forward` and `backward` for one block."""
    return flash_cpu if device.type == "cpu" else flex_blocks


def _share(documents: Tensor | None, rank: int, length: int) -> Tensor | None:
    return None if documents is None else documents[:, rank * length : (rank + 1) * length]


def _cut(held: PositionedTokens, span: slice) -> PositionedTokens:
    return PositionedTokens(held.places[span], None if held.documents is None else held.documents[:, span])


def _split(masks: list[Tensor], counts: list[int]) -> list[list[Tensor] | None]:
    """Returns the tensors of each step; None if no query sees a key."""
    rest = iter(masks)
    return [None if count < 0 else [next(rest) for _ in range(count)] for count in counts]


class _Journey:
    """Sends a tensor to the next rank and receives one of the same shape from the previous rank."""

    def __init__(self, tensor: Tensor, rank: int, ranks: int, group: str) -> None:
        self.sent, self.received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        members: Any = resolve_process_group(group)  # type: ignore[arg-type]
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, group=members, group_peer=(rank + 1) % ranks),
                dist.P2POp(dist.irecv, self.received, group=members, group_peer=(rank - 1) % ranks),
            ]
        )

    def end(self) -> Tensor:
        """Returns the received tensor."""
        for work in self.works:
            work.wait()
        return self.received


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.library.custom_op("forge_parallel::ring_attention", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    masks: list[Tensor],
    counts: list[int],
    scale: float,
    rank: int,
    ranks: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Returns (B, heads, T, width), and the log-sum-exp of each query's scores over all keys and its sink, (B, heads, T), at
    least fp32."""
    out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=_wide(q.dtype))
    sums = q.new_full(q.shape[:3], float("-inf"), dtype=_wide(q.dtype))
    held = torch.cat((k, v), dim=-1)
    for index, (step, mask) in enumerate(zip(steps(rank, ranks, q.shape[2]), _split(masks, counts), strict=True)):
        journey = None if index == ranks - 1 else _Journey(held, rank, ranks, group)
        keys, values = held[:, :, step.columns].split([k.shape[-1], v.shape[-1]], dim=-1)
        part = None if mask is None else _kernel(q.device).forward(q[:, :, step.rows], keys, values, mask, index == 0, scale)
        if part is not None:
            _merge(out[:, :, step.rows], sums[:, :, step.rows], *part)
        if journey is not None:
            held = journey.end()
    if sinks is not None:  # a score without a value
        total = torch.logaddexp(sums, sinks.to(sums.dtype).unsqueeze(-1))
        out.mul_((sums - total).exp_().unsqueeze(-1))
        sums = total
    return out.to(q.dtype), sums


def _merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Merges the result of another block in place: the softmax over both is their mean, weighted by the sums of exponentials.

    The first block contains each query's own key, so `sums` is finite after the first merge.
    """
    total = torch.logaddexp(sums, part_sums)
    out.mul_((sums - total).exp_().unsqueeze(-1)).add_(part * (part_sums - total).exp_().unsqueeze(-1))
    sums.copy_(total)


@torch.library.custom_op("forge_parallel::ring_attention_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    masks: list[Tensor],
    counts: list[int],
    scale: float,
    rank: int,
    ranks: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v. Gradients of keys and values are passed along with them and arrive back at the end,
    where this rank's own share is added."""
    grad = grad.contiguous()
    dq = torch.zeros_like(q, dtype=_wide(q.dtype), memory_format=torch.contiguous_format)
    held = torch.cat((k, v), dim=-1)
    collected = torch.zeros_like(held, dtype=_wide(k.dtype))
    collecting: _Journey | None = None
    own: tuple[Tensor, ...] | None = None
    for index, (step, mask) in enumerate(zip(steps(rank, ranks, q.shape[2]), _split(masks, counts), strict=True)):
        journey = None if index == ranks - 1 else _Journey(held, rank, ranks, group)
        keys, values = held[:, :, step.columns].split([k.shape[-1], v.shape[-1]], dim=-1)
        rows = step.rows
        part = None
        if mask is not None:
            mine = grad[:, :, rows], q[:, :, rows], keys, values, out[:, :, rows], sums[:, :, rows]
            part = _kernel(q.device).backward(*mine, mask, index == 0, scale)
        if part is not None:
            dq[:, :, rows] += part[0]
        if index == 0:
            own = None if part is None else part[1:]
        else:
            if collecting is not None:
                collected = collecting.end()
            if part is not None:
                collected[:, :, step.columns] += torch.cat(part[1:], dim=-1)
            collecting = _Journey(collected, rank, ranks, group)
        if journey is not None:
            held = journey.end()
    if collecting is not None:
        collected = collecting.end()
    if own is not None:
        collected += torch.cat(own, dim=-1)
    dk, dv = collected.to(k.dtype).split([k.shape[-1], v.shape[-1]], dim=-1)
    return dq.to(q.dtype), dk.contiguous(), dv.contiguous()


@attend.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=_wide(q.dtype))


@attend_backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, masks, ctx.counts, *ctx.where = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, *masks)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, sinks, out, sums, *masks = ctx.saved_tensors
    # With p the weights including the sink's, the gradient of a score is p (dp - sum of p dp), and that sum is grad . out. So
    # blocks of keys need nothing else than `out` and `sums`, and the sink's own dp is 0.
    grads = attend_backward(grad, q, k, v, out, sums, masks, ctx.counts, *ctx.where)
    of_sinks = None
    if sinks is not None:
        weights = (sinks.to(sums.dtype).unsqueeze(-1) - sums).exp()
        of_sinks = -(weights * (grad.to(sums.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
    return *grads, of_sinks, [None] * len(masks), None, *([None] * len(ctx.where))


attend.register_autograd(_differentiate, setup_context=_keep)
