"""How a model describes itself, once, as data.

A parameter's spec holds what every strategy needs to know about it: the logical meaning of its dimensions, how it is
drawn, and which optimizer group it belongs to. Rule tables map logical dimensions to mesh axes, so a new strategy is a
new table and never an edit to a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

Dim = Literal["batch", "sequence", "embed", "heads", "kv_heads", "ffn", "expert", "vocab"] | None
"""Logical meaning of one dimension; None where no strategy may split it."""

Group = Literal["matrix", "embedding", "head", "router", "vector"]
"""Optimizer group: hidden matrices; lookup tables; the output projection; what chooses experts; norms, biases and other 1-D
tensors."""


@dataclass(frozen=True)
class Init:
    """How a tensor is filled: `normal` with mean 0 and `std`, `zeros` or `ones`."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0

    def __post_init__(self) -> None:
        if (self.kind == "normal") != (self.std > 0):
            raise ValueError(f"Init({self.kind!r}, std={self.std}): normal needs std > 0, the others take none")


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer. `dims` has one entry per dimension of the tensor.

    `stacked` says that dimension 0 stacks separate tensors (experts), each drawn under its own name. `fused` has the outputs
    (rows, after a stack) of the matrices that lie one after the other in this one, such as q, k and v; empty where it is one.
    """

    dims: tuple[Dim, ...]
    init: Init
    group: Group
    stacked: bool = False
    fused: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModuleSpec:
    """Logical dimensions of the tensors that enter and leave a module, in the order of its forward."""

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]


class Matrix(NamedTuple):
    """The weight of a linear layer before it exists: shape (outputs, inputs), and what its dimensions mean."""

    shape: tuple[int, int]
    dims: tuple[Dim, Dim]


class Outline(NamedTuple):
    """What a model's component says of the model before it is built, from `outline()`: for checks, without torch.

    What it says agrees with the `Specs` of the model. A component without the method is judged when the model is built.

    Attributes:
        blocks: repeated blocks that a pipeline may spread; those of multi-token prediction stay with the head.
        units: as in `Specs`.
        keys: key of the recipe behind each unit and behind what else is named here, for messages.
        shared: (key, rows) of the tables and widths that tp ranks cut without regard to units.
        capped: whether attention caps its scores.
        whole_rows, whole_stream, mtp_depth: as in `Specs`.
        matrices: hidden matrices of linear layers by path; None where they are not known.
        experts: stacked matrices, of one expert, by the name of their parameter.
        elements: parameters in all, about.
    """

    blocks: int
    units: Mapping[str, int]
    keys: Mapping[str, str]
    shared: tuple[tuple[str, int], ...] = ()
    capped: bool = False
    whole_rows: tuple[str, ...] = ()
    whole_stream: tuple[str, ...] = ()
    mtp_depth: int = 0
    matrices: Mapping[str, Matrix] | None = None
    experts: Mapping[str, Matrix] | None = None
    elements: int = 0


def _empty() -> Mapping[str, str]:
    return MappingProxyType({})


def _no_roles() -> Mapping[str, frozenset[str]]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Specs:
    """All that strategies know about a model.

    Attributes:
        tensors: per global name of a parameter or buffer. A tied copy is not listed here.
        modules: per path of a module whose inputs or outputs a strategy may have to lay out.
        blocks: paths of the repeated blocks in forward order: the units of sharding, recomputation and compilation.
        units: indivisible units per logical dimension, such as the number of heads.
        ties: global name of a tied copy -> global name of the tensor that it repeats.
        entry: paths of the modules that run before the first block; a pipeline keeps them on its first part.
        exit: paths of the modules that run after the last block; a pipeline keeps them on its last part. Blocks inside of them
            stay there too.
        mtp_depth: how many tokens beyond the next one the model predicts in training; it is given `Batch.mtp_targets` then.
        needs: inputs beyond those that every model takes, by the names of these arguments: `tokens`, which later parts of a
            pipeline are given along with hidden states, and `document_starts` and `token_mask`, for all parts, where a batch has
            them.
        whole_rows: what, besides its attention cores, makes the model see whole rows at once; empty when a row may be cut.
        whole_stream: what makes modules need whole sequences of the residual stream that otherwise work on parts of it.
        roles: names for sets of parameters by what they are for, such as `encoder`: what stages of training may name. Sets may
            overlap, and need not have every parameter.
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
