"""Predicts the time of a step on given hardware from the work of its ranks: a model, not a measurement.

The time of a rank is the sum of

- matrix products: operations at a part of the peak, plus the bytes of operands and results at a part of the memory's bandwidth,
  so that narrow products are slower;
- attention, at a part of its own; its backward has 2.5 times the products of its forward, as a kernel computes scores again;
- element-wise operators: each value that enters or leaves a matrix is moved once, `eager` times if blocks are not compiled;
- recomputation: forwards of blocks once more;
- collectives (bandwidth of a ring, plus the latency of its hops; Thakur et al., 2005) and exchanges of tokens, as far as they are
  not hidden. Gathers and reductions of sharded parameters hide behind the block that computes meanwhile, and slow it down by
  `contention`; exchanges of tensor and expert parallelism, and gathered keys, are exposed;
- waiting for other stages of a pipeline, by simulating the schedule;
- the optimizer: its bytes at a part of the memory's bandwidth, and the products of one that orthogonalizes;
- the host, where queueing a block takes longer than computing it.

The parts of peaks are the free constants in `Efficiency`. They were fitted to published runs of several frameworks
(`benchmarks/timing`); `forge_parallel.timing.calibration` fits them to one's own.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Any

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel.dryrun.fake_world import expert_probability
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import Action, PipelineTimeline, actions_of, simulate
from forge_parallel.timing.hardware import Hardware, Link
from forge_parallel.timing.work import ITEM, BlockWork, Execution, ModelWork, Product, RankWork, StageBlocks, rank_work


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of the model on `runs` measured runs: `median` and `largest` absolute relative error of tokens per second."""

    runs: int
    median: float
    largest: float

    def __str__(self) -> str:
        return f"median error {self.median:.1%}, largest {self.largest:.0%}, on {self.runs} runs that it was not fitted to"


@dataclass(frozen=True)
class Efficiency:
    """What real kernels and links reach, as parts of their peaks, and a few times.

    Attributes:
        matmul: of the peak of large matrix products.
        float8: of the float8 peak.
        experts: grouped products of experts, relative to others.
        attention: of the peak, for attention kernels.
        memory: of the bandwidth of the GPU's memory.
        node, network: of the bandwidth of links within a node and between nodes.
        tensor: of the bandwidth of links within a node, for exchanges of tensor parallelism, which wait for each other.
        eager: bytes that element-wise operators move in blocks that are not compiled, relative to compiled ones.
        contention: how much longer a block takes for each second of communication that it hides.
        host: seconds in which the host queues one forward of a block that is not compiled; compiled ones take a third.
        dated: when these constants were fitted; software moves.
        error: the error on runs that they were not fitted to; None if it is not known.
    """

    matmul: float = 0.715
    float8: float = 0.6
    experts: float = 0.783
    attention: float = 0.519
    memory: float = 0.752
    node: float = 0.765
    network: float = 0.646
    tensor: float = 0.482
    eager: float = 4.275
    contention: float = 0.19
    host: float = 4e-4
    dated: str = "2026-11-26"
    error: ErrorSummary | None = ErrorSummary(21, 0.051, 0.406)


FREE = ("matmul", "float8", "experts", "attention", "memory", "node", "network", "tensor", "eager", "contention")
"""Constants that a calibration may change."""

EXPOSED = frozenset({"tensor parallel", "context parallel", "expert parallel"})
"""Exchanges that a block waits for. They use the links themselves, so they hide no other communication."""

SCORES_AGAIN = 2.5
"""Products of an attention kernel's backward, relative to its forward: it computes the scores again (Dao, 2023)."""

BYTES_OF_LOGITS = 16
"""Bytes that the loss moves for each logit: written, read, and its gradient written and read, in fp32 and bf16."""


