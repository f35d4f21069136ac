"""What modules become under tensor parallelism: a subclass of their class, so that no name and no other method changes.

A parameter stays in its slot, as a DTensor on the tp mesh. Reading it as an attribute gives this rank's local tensor, so a
module computes on plain tensors, in eager mode, inside recomputation and inside a compiled graph alike.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge_parallel.placement.collectives import Copy, Gather, Join, Ranks, Scatter, Sum, all_gather
from forge_parallel.transforms.tensor.rules import Role

SEQUENCE = 1
"""Dimension of the residual stream (B, T, embed) that sequence parallelism cuts."""


class Split(nn.Module):
    """A module whose place in the split `tp` says. Mixed into the class of each module that has parameters or a role.

    Attributes:
        tp: the ranks.
        sequence: whether the residual stream is cut along the sequence outside regions.
        partial: slots of parameters whose gradients are complete only as a sum over tp ranks, made once a step.
    """

    tp: Ranks
    sequence: bool
    partial: tuple[str, ...]

    def enter(self, x: Tensor) -> Tensor:
        """From the residual stream to the whole sequence on every rank."""
        return Gather.apply(x, self.tp, SEQUENCE) if self.sequence else Copy.apply(x, self.tp)

    def leave(self, x: Tensor) -> Tensor:
        """From each rank's summand of the whole sequence to the residual stream."""
        if not self.sequence:
            return Sum.apply(x, self.tp)
        if x.shape[SEQUENCE] % self.tp.size:
            raise ValueError(
                f"{x.shape[SEQUENCE]} tokens cannot be cut into {self.tp.size} equal parts for sequence parallelism; choose a "
                "length that parallel.tp divides, or transforms.tensor.sequence_parallel = false"
            )
        return Scatter.apply(x, self.tp, SEQUENCE)


class Region(Split):
    """Gathers the sequence on entry; a `RowParallelLinear` inside scatters it again."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, on the whole sequence."""
        return super().forward(self.enter(x), *args, **kwargs)


class ColumnParallelLinear(Split):
    """A column that takes the residual stream itself."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, embed), the same on all ranks -> (B, T, this rank's features)."""
        return super().forward(Copy.apply(x, self.tp))


