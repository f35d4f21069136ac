"""Transforms that a recipe switches on by `[transforms.NAME]`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Gt, Le

from forge_core.component import Component

if TYPE_CHECKING:
    from forge_core.protocols.model import Transform


@dataclass(frozen=True, kw_only=True)
class Shard(Component):
    """Shards parameters, gradients and optimizer state over data ranks (FSDP2; with dp_replicate HSDP)."""

    reshard: bool = True
    """Free a block's gathered parameters after its forward and gather them again for its backward."""
    reduce: Literal["last", "each"] = "last"
    """Reduce gradients after the last micro-batch (fast) or after each one (no unsharded gradient is ever kept)."""

    def build(self) -> "Transform":
        from forge_parallel.transforms.shard import Shard as Transformed

        return Transformed(reshard=self.reshard, reduce=self.reduce)


@dataclass(frozen=True, kw_only=True)
class Tensor(Component):
    """Cuts single matrices over `parallel.tp` ranks: heads, hidden features and vocabulary (tensor parallelism)."""

    sequence_parallel: bool = True
    """Cut the residual stream along the sequence between the cut matrices: less memory, the same bytes on the wire. `parallel.tp`
    has to divide the length then."""
    asynchronous: bool = False
    """Overlap the exchanges with the matrix products beside them: on CUDA devices that reach each other's memory, with
    sequence parallelism, in compiled blocks."""

    def __post_init__(self) -> None:
        if self.asynchronous and not self.sequence_parallel:
            raise ValueError("asynchronous = true overlaps the exchanges of sequence parallelism: keep sequence_parallel = true")

    def build(self) -> "Transform":
        from forge_parallel.transforms.tensor import Tensor as Transformed

        return Transformed(self.sequence_parallel, self.asynchronous)


@dataclass(frozen=True, kw_only=True)
class Recompute(Component):
    """Keeps less between forward and backward and computes the rest again: memory for time.

    Elements that a block keeps per token: `full` dim; `matmul` adds the outputs of its matrices, for the Llama shape
    3 dim + 2 dim kv_heads / heads + 2 ffn_dim; `attention` adds dim + heads (its output, and the log-sum-exp in fp32 or wider).
    """

    policy: Literal["full", "selective"] = "selective"
    """`full` keeps the input of a block only; `selective` keeps the results of the operators named by `keep`, too."""
    keep: list[Literal["matmul", "attention"]] = field(default_factory=lambda: ["matmul", "attention"])
    """Operators whose results `selective` keeps: what is expensive to compute again."""
    every: Annotated[int, Gt(0)] = 1
    """Recompute in every n-th block, from the first one on."""

    def build(self) -> "Transform":
        from forge_parallel.transforms.recompute import Recompute as Transformed

        return Transformed(None if self.policy == "full" else tuple(self.keep), self.every)


@dataclass(frozen=True, kw_only=True)
class Compile(Component):
    """torch.compile, block by block; blocks of one shape share one graph."""

    fullgraph: bool = True
    """A graph break is an error instead of a silent loss of speed."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """How long the compiler may look for fast kernels."""
    budget: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the activations that the compiler may keep for the backward; below 1 it recomputes the cheapest ones."""

    def build(self) -> "Transform":
        from forge_parallel.transforms.compile import Compile as Transformed

        return Transformed(self.fullgraph, self.mode, self.budget)