@dataclass(frozen=True)
class StepTime:
    """The modeled time of a step.

    Attributes:
        parts: seconds by cause on the rank that works longest; their sum is the step.
        tokens: tokens of the step over all ranks.
        world: number of ranks.
        flops: FLOPs of a token by the convention of `ModelWork.flops`.
        peak: operations per second of one GPU that utilization refers to.
        bubble: idle time of all pipeline ranks relative to their working time.
    """

    parts: Mapping[str, float]
    tokens: int
    world: int
    flops: float
    peak: float
    bubble: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return self.tokens / self.seconds / self.world

    @property
    def utilization(self) -> float:
        """Model-FLOPs utilization, between 0 and 1 (MFU; Chowdhery et al., 2022)."""
        return self.flops * self.tokens_per_second / self.peak

    def as_json(self) -> dict[str, Any]:
        """Returns plain data; times in seconds."""
        return {
            "step_s": self.seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "mfu": self.utilization,
            "bubble": self.bubble,
            "parts_s": dict(self.parts),
        }


def predict(
    model: ModelWork,
    stages: tuple[StageBlocks, ...],
    layout: Layout,
    execution: Execution,
    hardware: Hardware,
    efficiency: Efficiency,
    pipeline: Pipeline | None = None,
    *,
    exact: bool = True,
) -> StepTime:
    """Returns the modeled time of a step.

    Args:
        model: see `work_of`.
        stages: see `stages_of`.
        layout: sizes of all axes.
        execution: how ranks run the step.
        hardware: GPUs and links.
        efficiency: what they reach.
        pipeline: its schedule, if `layout.pp` is larger than 1.
        exact: whether to simulate the schedule. Otherwise the step of a schedule that does not split backwards is at least as
            short, and close: a rank waits for the first forward and the last backward of the stages before it.

    Raises:
        PlanError: the hardware has no peak for the dtype of the products, or the time of this attention or dispatcher is not
            modeled in this layout.
    """
    clock = _Clock(model, layout, execution, hardware, efficiency)
    if layout.pp > 1 and pipeline is not None:
        parts, bubble = _pipelined(clock, stages, pipeline, exact or pipeline.schedule.splits_backward)
    else:
        parts, bubble = _in_turn(clock, stages[0]), 0.0
    peak = hardware.flops["fp32" if execution.compute == "fp32" else "bf16"]
    tokens = execution.rows * execution.length * execution.micro_batches * layout.data
    return StepTime(
        {name: time for name, time in parts.items() if time}, tokens, layout.world, model.flops(execution.length), peak, bubble
    )


