"""Transforms that a recipe switches on by `[transforms.NAME]`.

Every field says whether its values are features, which need a proof in a layout (`forge_core.features`).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt, Le

from forge_core.component import FREE, LAYOUT, Component
from forge_core.features import Feature, Neutral

if TYPE_CHECKING:
    from forge_core.protocols.model import Transform


@dataclass(frozen=True, kw_only=True)
class Shard(Component):
    """Shards parameters, gradients and optimizer state over data ranks (FSDP2; with dp_replicate HSDP)."""

    key_class: ClassVar = LAYOUT

    reshard: Annotated[bool | None, Feature("reshard", when=True, axis="pp"), Feature("keep_gathered", when=False)] = None
    """Free a block's gathered parameters after its forward and gather them again for its backward. Unset: yes, but not in a
    pipeline, where every micro-batch would gather them again."""
    reduce: Annotated[Literal["last", "each"], Feature("reduce_each", when="each")] = "last"
    """Reduce gradients after the last micro-batch (fast) or after each one (no unsharded gradient is ever kept). A pipeline
    always reduces a stage once, after its last micro-batch."""
    offload: Annotated[bool, Feature("offload", when=True)] = False
    """Keep parameters, gradients and optimizer state in the host's memory: a block's parameters come to the GPU when it is
    gathered, and the optimizer runs on the host. For models that fit no other way; needs CUDA."""

    def build(self) -> "Transform":
        from forge_parallel.transforms.shard import Shard as Transformed

        return Transformed(reshard=self.reshard, reduce=self.reduce, on_host=self.offload)


@dataclass(frozen=True, kw_only=True)
class Float8(Component):
    """Multiplies hidden matrices in float8 (torchao), with weights, gradients and optimizer as before: faster on GPUs from Ada
    and Hopper on. Needs `pip install "forge-parallel[float8]"`.

    Converted are linear layers whose weight is a hidden matrix, and with `experts` stacked experts: not the embedding, the output
    head or routers. The dimensions that a rank holds of a layer, and its tokens of a micro-batch, have to be multiples of 16.
    """

    key_class: ClassVar = FREE

    recipe: Annotated[Literal["tensorwise", "rowwise"], Feature("float8_rowwise", when="rowwise")] = "tensorwise"
    """`tensorwise` has one scale per tensor and gradients in E5M2: the fastest. `rowwise` has one scale per row of each operand,
    all in E4M3: more accurate, and whole weights are gathered in `precision.compute`."""
    include: Annotated[list[str], Neutral("each layer is converted by itself")] = field(default_factory=lambda: ["*"])
    """Layers to convert: shell patterns over paths of modules such as `blocks.0.mlp.up_proj`; `*` crosses dots."""
    exclude: Annotated[list[str], Neutral("each layer is converted by itself")] = field(default_factory=list)
    """Layers to leave as they are, by patterns; `["blocks.0.*"]` leaves the first block."""
    emulate: Annotated[Literal["auto"] | bool, Neutral("what multiplies on one rank")] = "auto"
    """Compute in fp32 from operands that are rounded to float8: the same numbers on any device, without the speed. `auto` does so
    where there is no hardware for float8; with false such a device is refused."""
    all_gather: Annotated[
        bool | None,
        Feature("float8_wide_gather", when=False),
        Neutral("what tensorwise does when it is unset; rowwise refuses it", when=True),
    ] = None
    """Gather the weights of sharded layers in float8 instead of `precision.compute`. Unset: yes with `tensorwise`."""
    experts: Annotated[bool, Feature("float8_experts", when=True)] = False
    """Multiply stacked experts in float8, in the place of `model.moe.kernel`. With either recipe they are rowwise and gathered
    in `precision.compute`; an expert may have any number of tokens. Needs Hopper GPUs, or Blackwell ones of data centers."""

    def __post_init__(self) -> None:
        if self.recipe == "rowwise" and self.all_gather:
            raise ValueError("all_gather = true needs recipe = 'tensorwise': rows and columns of a weight have their own scales")

    def build(self) -> "Transform":
        from forge_parallel.float8.library import check_installed
        from forge_parallel.float8.transform import Float8 as Transformed

        check_installed()
        gathers = self.all_gather is not False
        return Transformed(self.recipe, tuple(self.include), tuple(self.exclude), self.emulate, gathers, self.experts)


@dataclass(frozen=True, kw_only=True)
class Tensor(Component):
    """Cuts single matrices over `parallel.tp` ranks: heads, hidden features and vocabulary (tensor parallelism)."""

    key_class: ClassVar = LAYOUT

    sequence_parallel: Annotated[bool, Feature("tp_whole", when=False, axis="tp")] = True
    """Cut the residual stream along the sequence between the cut matrices: less memory, the same bytes on the wire. `parallel.tp`
    has to divide the length then."""
    asynchronous: Annotated[bool, Feature("tp_asynchronous", when=True, axis="tp")] = False
    """Overlap the exchanges with the matrix products beside them: on CUDA devices that reach each other's memory, with
    sequence parallelism, in compiled blocks."""

    def __post_init__(self) -> None:
        if self.asynchronous and not self.sequence_parallel:
            raise ValueError("asynchronous = true overlaps the exchanges of sequence parallelism: keep sequence_parallel = true")

    def build(self) -> "Transform":
        from forge_parallel.tensor.transform import Tensor as Transformed

        return Transformed(self.sequence_parallel, self.asynchronous)


@dataclass(frozen=True, kw_only=True)
class ContextParallel(Component):
    """Splits each row over `parallel.cp` ranks: for sequences too long for one device.

    `parallel.cp` has to divide `data.sequence_length`, twice except for `ulysses`, so that causal work is the same on every rank.
    """

    key_class: ClassVar = LAYOUT

    kind: Annotated[
        Literal["all_gather", "ring", "ulysses"],
        Feature("cp_all_gather", when="all_gather", axis="cp"),
        Feature("cp_ring", when="ring", axis="cp"),
        Feature("cp_ulysses", when="ulysses", axis="cp"),
    ] = "all_gather"
    """How attention sees the whole row. `all_gather` gathers keys and values, which is little with grouped key-value heads;
    `ring` passes them around while it works and never holds more than two blocks; `ulysses` exchanges heads for places, and
    `parallel.cp` has to divide the heads."""

    def build(self) -> "Transform":
        from forge_parallel.context.transform import ContextParallel as Transformed

        return Transformed(self.kind)


@dataclass(frozen=True, kw_only=True)
class Expert(Component):
    """Shares experts over `parallel.ep` ranks, to which tokens travel, and each expert's width over `parallel.etp` (expert
    parallelism)."""

    key_class: ClassVar = LAYOUT

    dispatcher: Annotated[
        Literal["all_to_all", "all_gather", "hierarchical"],
        Feature("ep_all_to_all", when="all_to_all", axis="ep"),
        Feature("ep_all_gather", when="all_gather", axis="ep"),
        Feature("ep_hierarchical", when="hierarchical", axis="ep"),
    ] = "all_to_all"
    """How tokens travel. `all_to_all` sends each token to the ranks that have its experts; `all_gather` sends all to all;
    `hierarchical` sends each token at most once to each other node, and there on to its experts."""
    ranks_per_node: Annotated[Annotated[int, Gt(1)] | None, Neutral("a size of groups, as that of an axis")] = None
    """For `hierarchical`: neighboring ranks of `ep` that are in one node."""
    overlap: Annotated[bool, Feature("ep_in_turn", when=False, axis="ep")] = True
    """Compute shared experts while tokens travel."""

    def __post_init__(self) -> None:
        if self.dispatcher == "hierarchical" and self.ranks_per_node is None:
            raise ValueError("dispatcher = 'hierarchical' needs ranks_per_node, the neighboring ranks of ep that are in one node")
        if self.dispatcher != "hierarchical" and self.ranks_per_node is not None:
            raise ValueError(f"dispatcher = '{self.dispatcher}' knows no nodes: leave out ranks_per_node, or use 'hierarchical'")

    def build(self) -> "Transform":
        from forge_parallel.experts.transform import Expert as Transformed

        return Transformed(self.dispatcher, self.ranks_per_node, self.overlap)


@dataclass(frozen=True, kw_only=True)
class Recompute(Component):
    """Keeps less between forward and backward and computes the rest again: memory for time.

    Elements that a block keeps per token: `full` dim; `matmul` adds the outputs of its matrices, for the Llama shape
    3 dim + 2 dim kv_heads / heads + 2 ffn_dim; `attention` adds dim + heads (its output, and the log-sum-exp in fp32 or wider).
    """

    key_class: ClassVar = FREE

    policy: Annotated[Literal["full", "selective"], Feature("recompute_full", when="full")] = "selective"
    """`full` keeps the input of a block only; `selective` keeps the results of the operators named by `keep`, too."""
    keep: Annotated[
        list[Literal["matmul", "attention"]], Neutral("results of collectives are kept in any case, and made once")
    ] = field(default_factory=lambda: ["matmul", "attention"])
    """Operators whose results `selective` keeps: what is expensive to compute again."""
    every: Annotated[int, Gt(0), Neutral("each block is wrapped by itself")] = 1
    """Recompute in every n-th block, from the first one on."""

    @property
    def whole_backward(self) -> bool:
        """Results that were kept can be used by one backward only."""
        return self.policy == "selective"

    def build(self) -> "Transform":
        from forge_parallel.transforms.recompute import Recompute as Transformed

        return Transformed(None if self.policy == "full" else tuple(self.keep), self.every)


@dataclass(frozen=True, kw_only=True)
class Compile(Component):
    """torch.compile, block by block; blocks of one shape share one graph."""

    key_class: ClassVar = FREE
    whole_backward: ClassVar[bool] = True

    fullgraph: Annotated[bool, Neutral("where a graph may end; blocks exchange the same")] = True
    """A graph break is an error instead of a silent loss of speed; but for the one around experts that are shared over ranks."""
    mode: Annotated[Literal["default", "max-autotune-no-cudagraphs"], Neutral("which kernels a rank runs")] = "default"
    """How long the compiler may look for fast kernels."""
    budget: Annotated[float, Gt(0), Le(1), Feature("compile_budget", unless=1.0)] = 1.0
    """Share of the activations that the compiler may keep for the backward; below 1 it recomputes the cheapest ones."""

    def build(self) -> "Transform":
        from forge_parallel.transforms.compile import Compile as Transformed

        return Transformed(self.fullgraph, self.mode, self.budget)
