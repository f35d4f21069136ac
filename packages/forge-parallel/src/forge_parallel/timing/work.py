"""What a step computes and exchanges, in closed form from the shapes of a model: matrix products, attention, bytes, messages.

It says the same as a dry run, without running the model: `work_of` reads the shapes once, and `rank_work` gives the work of one
rank for any layout in microseconds. So a search can compare thousands of layouts. A test compares the bytes of messages with
those that a dry run counts.

Left out because they take no measurable time: norms, biases, and the look-up in the embedding table. Matrices that tensor
parallelism does not split count as if every rank multiplied all tokens, except those of a layer of experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import Literal

from forge_core.layout import Layout
from forge_parallel.dryrun.sharding import Described
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.stages import StageSplit
from forge_parallel.placement.shares import CUT, stacks

ITEM = {"bf16": 2, "fp32": 4, "fp64": 8}
"""Bytes of an element by the name of its dtype."""


@dataclass(frozen=True)
class Scores:
    """Attention of one block: `width` is heads * (width of a key + width of a value), the multiply-adds of a query with a key;
    `window` the number of keys that a query sees, None for all before it, or without `causal` for the whole row. If `chunked`,
    it is the number of positions of a chunk, and a query sees those before it in its chunk."""

    width: float
    window: int | None = None
    causal: bool = True
    chunked: bool = False

    def keys(self, length: int) -> float:
        """Returns the average number of keys per query of a kernel in rows of `length` tokens."""
        seen = length if self.window is None else min(self.window, length)
        if self.chunked:
            full, rest = divmod(length, seen)
            return (full * seen * (seen + 1) + rest * (rest + 1)) / (2 * length)
        if not self.causal:
            return seen
        return seen - seen * (seen - 1) / (2 * length)


@dataclass(frozen=True)
class BlockMatrix:
    """A weight of shape (outputs, inputs). With `experts`, one of as many equal weights, of which a token goes to `top_k`.

    `cut` says what tensor parallelism splits: `outputs`, `inputs`, the `tokens`, as for routers and for the projections of latent
    experts, or None.
    """

    outputs: int
    inputs: int
    cut: Literal["outputs", "inputs", "tokens"] | None = None
    experts: int = 0


@dataclass(frozen=True)
class BlockWork:
    """The unit that is gathered, recomputed and placed on a pipeline stage.

    Attributes:
        matrices: its weights that multiply tokens.
        other: elements of all other parameters.
        scores: its attention; None if it has none.
        heads, kv_heads: their numbers; 0 without attention.
        pair: elements of a token's keys and values; 0 if attention does not compute them head by head.
        queries: elements of a token's queries, and of the outputs of its heads.
        top_k: experts that a token goes to.
    """

    matrices: tuple[BlockMatrix, ...]
    other: int = 0
    scores: Scores | None = None
    heads: int = 0
    kv_heads: int = 0
    pair: int = 0
    queries: int = 0
    top_k: int = 0

    @property
    def iteration(self) -> float:
        """FLOPs of one Newton-Schulz iteration of all matrices: 4 m^2 n + 2 m^3 with m <= n (Jordan et al., 2024)."""
        total = 0.0
        for matrix in self.matrices:
            m, n = sorted((matrix.outputs, matrix.inputs))
            total += max(matrix.experts, 1) * (4.0 * m * m * n + 2.0 * m**3)
        return total

    @property
    def experts(self) -> int:
        """Number of experts; 0 in a dense block."""
        return max((matrix.experts for matrix in self.matrices), default=0)

    @property
    def width(self) -> int:
        """Width of a token that is sent to experts; 0 in a dense block."""
        stacked = (matrix for matrix in self.matrices if matrix.experts)
        return max((matrix.outputs if matrix.cut == "inputs" else matrix.inputs for matrix in stacked), default=0)

    def elements(self, layout: Layout) -> tuple[int, int]:
        """Returns the elements of a rank before sharding over data ranks: of dense parameters, and of experts."""
        dense, experts = self.other, 0
        for matrix in self.matrices:
            size = matrix.outputs * matrix.inputs
            if matrix.experts:
                experts += matrix.experts * size // (layout.ep * layout.etp)
            else:
                dense += size // (layout.tp if matrix.cut in ("outputs", "inputs") else 1)
        return dense, experts


@dataclass(frozen=True)
class ModelWork:
    """The blocks of a model in order, its width, the size of its vocabulary, and elements outside of blocks.

    Attributes:
        blocks: in order.
        dim: width of the residual stream.
        vocab: number of token ids.
        outside: elements of parameters outside of blocks, head and embedding included.
        heads: how often the head runs: once, and once for each MTP module.
    """

    blocks: tuple[BlockWork, ...]
    dim: int
    vocab: int
    outside: int
    heads: int = 1

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each block, the index of the first block that equals it."""
        first: dict[BlockWork, int] = {}
        return tuple(first.setdefault(block, index) for index, block in enumerate(self.blocks))

    @property
    def shares_rows(self) -> bool:
        """Whether the exchanges of context parallelism are modeled: attention computes keys and values head by head."""
        return all(block.scores is None or block.pair for block in self.blocks)

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.outside + sum(sum(block.elements(Layout())) for block in self.blocks)

    def flops(self, length: int) -> float:
        """Returns FLOPs of forward and backward per token for model-FLOPs utilization: a multiply-add is 2, a backward is twice a
        forward, attention counts all keys of a row, recomputation is not counted (`forge_models.flops`)."""
        products = self.heads * self.dim * self.vocab
        attention = 0.0
        for block in self.blocks:
            products += sum((block.top_k if matrix.experts else 1) * matrix.outputs * matrix.inputs for matrix in block.matrices)
            if block.scores is not None:
                window = block.scores.window
                attention += block.scores.width * (length if window is None else min(window, length))
        return 6.0 * (products + attention)


