"""The specs of a model: its description as data.

The spec of a parameter has the logical meaning of its dimensions, its initialization and its optimizer group. Rule tables map
logical dimensions to mesh axes, so a new strategy is a new table and never an edit to a model.

The random initial values of a tensor are a function of a seed and the tensor's global name, the same in every package. A tensor
is flattened and split into blocks of `BLOCK` elements. Each block has its own counter-based random stream, so a rank that holds
a part of a tensor draws only the blocks that overlap this part. On a CPU the stream is numpy's Philox with the tensor's key and
the block as counter; on CUDA it is torch's Philox, seeded for each block. Each matrix of a stack counts as a separate tensor.
Uniform values are 2 u - 1 times `Init.bound`, where u in [0, 1) are fp32 samples of the same stream; other values are functions
of 2 u - 1 (`Init.of`), `choices` of those of a whole row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import log, sqrt
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Dim = Literal["batch", "sequence", "embed", "heads", "kv_heads", "state_heads", "ffn", "expert", "vocab"] | None
"""Logical meaning of one dimension; None if no strategy may split it. `state_heads` are the heads of a recurrent layer."""

Group = Literal["matrix", "embedding", "head", "router", "vector"]
"""Optimizer group: hidden matrices; embedding tables; the output projection; routers of experts; norms, biases, other 1-D tensors
and the filters of convolutions."""


@dataclass(frozen=True)
class Init:
    """Initialization of a tensor: `normal` or `uniform` with mean 0 and `std`, `zeros` or `ones`; or between `low` and `high`:
    `log`, the logarithm of a uniform value, or `softplus`, the x whose ln(1 + e^x) is log-uniform. `choices` are different
    integers in each row (the last dimension), from 0 to `choices` - 1, each equally likely."""

    kind: Literal["normal", "uniform", "zeros", "ones", "log", "softplus", "choices"]
    std: float = 0.0
    low: float = 0.0
    high: float = 0.0
    choices: int = 0

    def __post_init__(self) -> None:
        if self.between != (0 < self.low < self.high):
            raise ValueError(f"Init({self.kind!r}, low={self.low}, high={self.high}): log and softplus require 0 < low < high")
        if (self.kind in ("normal", "uniform")) != (self.std > 0):
            raise ValueError(
                f"Init({self.kind!r}, std={self.std}): normal and uniform require std > 0, zeros and ones require std = 0"
            )
        if (self.kind == "choices") != (self.choices > 0):
            raise ValueError(f"Init({self.kind!r}, choices={self.choices}): only choices have a number of choices, at least 1")

    @property
    def between(self) -> bool:
        """Whether values are functions of uniform values between `low` and `high`."""
        return self.kind in ("log", "softplus")

    @property
    def drawn(self) -> bool:
        """Whether values are random."""
        return self.between or self.kind in ("normal", "uniform", "choices")

    @property
    def bound(self) -> float:
        """Half of the width of a uniform distribution with this `std`."""
        return sqrt(3) * self.std

    def of(self, samples: Any) -> Any:
        """Returns the values (a tensor) that belong to fp32 samples of the random stream, in the same dtype; for `choices`, whose
        samples are whole rows (..., n), in int64."""
        if self.kind == "choices":
            return self._choices((samples.double() + 1) / 2)
        if not self.between:
            return samples * (self.bound if self.kind == "uniform" else self.std)
        share = (samples.double() + 1) / 2
        if self.kind == "log":
            return (self.low + share * (self.high - self.low)).log().to(samples.dtype)
        value = (log(self.low) + share * log(self.high / self.low)).exp()
        return (value + (-(-value).expm1()).log()).to(samples.dtype)

    def _choices(self, share: Any) -> Any:
        """Returns for each row of `share` (..., n), between 0 and 1, the element of this share among those not chosen yet."""
        values = (share * 0).long()
        for at in range(share.shape[-1]):
            left = self.choices - at
            value = (share[..., at] * left).long().clamp(max=left - 1)
            for taken in values[..., :at].sort(-1).values.unbind(-1):
                value = value + (value >= taken).long()
            values[..., at] = value
        return values


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer. `dims` has one entry per dimension of the tensor.

    `stacked`: dimension 0 stacks separate tensors (experts), each initialized under its own name. `fused`: numbers of outputs
    (rows) of the matrices that are concatenated in this tensor, such as q, k and v; empty if it is a single matrix.
    """

    dims: tuple[Dim, ...]
    init: Init
    group: Group
    stacked: bool = False
    fused: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModuleSpec:
    """Logical dimensions of a module's inputs and outputs, in the order of its forward."""

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]