class _Parts(dict[str, float]):
    """Seconds by cause."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def __add__(self, other: Mapping[str, float]) -> "_Parts":
        return _Parts(self).add(other)

    def add(self, other: Mapping[str, float], times: float = 1.0) -> "_Parts":
        """Adds `times` times the parts of another, and returns itself."""
        for name, seconds in other.items():
            self[name] += times * seconds
        return self


def _in_turn(clock: "_Clock", stage: StageBlocks) -> _Parts:
    """Returns the parts of a step whose micro-batches run one after the other."""
    execution, parts = clock.execution, _Parts()
    count = execution.micro_batches
    last = execution.reduce == "last" or clock.execution.once
    kinds = Counter[tuple[bool, bool]]()
    for index in range(min(count, 3)):  # first, those between, last
        number = 1 if index != 1 or count < 3 else count - 2
        place = index if count < 3 else (0, 1, count - 1)[index]
        gathers = not execution.once or place == 0
        reduces = not last or place == count - 1
        kinds[gathers, reduces] += number
    for (gathers, reduces), number in kinds.items():
        parts.add(clock.forward(stage, gathers), number)
        parts.add(clock.backward(stage, clock.frees and gathers, reduces), number)
    return parts.add(clock.update(stage))


def _pipelined(clock: "_Clock", stages: tuple[StageBlocks, ...], pipeline: Pipeline, exact: bool) -> tuple[_Parts, float]:
    """Returns the parts of a step on the pipeline rank that works longest, and the bubble of the schedule."""
    layout, count = clock.layout, clock.execution.micro_batches
    parts_of = {
        (kind, stage, gathers): _action(clock, kind, stages[stage], gathers)
        for kind in ("F", "B", "I", "W")
        for stage in range(len(stages))
        for gathers in (False, True)
    }
    costs = {key: max(sum(parts.values()), 0.0) for key, parts in parts_of.items()}
    placement = pipeline.placement(layout.pp)
    if exact:
        length, busy, done = _timeline(pipeline, layout.pp, count, len(stages), costs, clock.frees, clock.transfer())
    else:
        done = Counter({(kind, stage, clock.frees and kind == "B"): count for kind in "FB" for stage in range(len(stages))})
        each = [costs["F", stage, False] + costs["B", stage, clock.frees] for stage in range(len(stages))]
        busy = tuple(count * sum(each[stage] for stage, rank in enumerate(placement) if rank == own) for own in range(layout.pp))
        before = [0.0, *accumulate(each)]
        length = max(busy[rank] + before[placement.index(rank)] for rank in range(layout.pp))
    busiest = max(range(layout.pp), key=busy.__getitem__)
    parts = _Parts()
    for key, number in done.items():
        if placement[key[1]] == busiest:
            parts.add(parts_of[key], number)
    for stage in (stages[index] for index, rank in enumerate(placement) if rank == busiest):
        # Gathered before the first forward and reduced after the last backward of a step, beside one micro-batch of work.
        # What is beside a block may be hidden by waits for the host, so parts can also become smaller.
        if not clock.frees:
            parts.add(clock.forward(stage, gathers=True)).add(clock.forward(stage, gathers=False), -1)
        else:  # what is outside of blocks stays gathered
            parts.add(clock.outside(stage))
        parts.add(clock.backward(stage, clock.frees, reduces=True)).add(clock.backward(stage, clock.frees, reduces=False), -1)
        parts.add(clock.update(stage))
    parts["pipeline waits"] = length - busy[busiest]
    return parts, layout.pp * length / sum(busy) - 1


def _action(clock: "_Clock", kind: str, stage: StageBlocks, gathers: bool) -> _Parts:
    """Returns the parts of one action of a schedule, whose stage gathers its blocks first or has them."""
    if kind == "F":
        return clock.forward(stage, gathers, outside=False)
    if kind == "W":
        whole = clock.backward(stage, False, reduces=False)
        return _Parts(whole).add(clock.backward(stage, False, reduces=False, half=True), -1)
    return clock.backward(stage, gathers, reduces=False, half=kind == "I")


ROUNDS = 4
"""Micro-batches per pipeline rank after which a schedule repeats itself: a test compares longer ones."""

Done = Counter[tuple[str, int, bool]]
"""How often an action of a kind runs on a stage, with and without gathering its blocks."""


def _timeline(
    pipeline: Pipeline,
    ranks: int,
    count: int,
    stages: int,
    costs: Mapping[tuple[str, int, bool], float],
    frees: bool,
    transfer: float,
) -> tuple[float, tuple[float, ...], Done]:
    """Returns the length of a step's schedule, the working time of each rank, and its actions; a long schedule repeats its
    middle."""
    most = count if count % ranks else min(count, ranks * ROUNDS)

    def simulated(size: int) -> tuple[PipelineTimeline, Done]:
        table = actions_of(pipeline.schedule, ranks, size)
        keys = {
            action: (action.kind, action.stage, frees and gathers) for order in table for action, gathers in _gathering(order)
        }
        return simulate(table, stages, lambda action: costs[keys[action]], transfer), Counter(keys.values())

    last, done = simulated(most)
    if most == count:
        return last.length, last.busy, done
    before, less = simulated(most - ranks)
    more = (count - most) // ranks
    busy = tuple(now + more * (now - then) for then, now in zip(before.busy, last.busy, strict=True))
    total = Counter({key: number + more * (number - less[key]) for key, number in done.items()})
    return last.length + more * (last.length - before.length), busy, total


def _gathering(order: Sequence[Action]) -> Iterator[tuple[Action, bool]]:
    """Yields the actions of a rank, and whether each gathers its stage's blocks: a forward frees them, a backward does not."""
    kept = set[int]()
    for action in order:
        yield action, action.stage not in kept
        if action.kind == "F":
            kept.discard(action.stage)
        else:
            kept.add(action.stage)


