"""A model in stages, called like a whole one: for generation, where every rank asks for the next token's logits."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_parallel.pipeline.stages import StageSplit
from forge_parallel.placement.topology import Topology


class StagedModel(nn.Module):
    """What a rank calls in the place of the whole model, with a cache: each stage takes the stream of the one before, and logits
    come to all ranks.

    Every rank of a pipeline makes the same calls. Stages wait for each other: text is made token by token, so there is nothing to
    run meanwhile. It stays usable as long as its model does, inside `ParallelModel.inference(whole_sequences=True)`.

    Args:
        parts: of this rank, in order.
        cut: which stages they are.
        topology: where this rank is.
        compute: dtype of the stream between stages.
        needs: what parts want to be told of a batch, as in `Specs.needs`.

    Raises:
        PlanError: the parts have no `new_cache`, `shape` and `cache_limit`, which generation needs.
    """

    def __init__(
        self, parts: Sequence[nn.Module], cut: StageSplit, topology: Topology, compute: torch.dtype, needs: Collection[str]
    ) -> None:
        super().__init__()
        first: Any = parts[0]
        if missing := [name for name in ("new_cache", "shape", "cache_limit") if not hasattr(first, name)]:
            raise PlanError(
                f"{type(first).__name__} has no {', '.join(missing)}, so it cannot generate; see forge_models.decoder"
            )
        self.parts = nn.ModuleDict({str(stage): part for stage, part in zip(cut.local, parts, strict=True)})
        self.shape = first.shape
        self.compute, self.device, self.needs = compute, topology.device, needs
        self.placement, self.rank, self.group = cut.placement, cut.rank, topology.group("pp")
        self.cache_limit = self._least([part.cache_limit for part in self._own().values()])

    def new_cache(self, batch: int, capacity: int) -> dict[int, Any]:
        """An empty cache for each part: `batch` rows of up to `capacity` tokens."""
        return {stage: part.new_cache(batch, capacity) for stage, part in self._own().items()}

    @torch.no_grad()
    def forward(self, tokens: Tensor, *, positions: Tensor | None, cache: dict[int, Any], at: Tensor | None = None) -> Tensor:
        """Collective over a pipeline: logits (B, T, vocab) of the tokens (B, T) that follow those in the cache, on every rank.

        Args:
            tokens: the same on all ranks.
            positions: (B, T); None = the cache's next ones.
            cache: from `new_cache`; it is extended.
            at: (B,) index of the one token per row whose logits are wanted, which are then (B, 1, vocab).
        """
        own, last = self._own(), len(self.placement) - 1
        stream, logits = (
            tokens,
            self._room((tokens.shape[0], tokens.shape[1] if at is None else 1, self.shape.vocab_size), wide=True),
        )
        for stage, rank in enumerate(self.placement):
            if rank == self.rank:
                given = {"tokens": tokens} if stage > 0 and "tokens" in self.needs else {}
                given |= {"at": at} if stage == last else {}
                stream = own[stage](stream, positions=positions, cache=cache[stage], **given)
            if stage == last:
                if rank == self.rank:
                    logits.copy_(stream)
            elif (there := self.placement[stage + 1]) != rank:
                if rank == self.rank:
                    dist.send(stream.contiguous(), group=self.group, group_dst=there)
                elif there == self.rank:
                    stream = self._room((*tokens.shape, self.shape.dim))
                    dist.recv(stream, group=self.group, group_src=rank)
        dist.broadcast(logits, group=self.group, group_src=self.placement[-1])
        return logits

    def _own(self) -> dict[int, Any]:
        return {int(stage): part for stage, part in self.parts.items()}

    def _room(self, shape: tuple[int, ...], wide: bool = False) -> Tensor:
        dtype = torch.promote_types(self.compute, torch.float32) if wide else self.compute
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _least(self, limits: list[int | None]) -> int | None:
        """Collective over a pipeline: the smallest limit of any stage, so that all ranks refuse the same texts."""
        none = torch.iinfo(torch.int64).max
        mine = min((limit for limit in limits if limit is not None), default=none)
        found = torch.full((), mine, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN, self.group)
        return None if int(found) == none else int(found)
