"""Classes of modules under tensor parallelism: subclasses of the modules' classes, so that names and other methods stay.

A parameter stays in its slot, as a DTensor on the tp mesh. Read as an attribute, it is this rank's local tensor. So a module
computes on plain tensors in eager mode, in recomputation and in compiled graphs.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge_parallel.placement.collectives import Copy, Gather, Join, Ranks, Scatter, Sum, all_gather
from forge_parallel.placement.shares import chunk
from forge_parallel.transforms.tensor.rules import Role

SEQUENCE = 1
"""Dimension of the residual stream (B, T, embed) that sequence parallelism splits."""


class Split(nn.Module):
    """Mixed into the class of each module that has parameters or a role.

    Attributes:
        tp: the tp ranks.
        sequence: whether the residual stream is split along the sequence outside regions.
        partial: slots of parameters whose gradients have to be summed over tp ranks once per step.
    """

    tp: Ranks
    sequence: bool
    partial: tuple[str, ...]

    def enter(self, x: Tensor) -> Tensor:
        """Converts the residual stream to the whole sequence on every rank."""
        return Gather.apply(x, self.tp, SEQUENCE) if self.sequence else Copy.apply(x, self.tp)

    def leave(self, x: Tensor) -> Tensor:
        """Sums each rank's contribution to the whole sequence into the residual stream."""
        if not self.sequence:
            return Sum.apply(x, self.tp)
        if x.shape[SEQUENCE] % self.tp.size:
            raise ValueError(
                f"{x.shape[SEQUENCE]} tokens cannot be split into {self.tp.size} equal parts for sequence parallelism; choose a "
                "length that parallel.tp divides, or transforms.tensor.sequence_parallel = false"
            )
        return Scatter.apply(x, self.tp, SEQUENCE)


class Region(Split):
    """Gathers the sequence on entry; a `RowParallelLinear` inside scatters it again."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward on the whole sequence."""
        return super().forward(self.enter(x), *args, **kwargs)


class ColumnParallelLinear(Split):
    """A linear layer split along its outputs, whose input is the residual stream itself."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, embed), the same on all ranks -> (B, T, this rank's features)."""
        return super().forward(Copy.apply(x, self.tp))


class GatheredColumnLinear(Split):
    """A linear layer split along its outputs, which are then gathered. All ranks use them equally, so gradients are not
    summed."""

    width: int
    share: int

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, embed), the same on all ranks -> (B, T, all features)."""
        out = super().forward(Copy.apply(x, self.tp))
        padded = torch.nn.functional.pad(out, (0, self.share - out.shape[-1]))
        return Join.apply(padded, self.tp, self.width)


class TensorParallelExperts(Split):
    """Stacked experts, each split along its features. A token's results are summed over its experts, and so over ranks as
    well."""

    def forward(self, *args: Any) -> Tensor:
        """(N, embed), expert indices, weights, the same on all ranks -> (N, embed)."""
        entered = (Copy.apply(x, self.tp) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
        return Sum.apply(super().forward(*entered), self.tp)


class RowParallelLinear(Split):
    """A linear layer split along its inputs. Products of all ranks are summed, and the bias is added once, to the sum."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, this rank's features) -> residual stream."""
        out = self.leave(super().forward(x))
        bias = self._parameters.get("bias")
        return out if bias is None else out + _local(bias).to(out.dtype)


class WholeInputRowLinear(RowParallelLinear):
    """A linear layer split along its inputs, which every rank has whole."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, all features), the same on all ranks -> residual stream."""
        start, length = chunk(x.shape[-1], self.tp.size, self.tp.rank)
        return super().forward(Copy.apply(x, self.tp).narrow(-1, start, length))


class VocabParallelEmbedding(Split):
    """Looks up the embedding rows that this rank holds; other tokens are zero."""

    first: int
    rows: int

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> residual stream."""
        index = tokens - self.first
        mine = (index >= 0) & (index < self.rows)
        return self.leave(super().forward(index.where(mine, 0)) * mine.unsqueeze(-1))


class VocabParallelHead(Split):
    """Computes the loss, or whole logits, from this rank's share of the vocabulary."""

    vocab: int
    share: int

    def forward(self, hidden: Tensor, labels: Tensor | None = None, objective: Any = None) -> Any:
        """Residual stream -> `LossTerms`, the same on every rank, or logits (B, T, vocab)."""
        out = super().forward(self.enter(hidden), labels, objective)
        if not isinstance(out, Tensor) or objective is not None:
            return out
        # All shares are equally large except the last ones, which are padded for the exchange.
        padded = torch.nn.functional.pad(out, (0, self.share - out.shape[-1]))
        return all_gather(padded, self.tp, out.dim() - 1)[..., : self.vocab]