def work_of(described: Described, scores: Sequence[Scores | None], top_k: int = 1) -> ModelWork:
    """Returns the work of a model from its parameters and their logical dimensions.

    Args:
        described: the whole model on the meta device with its specs.
        scores: attention of each block of `specs.blocks`.
        top_k: experts that a token goes to.
    """
    specs, seen = described.specs, set[int]()
    parts: dict[str, list[BlockMatrix]] = {path: [] for path in specs.blocks}
    other = dict.fromkeys(specs.blocks, 0)
    pair, queries = dict.fromkeys(specs.blocks, 0), dict.fromkeys(specs.blocks, 0)
    outside = vocab = 0
    sparse = tuple(f"{path.rpartition('.')[0]}." for path in stacks(specs))  # layers of experts, whose tokens tp ranks share out
    for name, parameter in described.module.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        dims = specs.tensors[specs.ties.get(name, name)].dims
        path = next((path for path in specs.blocks if name.startswith(f"{path}.")), None)
        stacked = "expert" in dims
        if path is None:
            outside += parameter.numel()
            vocab = max([vocab, *(size for size, dim in zip(parameter.shape, dims, strict=True) if dim == "vocab")])
        elif len(dims) - stacked == 2:
            outputs, inputs = parameter.shape[-2:]
            cut = "outputs" if dims[-2] in CUT else "inputs" if dims[-1] in CUT else "tokens" if name.startswith(sparse) else None
            parts[path].append(BlockMatrix(outputs, inputs, cut, parameter.shape[0] if stacked else 0))
            pair[path] += outputs if dims[-2] == "kv_heads" else 0
            queries[path] += outputs if dims[-2] == "heads" else inputs if dims[-1] == "heads" else 0
        else:
            other[path] += parameter.numel()
    blocks, heads = [], (specs.units.get("heads", 0), specs.units.get("kv_heads", 0))
    for path, attention in zip(specs.blocks, scores, strict=True):
        matrices = tuple(parts[path])
        chosen = top_k if any(matrix.experts for matrix in matrices) else 0
        blocks.append(BlockWork(matrices, other[path], attention, *heads, pair[path], queries[path], chosen))
    return ModelWork(tuple(blocks), specs.units["embed"], vocab, outside, 1 + specs.mtp_depth)