class Matrix(NamedTuple):
    """The planned weight of a linear layer: its shape (outputs, inputs) and the meaning of its dimensions."""

    shape: tuple[int, int]
    dims: tuple[Dim, Dim]


def _empty() -> Mapping[str, str]:
    return MappingProxyType({})


def _no_roles() -> Mapping[str, frozenset[str]]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Specs:
    """The description of a model for strategies.

    Attributes:
        tensors: specs by global name of a parameter or buffer, without tied copies.
        modules: specs by path, for modules whose inputs or outputs a strategy may redistribute.
        blocks: paths of the repeated blocks in forward order: the units of sharding, recomputation and compilation.
        units: number of indivisible units per logical dimension, such as the number of heads.
        ties: maps the global name of a tied copy to the global name of the original tensor.
        entry: paths of the modules that run before the first block; a pipeline keeps them on its first stage.
        exit: paths of the modules that run after the last block, including blocks inside of them; a pipeline keeps them on its
            last stage.
        streams: number of residual streams, if hidden states between blocks are (B, T, streams, embed); None: (B, T, embed).
        mtp_depth: number of tokens beyond the next one that the model predicts in training, from `Batch.mtp_targets`.
        needs: optional arguments that the model's forward takes: `tokens`, which later pipeline stages then get along with
            hidden states; `document_starts` and `token_mask`, for all stages, if the batch has them.
        whole_rows: reasons, besides attention, why the model needs whole rows; empty if a row may be split.
        whole_stream: reasons why some modules need whole sequences of the residual stream instead of parts.
        tp_plan: styles of linear layers under tensor parallelism, by pattern of paths, for classes of other libraries that come
            with such a plan instead of logical dimensions (see `forge_parallel.foreign.description.STYLES`); empty if such a
            class has none; None for models that describe their dimensions.
        roles: named sets of parameters, such as `encoder`, to which training stages can refer. Sets may overlap, and need not
            cover all parameters.
        base: tensors of a frozen base model, to which the model has an adapter. A run never changes them; its checkpoints have a
            hash of them instead of their values.
    """

    tensors: Mapping[str, TensorSpec]
    modules: Mapping[str, ModuleSpec]
    blocks: tuple[str, ...]
    units: Mapping[str, int]
    ties: Mapping[str, str] = field(default_factory=_empty)
    entry: tuple[str, ...] = ()
    exit: tuple[str, ...] = ()
    whole_rows: tuple[str, ...] = ()
    whole_stream: tuple[str, ...] = ()
    mtp_depth: int = 0
    needs: tuple[Literal["tokens", "document_starts", "token_mask"], ...] = ()
    roles: Mapping[str, frozenset[str]] = field(default_factory=_no_roles)
    tp_plan: Mapping[str, str] | None = None
    base: frozenset[str] = frozenset()
    streams: int | None = None


BLOCK = 1 << 16
"""Elements drawn from one random stream."""


def key_of(seed: int, name: str) -> bytes:
    """Returns the key of a tensor's random streams, 16 bytes."""
    return blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()


def philox(key: bytes, block: int) -> dict[str, int | list[int]]:
    """Returns the arguments of `numpy.random.Philox` for a block; its values are `standard_normal(BLOCK, dtype=float32)`, or
    `random(BLOCK, dtype=float32)` if they are uniform."""
    return {"key": int.from_bytes(key, "little"), "counter": [0, 0, block, 0]}


def device_seed(key: bytes, block: int) -> int:
    """Returns the seed of torch's CUDA generator for a block; its values are `normal_` or `uniform_` of `BLOCK` elements
    in fp32."""
    return int.from_bytes(blake2b(key + block.to_bytes(8, "little"), digest_size=8).digest(), "little") >> 1


def row_name(name: str, row: int) -> str:
    """Returns the name of a matrix in a stack."""
    return f"{name}[{row}]"