class _Clock:
    """Times of one rank for one micro-batch, by cause."""

    def __init__(
        self, model: ModelWork, layout: Layout, execution: Execution, hardware: Hardware, efficiency: Efficiency
    ) -> None:
        self.model, self.layout, self.execution, self.hardware, self.efficiency = model, layout, execution, hardware, efficiency
        self.frees = execution.frees(layout)
        self._works: dict[int, RankWork] = {}
        self._times: dict[tuple[Any, ...], _Parts] = {}
        self._alike: dict[StageBlocks, tuple[Any, ...]] = {}
        dtype = "fp32" if execution.compute == "fp32" else "bf16"
        for name in (dtype, *(["fp8"] if execution.float8 or execution.float8_experts else [])):
            if execution.compute == "fp64":
                raise PlanError("products in fp64 have no time: descriptions of hardware have no rate for them")
            if name not in hardware.flops:
                raise PlanError(f"the description of {hardware.name} has no {name}_tflops, so products in it have no time")
        self._peak = hardware.flops[dtype] * efficiency.matmul
        self._fp8 = hardware.flops.get("fp8", 0.0) * efficiency.float8
        self._attention = hardware.flops[dtype] * efficiency.attention
        self._memory = hardware.bandwidth * efficiency.memory
        if layout.cp > 1 and not model.shares_rows:
            raise PlanError("context parallelism has a modeled time only if attention computes keys and values head by head")

    def work(self, block: BlockWork) -> RankWork:
        if id(block) not in self._works:
            self._works[id(block)] = rank_work(block, self.model.dim, self.layout, self.execution)
        return self._works[id(block)]

    def forward(self, stage: StageBlocks, gathers: bool, outside: bool = True) -> _Parts:
        """Returns the forward of a stage; the head's is in its backward, since the loss head computes both. `outside`: if blocks
        are gathered, so is what is outside of them."""
        key = ("forward", *self._signature(stage), gathers, outside)
        if key not in self._times:
            parts = self._sum(stage, lambda block, _: self._block_forward(block, gathers)) + self._embedded(stage)
            self._times[key] = parts.add(self.outside(stage)) if gathers and outside else parts
        return self._times[key]

    def backward(self, stage: StageBlocks, gathers: bool, reduces: bool, half: bool = False) -> _Parts:
        """Returns the backward of a stage, with recomputation and the head; `half`: only gradients of inputs."""
        key = ("backward", *self._signature(stage), gathers, reduces, half)
        if key in self._times:
            return self._times[key]
        parts = self._sum(stage, lambda block, again: self._block_backward(block, again, gathers, reduces, half))
        parts.add(self._embedded(stage))
        if stage.head:
            parts.add(self._head(half))
        if reduces and not self.execution.frozen:
            parts["gradients of data ranks"] += self._reduced(self._outside_elements(stage), 0)
        self._times[key] = parts
        return parts

    def update(self, stage: StageBlocks) -> _Parts:
        """Returns the time of clipping and of the optimizer: each state is read and written, gradients are read twice."""
        if self.execution.frozen:
            return _Parts()
        layout = self.layout
        shards = layout.dp_shard * layout.cp
        elements = self._outside_elements(stage) / shards
        for index in stage.blocks:
            dense, experts = self.model.blocks[index].elements(layout)
            elements += dense / shards + experts / layout.efsdp
        passes = 4 + 2 * self.execution.moments
        seconds = passes * elements * ITEM[self.execution.state] / self._memory
        if self.execution.orthogonalizes:  # each rank of a replica does its share of the matrices
            flops = self.execution.orthogonalizes * sum(self.model.blocks[index].iteration for index in stage.blocks)
            seconds += flops / (shards * layout.tp) / self._peak
        return _Parts({"optimizer": seconds})

    def transfer(self) -> float:
        """Returns the time in which the residual stream of a micro-batch reaches the next stage."""
        rows = self.execution.rows * self.execution.length / self.layout.cp
        size = rows * self.model.dim * ITEM[self.execution.compute] / self.layout.tp
        link, part = self._link(self.layout.world // self.layout.pp)
        return size / (link.bandwidth * part) + link.latency

    def _signature(self, stage: StageBlocks) -> tuple[Any, ...]:
        """Returns what distinguishes the times of stages: their blocks by kind, and what is before and after the blocks."""
        if stage not in self._alike:
            alike = Counter((self.model.kinds[index], index % self.execution.every == 0) for index in stage.blocks)
            self._alike[stage] = (tuple(sorted(alike.items())), 0 in stage.blocks, stage.head)
        return self._alike[stage]

    def _sum(self, stage: StageBlocks, time: Callable[[BlockWork, bool], _Parts]) -> _Parts:
        parts = _Parts()
        for (kind, first), count in self._signature(stage)[0]:
            parts.add(time(self.model.blocks[kind], first), count)
        return parts

    def _block_forward(self, block: BlockWork, gathers: bool) -> _Parts:
        key = (id(block), "forward", gathers)
        if key not in self._times:
            parts = self._computed(block, 1.0) + self._exchanged(block)
            gathered = self._gathered(self.work(block)) if gathers else 0.0
            self._times[key] = self._with(parts, {"parameters of data ranks": gathered}, 1.0)
        return self._times[key]

    def _block_backward(self, block: BlockWork, recomputes: bool, gathers: bool, reduces: bool, half: bool) -> _Parts:
        again = self.execution.recompute if recomputes else None
        key = (id(block), "backward", again, gathers, reduces, half)
        if key in self._times:
            return self._times[key]
        work, frozen = self.work(block), self.execution.frozen
        times = 1.0 if half or frozen else 2.0
        parts = self._computed(block, times, scores=SCORES_AGAIN) + self._exchanged(block, backward=True)
        if again == "full":
            parts["recomputation"] += sum(self._computed(block, 1.0).values())
            parts.add(self._exchanged(block))
        elif again == "selective":
            parts["recomputation"] += self._elementwise(work)
        beside = {}
        if gathers:
            beside["parameters of data ranks"] = self._gathered(work)
        if reduces and not frozen:
            beside["gradients of data ranks"] = self._reduced(work.dense, work.experts)
        self._times[key] = self._with(parts, beside, times)
        return self._times[key]

    def _with(self, parts: _Parts, beside: Mapping[str, float], calls: float) -> _Parts:
        """Returns the parts of a block with communication beside it: what it does not hide, and what hiding costs."""
        window = sum(seconds for name, seconds in parts.items() if name not in EXPOSED)
        for name, seconds in beside.items():
            hidden = min(seconds, window)
            parts[name] += seconds - hidden + self.efficiency.contention * hidden
            window -= hidden
        queued = calls * self.efficiency.host / (3 if self.execution.compiled else 1)
        if (waits := queued - sum(parts.values())) > 0:
            parts["host"] += waits
        return parts

    def _computed(self, block: BlockWork, times: float, scores: float = 1.0) -> _Parts:
        """Returns the computation of a block: its products `times` times, attention with `scores` times the forward's FLOPs."""
        work, parts = self.work(block), _Parts()
        for product in work.products:
            kind = "expert products" if product.experts else "matrix products"
            parts[kind] += times * self._product(product)
        if work.attention:
            parts["attention"] += scores * work.attention / self._attention
        parts["element-wise"] += max(times, 1.0) * self._elementwise(work)
        return parts

    def _product(self, product: Product) -> float:
        float8 = self.execution.float8_experts if product.experts else self.execution.float8
        peak = self._fp8 if float8 else self._peak
        if product.experts:
            peak *= self.efficiency.experts / self.execution.imbalance
        item = 1 if float8 else ITEM[self.execution.compute]
        return product.flops / peak + product.elements * item / self._memory

    def _elementwise(self, work: RankWork) -> float:
        passes = (1.0 if self.execution.compiled else self.efficiency.eager) + (0.5 if self.execution.float8 else 0.0)
        return passes * work.passes * ITEM[self.execution.compute] / self._memory

    def _head(self, half: bool) -> _Parts:
        """Returns forward and backward of the loss head."""
        layout, execution = self.layout, self.execution
        rows = execution.rows * execution.length / layout.cp
        vocab = self.model.vocab / layout.tp
        product = self._product(Product(rows, self.model.dim, vocab))
        logits = BYTES_OF_LOGITS * rows * vocab / self._memory
        parts = _Parts({"head and loss": self.model.heads * ((2.0 if half or execution.frozen else 3.0) * product + logits)})
        if layout.tp > 1:
            parts["tensor parallel"] += 2 * self._split(self._stream())
        return parts

    def _stream(self) -> float:
        return self.execution.rows * self.execution.length / self.layout.cp * self.model.dim * ITEM[self.execution.compute]

    def _exchanged(self, block: BlockWork, backward: bool = False) -> _Parts:
        """Returns the exposed exchanges of a forward, or of a backward, of a block."""
        work, layout, parts = self.work(block), self.layout, _Parts()
        if layout.tp > 1:
            pairs = sum(matrix.cut == "inputs" and not matrix.experts for matrix in block.matrices)
            one = self._split(work.stream)
            seconds = 2 * pairs * one  # a gather before each pair of split matrices, a scatter after it
            if self.execution.asynchronous:
                seconds = max(seconds - 0.8 * sum(self._product(product) for product in work.products), 0.2 * seconds)
            parts["tensor parallel"] += seconds
        if layout.cp > 1:
            seconds = self._ring(work.pair_back if backward else work.pair, layout.tp, layout.cp)
            if self.execution.context == "ring":  # attention works on the keys that are there
                seconds = max(seconds - work.attention / self._attention, 0.0)
            parts["context parallel"] += seconds
        if block.experts and layout.ep > 1:
            parts["expert parallel"] += 2 * self.execution.imbalance * self._dispatched(block, work.tokens)
        return parts

    def _gathered(self, work: RankWork) -> float:
        """Returns the time in which data ranks gather the parameters of a block."""
        layout, execution = self.layout, self.execution
        item = ITEM[execution.compute]
        dense = work.dense * (1 if execution.float8 and execution.float8_gather else item)
        shards = layout.dp_shard * layout.cp
        seconds = self._ring(dense * (shards - 1) / shards, layout.tp, shards)
        spread = layout.efsdp
        return seconds + self._ring(work.experts * item * (spread - 1) / spread, layout.ep * layout.etp, spread)

    def _reduced(self, dense: float, experts: float) -> float:
        """Returns the time in which data ranks sum gradients of these elements: over shards, then over replicas."""
        layout, item = self.layout, self.execution.gradient_bytes
        stride, seconds = layout.dp_shard * layout.cp * layout.tp, 0.0
        for elements, inner, shards in (
            (dense, layout.tp, layout.dp_shard * layout.cp),
            (experts, layout.ep * layout.etp, layout.efsdp),
        ):
            seconds += self._ring(elements * item * (shards - 1) / shards, inner, shards)
            copies = layout.dp_replicate
            seconds += self._ring(2 * elements / shards * item * (copies - 1) / copies, stride, copies)
        return seconds

    def outside(self, stage: StageBlocks) -> _Parts:
        """Returns the gather of what is outside of blocks, which nothing hides."""
        layout = self.layout
        shards = layout.dp_shard * layout.cp
        size = self._outside_elements(stage) * ITEM[self.execution.compute] * (shards - 1) / shards
        return _Parts({"parameters of data ranks": self._ring(size, layout.tp, shards)})

    def _embedded(self, stage: StageBlocks) -> _Parts:
        """Returns the scatter of the embedded tokens over tp ranks, or the gather of their gradients."""
        if self.layout.tp == 1 or 0 not in stage.blocks:
            return _Parts()
        return _Parts({"tensor parallel": self._split(self._stream())})

    def _outside_elements(self, stage: StageBlocks) -> float:
        """Returns the elements outside of blocks on a stage: the table on the first, the head on the last."""
        if self.layout.pp == 1:
            return self.model.outside / self.layout.tp
        ends = (0 in stage.blocks) + stage.head
        return ends * self.model.dim * self.model.vocab / self.layout.tp

    def _link(self, stride: int) -> tuple[Link, float]:
        """Returns the link between neighbors at a distance of `stride` ranks, and the part of it that is reached."""
        if stride < self.hardware.per_node:
            return self.hardware.node, self.efficiency.node
        return self.hardware.network, self.efficiency.network

    def _inside(self, stride: int, size: int) -> int:
        """Returns the ranks of a group of `size` ranks, each `stride` apart, that are on one node."""
        return max(1, min(size, self.hardware.per_node // stride))

    def _split(self, stream: float) -> float:
        """Returns the time in which tp ranks gather or scatter the residual stream."""
        within = self._ring(stream * (self.layout.tp - 1) / self.layout.tp, 1, self.layout.tp)
        return within * max(1.0, self.efficiency.node / self.efficiency.tensor)

    def _ring(self, received: float, stride: int, size: int) -> float:
        """Returns the time of a gather or a scatter in which each rank receives `received` bytes.

        Over nodes, a rank of each node sends for its neighbors, so members on one node share the load of the network.
        """
        if size == 1 or received <= 0:
            return 0.0
        inside = self._inside(stride, size)
        node = self.hardware.node.bandwidth * self.efficiency.node
        if inside == size:
            return received / node + (size - 1) * self.hardware.node.latency
        network = inside * self.hardware.network.bandwidth * self.efficiency.network
        hops = ceil(size / inside) * self.hardware.network.latency + (inside - 1) * self.hardware.node.latency
        return received / (min(node, network) if inside > 1 else network) + hops

    def _dispatched(self, block: BlockWork, tokens: float) -> float:
        """Returns the time in which tokens reach their experts, or come back; both kinds of links work at once."""
        layout, kind = self.layout, self.execution.dispatcher
        size, stride = layout.ep, layout.etp
        if kind == "all_gather":
            return self._ring(tokens * (size - 1), stride, size)
        inside = self._inside(stride, size)
        nodes = ceil(size / inside)
        if kind == "hierarchical" and self.execution.ranks_per_node not in (0, inside):
            raise PlanError(
                f"the hierarchical dispatcher takes {self.execution.ranks_per_node} ranks of ep for a node, but {inside} of "
                f"them are on a node of {self.hardware.per_node}"
            )
        to_rank, to_node = (expert_probability(block.experts, block.experts // of, block.top_k) for of in (size, nodes))
        within, across = (inside - 1) * to_rank, (size - inside) * to_rank
        if kind == "hierarchical":
            within, across = size / inside * within, (nodes - 1) * to_node  # a node passes on what others sent to it
        within *= tokens / (self.hardware.node.bandwidth * self.efficiency.node)
        across *= tokens / (self.hardware.network.bandwidth * self.efficiency.network)
        return max(within, across) + (inside - 1) * self.hardware.node.latency + (nodes - 1) * self.hardware.network.latency