@dataclass(frozen=True)
class Execution:
    """How ranks run a step.

    Attributes:
        rows: sequences per micro-batch of a data rank.
        length: tokens per sequence.
        micro_batches: per step and data rank.
        compute: dtype of products: `bf16`, `fp32` or `fp64`.
        state: dtype of parameters and optimizer state between steps.
        moments: tensors of optimizer state per parameter.
        float8: whether blocks multiply in float8; `float8_experts` the same for experts.
        recompute: `full`, `selective` or None; in every `every`-th block.
        compiled: whether blocks are compiled.
        reduce: when gradients are summed over data ranks: after each micro-batch or after the last.
        reshard: whether a block's parameters are freed after its forward; None: yes, but not in a pipeline.
        sequence_parallel: whether tp ranks split the residual stream between split matrices.
        asynchronous: whether exchanges of tensor parallelism overlap with products.
        context: `all_gather`, `ring` or `ulysses`.
        dispatcher: `all_to_all`, `all_gather`, or `hierarchical`, which sends a token once to each node.
        ranks_per_node: ranks of `ep` that the hierarchical dispatcher takes for a node; 0: those that are on one.
        float8_gather: whether blocks that multiply in float8 are gathered in it.
        imbalance: tokens of the busiest expert rank relative to the mean.
        gradient_bytes: bytes of an element when gradients are summed over data ranks.
        once: parameters are gathered once a step, as where only optimizer state is sharded (ZeRO-1).
        frozen: whether weights of blocks have no gradients, as with adapters.
        orthogonalizes: iterations in which the optimizer multiplies each matrix of a block with itself, as Muon does.
    """

    rows: int
    length: int
    micro_batches: int = 1
    compute: str = "bf16"
    state: str = "fp32"
    moments: int = 2
    float8: bool = False
    float8_experts: bool = False
    recompute: Literal["full", "selective"] | None = None
    every: int = 1
    compiled: bool = False
    reduce: Literal["last", "each"] = "last"
    reshard: bool | None = None
    sequence_parallel: bool = True
    asynchronous: bool = False
    context: str = "all_gather"
    dispatcher: str = "all_to_all"
    ranks_per_node: int = 0
    float8_gather: bool = True
    imbalance: float = 1.0
    gradient_bytes: int = 4
    once: bool = False
    frozen: bool = False
    orthogonalizes: int = 0

    def frees(self, layout: Layout) -> bool:
        """Returns whether blocks are gathered again for their backward."""
        return layout.pp == 1 and not self.once if self.reshard is None else self.reshard


@dataclass(frozen=True)
class StageBlocks:
    """Consecutive blocks of a pipeline: their indices, and whether the head belongs to it."""

    blocks: tuple[int, ...]
    head: bool = False


def stages_of(described: Described, pipeline: Pipeline | None, ranks: int) -> tuple[StageBlocks, ...]:
    """Returns the stages of a pipeline over `ranks` ranks, in order; without a pipeline one stage.

    Raises:
        PlanError: the pipeline cannot be cut; see `StageSplit.of`.
    """
    blocks = described.specs.blocks
    if pipeline is None or ranks == 1:
        return (StageBlocks(tuple(range(len(blocks))), head=True),)
    split = StageSplit.of(described.module, described.specs, pipeline, ranks, 0)
    places = {path: index for index, path in enumerate(blocks)}
    behind = tuple(f"{path}." for path in described.specs.exit)
    found = [tuple(places[path] for path in paths if path in places) for paths in split.stages]
    found[-1] += tuple(places[path] for path in blocks if path.startswith(behind))  # MTP modules
    return tuple(StageBlocks(indices, head=number == len(found) - 1) for number, indices in enumerate(found))