class Across(Split):
    """Gathers all features, of which `copies` neighboring ranks hold the same, and keeps this rank's share of the result."""

    copies: int

    def forward(self, x: Tensor) -> Tensor:
        """(..., this rank's features) -> the same shape."""
        whole = Gather.apply(x, self.tp, x.dim() - 1).unflatten(-1, (self.tp.size, -1))[..., :: self.copies, :]
        return super().forward(whole.flatten(-2)).unflatten(-1, (-1, x.shape[-1]))[..., self.tp.rank // self.copies, :]


class SideInputs(Split):
    """Slices this rank's part out of tensors (B, T, ...) that accompany the residual stream whole."""

    def forward(self, x: Tensor, *args: Any) -> Any:
        """Runs the module's own forward on this rank's part of the sequence."""
        if self.sequence:
            args = tuple(self._own(arg, x.shape[SEQUENCE]) if isinstance(arg, Tensor) else arg for arg in args)
        return super().forward(x, *args)

    def _own(self, whole: Tensor, length: int) -> Tensor:
        return whole.narrow(SEQUENCE, self.tp.rank * length, length)


class SummedHeads(Split):
    """A sum over all heads, from the sums over the heads of each rank. It has no gradient."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        """(B, this rank's heads, T, ...) -> (B, T, ...), equal on all ranks."""
        return Sum.apply(super().forward(x, *args), self.tp)


class KVCopy(Split):
    """Uses the part of one key-value head of weights that every rank holds whole: by name of the weight, its slices."""

    parts: dict[str, tuple[slice, ...]]


_MIXINS = {
    Role.REGION: Region,
    Role.ENTERING: ColumnParallelLinear,
    Role.GATHERED: GatheredColumnLinear,
    Role.EXPERTS: TensorParallelExperts,
    Role.ROW: RowParallelLinear,
    Role.WHOLE_ROW: WholeInputRowLinear,
    Role.SIDE_INPUTS: SideInputs,
    Role.TABLE: VocabParallelEmbedding,
    Role.HEAD: VocabParallelHead,
    Role.KV_COPY: KVCopy,
    Role.HEAD_SUM: SummedHeads,
    Role.ACROSS: Across,
}


@cache
def split_class(
    original: type[nn.Module],
    role: Role,
    parameters: tuple[str, ...],
    summed: bool = False,
    packed: tuple[str, ...] = (),
    copied: tuple[str, ...] = (),
) -> type[nn.Module]:
    """Returns the class of modules of class `original` in a role; the same class for equal arguments, so that compiled blocks
    share a graph.

    With `summed`, gradients of the module's parameters are summed over ranks in each backward. `packed` parameters have one more
    dimension than in the original module. Of `copied` parameters, only `parts` are used.
    """
    mixin = _MIXINS.get(role, Split)
    local: Any = _summed_of if summed else _whole_of
    views = {
        name: property(_hidden if role in (Role.ROW, Role.WHOLE_ROW) and name == "bias" else local(name)) for name in parameters
    }
    views |= {name: property(_packed_of(name)) for name in packed}
    views |= {name: property(_part_of(name)) for name in copied}
    return type(f"{original.__name__}{role.name.title().replace('_', '')}", (mixin, original), views)


def _local(parameter: Tensor, part: tuple[slice, ...] | None = None) -> Tensor:
    # Outside the module's forward the parameter is an FSDP shard on a mesh of more dimensions, which FSDP itself reads.
    if not isinstance(parameter, DTensor) or len(parameter.placements) > 1:
        return parameter
    local = parameter.to_local()
    return local if part is None else local[part]


def _hidden(self: nn.Module) -> Tensor | None:
    """Hides the bias of a row-parallel layer from the layer's own forward, but not from FSDP, which reads its shard."""
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


def _part_of(name: str) -> Any:
    def read(self: Any) -> Tensor | None:
        parameter = self._parameters[name]
        return None if parameter is None else _local(parameter, self.parts[name])

    return read