class GatheredColumnLinear(Split):
    """A column whose outputs every rank gets whole, and uses for the same: the gradient is not summed."""

    width: int
    share: int

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, embed), the same on all ranks -> (B, T, all features)."""
        out = super().forward(Copy.apply(x, self.tp))
        padded = torch.nn.functional.pad(out, (0, self.share - out.shape[-1]))
        return Join.apply(padded, self.tp, self.width)


class TensorParallelExperts(Split):
    """Stacked experts, each cut along its features. What a token's experts make of it is summed over them, so also over ranks."""

    def forward(self, *args: Any) -> Tensor:
        """(N, embed), expert indices, weights, the same on all ranks -> (N, embed)."""
        entered = (Copy.apply(x, self.tp) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
        return Sum.apply(super().forward(*entered), self.tp)


class RowParallelLinear(Split):
    """Sums the products of all ranks. The bias is added once, to the sum."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, this rank's features) -> residual stream."""
        out = self.leave(super().forward(x))
        bias = self._parameters.get("bias")
        return out if bias is None else out + _local(bias).to(out.dtype)


class VocabParallelEmbedding(Split):
    """Looks up the rows that this rank has; other tokens give zero."""

    first: int
    rows: int

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> residual stream."""
        index = tokens - self.first
        mine = (index >= 0) & (index < self.rows)
        return self.leave(super().forward(index.where(mine, 0)) * mine.unsqueeze(-1))


class VocabParallelHead(Split):
    """The loss, or whole logits, from this rank's share of the vocabulary."""

    vocab: int
    share: int

    def forward(self, hidden: Tensor, labels: Tensor | None = None, objective: Any = None) -> Any:
        """Residual stream -> `LossTerms`, the same on every rank, or logits (B, T, vocab)."""
        out = super().forward(self.enter(hidden), labels, objective)
        if not isinstance(out, Tensor) or objective is not None:
            return out
        # Shares are equal but the last ones: those are filled up for the exchange.
        padded = torch.nn.functional.pad(out, (0, self.share - out.shape[-1]))
        return all_gather(padded, self.tp, out.dim() - 1)[..., : self.vocab]


class Across(Split):
    """Gathers all features, of which `copies` neighboring ranks have the same, and keeps this rank's share of the result."""

    copies: int

    def forward(self, x: Tensor) -> Tensor:
        """(..., this rank's features) -> the same shape."""
        whole = Gather.apply(x, self.tp, x.dim() - 1).unflatten(-1, (self.tp.size, -1))[..., :: self.copies, :]
        return super().forward(whole.flatten(-2)).unflatten(-1, (-1, x.shape[-1]))[..., self.tp.rank // self.copies, :]


class SideInputs(Split):
    """Takes its own part of tensors (B, T, ...) that come whole with the residual stream."""

    def forward(self, x: Tensor, *args: Any) -> Any:
        """As the module's own, on this rank's part of the sequence."""
        if self.sequence:
            args = tuple(self._own(arg, x.shape[SEQUENCE]) if isinstance(arg, Tensor) else arg for arg in args)
        return super().forward(x, *args)

    def _own(self, whole: Tensor, length: int) -> Tensor:
        return whole.narrow(SEQUENCE, self.tp.rank * length, length)


class KVCopy(Split):
    """Uses the rows of one key-value head of a whole weight."""

    rows: slice


_MIXINS = {
    Role.REGION: Region,
    Role.ENTERING: ColumnParallelLinear,
    Role.GATHERED: GatheredColumnLinear,
    Role.EXPERTS: TensorParallelExperts,
    Role.ROW: RowParallelLinear,
    Role.SIDE_INPUTS: SideInputs,
    Role.TABLE: VocabParallelEmbedding,
    Role.HEAD: VocabParallelHead,
    Role.KV_COPY: KVCopy,
    Role.ACROSS: Across,
}


@cache
def split_class(
    original: type[nn.Module], role: Role, parameters: tuple[str, ...], summed: bool = False, packed: tuple[str, ...] = ()
) -> type[nn.Module]:
    """The class of a module of class `original` in a role. One class per kind, so that compiled blocks share a graph.

    With `summed`, gradients of the module's parameters are summed over ranks inside each backward. `packed` parameters have a
    dimension more than their module knows.
    """
    mixin = _MIXINS.get(role, Split)
    local: Any = _rows_of if role is Role.KV_COPY else _summed_of if summed else _whole_of
    views = {name: property(_hidden if role is Role.ROW and name == "bias" else local(name)) for name in parameters}
    views |= {name: property(_packed_of(name)) for name in packed}
    return type(f"{original.__name__}{role.name.title().replace('_', '')}", (mixin, original), views)


def _local(parameter: Tensor, rows: slice | None = None) -> Tensor:
    # Outside of its module's forward FSDP shows a shard, on a mesh of more dimensions, and asks for that shard itself.
    if not isinstance(parameter, DTensor) or len(parameter.placements) > 1:
        return parameter
    local = parameter.to_local()
    return local if rows is None else local[rows]


def _hidden(self: nn.Module) -> Tensor | None:
    """A row's bias: its module's own forward must not add it, but FSDP still has to find its shard."""
    parameter = self._parameters["bias"]
    return parameter if isinstance(parameter, DTensor) and len(parameter.placements) > 1 else None


def _whole_of(name: str) -> Any:
    def read(self: nn.Module) -> Tensor | None:
        parameter = self._parameters[name]
        return None if parameter is None else _local(parameter)

    return read


def _summed_of(name: str) -> Any:
    def read(self: Any) -> Tensor | None:
        parameter = self._parameters[name]
        local = None if parameter is None else _local(parameter)
        return local if local is None or local is parameter else Copy.apply(local, self.tp)

    return read


def _packed_of(name: str) -> Any:
    def read(self: nn.Module) -> Tensor | None:
        parameter = self._parameters[name]
        local = None if parameter is None else _local(parameter)
        return local if local is None or local is parameter else local.flatten(1, 2)

    return read


def _rows_of(name: str) -> Any:
    def read(self: Any) -> Tensor | None:
        parameter = self._parameters[name]
        return None if parameter is None else _local(parameter, self.rows)

    return read