@dataclass(frozen=True)
class Product:
    """Equal matrix products of a rank: `copies` times (rows x inputs) times (inputs x outputs)."""

    rows: float
    inputs: float
    outputs: float
    copies: float = 1.0
    experts: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of the forward."""
        return 2.0 * self.copies * self.rows * self.inputs * self.outputs

    @property
    def elements(self) -> float:
        """Elements of both operands and of the result."""
        rows, inputs, outputs = self.rows, self.inputs, self.outputs
        return self.copies * (rows * inputs + inputs * outputs + rows * outputs)


@dataclass(frozen=True)
class RankWork:
    """Forward work of one block on one rank for one micro-batch. A backward has twice the products.

    Attributes:
        products: matrix products.
        attention: FLOPs of attention.
        passes: elements that enter and leave matrices, which element-wise operators read and write.
        stream: bytes of the residual stream of the rank's rows, whole.
        pair, pair_back: bytes that reach this rank from others under context parallelism, in a forward and in a backward.
        tokens: bytes of the rank's own tokens, each once, of which it sends some to each rank of `ep`.
        dense, experts: elements that data ranks gather: of dense parameters, and of experts.
    """

    products: tuple[Product, ...] = field(default=())
    attention: float = 0.0
    passes: float = 0.0
    stream: float = 0.0
    pair: float = 0.0
    pair_back: float = 0.0
    tokens: float = 0.0
    dense: int = 0
    experts: int = 0


def rank_work(block: BlockWork, dim: int, layout: Layout, execution: Execution) -> RankWork:
    """Returns the forward work of `block` on one rank of `layout` for one micro-batch. Experts have equal loads."""
    rows = execution.rows * execution.length / layout.cp
    item = ITEM[execution.compute]
    products, passes = [], 0.0
    own = rows / layout.tp  # tokens that this rank sends to experts
    for matrix in block.matrices:
        if not matrix.experts:
            outputs = matrix.outputs / (layout.tp if matrix.cut == "outputs" else 1)
            inputs = matrix.inputs / (layout.tp if matrix.cut == "inputs" else 1)
            products.append(Product(own if matrix.cut == "tokens" else rows, inputs, outputs))
            # Between split matrices a rank has all tokens and some features; outside of them some tokens and all features, or
            # without sequence parallelism all tokens and all features.
            own_features = matrix.inputs if matrix.cut == "inputs" else matrix.outputs
            stream = matrix.outputs + matrix.inputs - own_features
            passes += rows * (own_features / layout.tp + stream / (layout.tp if execution.sequence_parallel else 1))
            continue
        present = matrix.experts / layout.ep
        slots = own * block.top_k * layout.etp
        outputs = matrix.outputs / (layout.etp if matrix.cut == "outputs" else 1)
        inputs = matrix.inputs / (layout.etp if matrix.cut == "inputs" else 1)
        products.append(Product(slots / present, inputs, outputs, copies=present, experts=True))
        passes += slots * (outputs + inputs)
    attention = 0.0
    if block.scores is not None:
        attention = 2.0 * rows * block.scores.keys(execution.length) * block.scores.width / layout.tp
    if block.experts:
        passes += 4.0 * own * block.top_k * block.width  # tokens are sorted by expert, and put back in order
    dense, experts = block.elements(layout)
    pairs = _pairs(block, layout, execution)
    return RankWork(tuple(products), attention, passes, rows * dim * item, *pairs, own * block.width * item, dense, experts)


def _pairs(block: BlockWork, layout: Layout, execution: Execution) -> tuple[float, float]:
    """Returns the bytes that reach a rank in a forward and in a backward when `cp` ranks share rows.

    Keys and values of every other position, and their gradients back, which a ring sums in fp32 while keys and values travel once
    more; or, with `ulysses`, queries and outputs of this rank's heads at the other positions, with their keys and values
    (`forge_parallel.dryrun.lower_bounds`).
    """
    if layout.cp == 1 or not block.pair:
        return 0.0, 0.0
    item = ITEM[execution.compute]
    others = (layout.cp - 1) * execution.rows * execution.length / layout.cp
    of_head = block.pair / block.kv_heads
    if execution.context == "ulysses":
        share = block.heads / layout.tp / layout.cp  # heads of a rank
        needed = max(1.0, share * block.kv_heads / block.heads)
        sent = others * item * (share * block.queries / block.heads + needed * of_head)
        return sent, sent
    sent = others * ceil(block.kv_heads / layout.tp) * of_head
    return sent * item, sent * (item + max(item, 4) if execution.context == "ring" else item)
