"""Modeled times follow from counts: products from closed forms, messages from a dry run, bubbles from the literature."""

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_models import GQA, CrossEntropy, DecoderConfig, MoEConfig, MTPConfig, count_flops
from forge_parallel.dryrun.estimate import Workload, dry_run
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import (
    DualPipeV,
    GPipe,
    Interleaved,
    InterleavedZeroBubble,
    OneForwardOneBackward,
    ZeroBubbleV,
    simulate,
)
from forge_parallel.timing import (
    Efficiency,
    Execution,
    Hardware,
    Link,
    ModelWork,
    Scores,
    StageBlocks,
    StepTime,
    predict,
    stages_of,
    work_of,
)
from forge_parallel.timing.step_time import _gathering, _timeline
from forge_parallel.timing.work import BlockMatrix, BlockWork, rank_work
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from harness.siblings import fast

DENSE = DecoderConfig(dim=64, layers=4, heads=8, kv_heads=4, ffn_dim=96, vocab_size=256, max_length=256)
SPARSE = replace(DENSE, moe=MoEConfig(experts=8, top_k=2, ffn_dim=48, kernel="loop"))
LATENT = replace(SPARSE, dim=128, moe=replace(SPARSE.moe, latent_dim=64, shared=1))
WINDOWS = replace(DENSE, attention=GQA(window=32, global_every=2))

ENDLESS = 1e30
"""A rate at which something takes no time."""

PERFECT = Efficiency(
    **dict.fromkeys(("matmul", "float8", "experts", "attention", "memory", "node", "network", "tensor"), 1.0),
    contention=0.0,
    host=0.0,
)
ONE = Hardware("one", 1 << 40, ENDLESS, {"bf16": 1.0, "fp32": 1.0}, 8, Link(ENDLESS, 0.0), Link(ENDLESS, 0.0), 1.0)
"""A GPU with one operation per second and nothing else that takes time: seconds are FLOPs."""

WIRE = replace(ONE, flops={"bf16": ENDLESS, "fp32": ENDLESS}, node=Link(1.0, 0.0), network=Link(1.0, 0.0))
"""A GPU that computes in no time and sends a byte per second: seconds are bytes."""


def work(config: DecoderConfig) -> tuple[Blueprint, ModelWork]:
    """The model of a component with its work."""
    blueprint, shape = Blueprint.of(config.build), config.shape
    attention: Any = shape.attention
    scores = [Scores(attention.score_width(shape.context(index)), window) for index, window in enumerate(shape.windows())]
    return blueprint, work_of(blueprint, scores, config.moe.top_k if config.moe else 1)


def step(
    config: DecoderConfig,
    layout: str,
    execution: Execution,
    hardware: Hardware,
    efficiency: Efficiency = PERFECT,
    pipeline: Any = None,
) -> StepTime:
    """The modeled step of a component."""
    blueprint, model = work(config)
    place = Layout.parse(layout)
    pipeline = Pipeline(pipeline.build()) if pipeline is not None else None
    return predict(model, stages_of(blueprint, pipeline, place.pp), place, execution, hardware, efficiency, pipeline)


@pytest.mark.parametrize("config", [DENSE, SPARSE, LATENT, WINDOWS, replace(DENSE, tied_embeddings=True)])
def test_parameters_and_flops_are_those_of_the_model(config: DecoderConfig) -> None:
    counts, (blueprint, model) = count_flops(config.shape), work(config)
    assert model.parameters == counts.parameters == sum(p.numel() for p in blueprint.module.parameters())
    assert model.flops(128) == counts.training(128)


@pytest.mark.parametrize("config", [DENSE, SPARSE, WINDOWS])
def test_a_step_takes_its_flops(config: DecoderConfig) -> None:
    """One operation per second: products three times a forward, attention 3.5 times, over the keys of a causal kernel."""
    counts, length = count_flops(config.shape), 128
    keys = sum(width * Scores(1.0, window).keys(length) for window, width in counts.widths.items())
    products = 6 * counts.matrix
    expected = 3 * 2 * length * (products + 7 * keys)  # rows, micro-batches
    found = step(config, "1", Execution(rows=3, length=length, micro_batches=2), ONE)
    assert found.seconds == pytest.approx(expected, rel=1e-9)
    again = step(config, "1", Execution(rows=3, length=length, micro_batches=2, recompute="full"), ONE)
    blocks = 3 * 2 * length * (2 * (counts.matrix - 64 * 256) + 2 * keys)
    assert again.seconds == pytest.approx(expected + blocks, rel=1e-9)
    half = step(config, "1", Execution(rows=3, length=length, micro_batches=2, recompute="full", every=2), ONE)
    if config is not WINDOWS:
        assert half.seconds == pytest.approx(expected + blocks / 2, rel=1e-9)


def test_keys_of_a_causal_kernel() -> None:
    for length, window in product((1, 7, 16), (None, 1, 5, 16, 40)):
        seen = [min(position + 1, window or length) for position in range(length)]
        assert Scores(1.0, window).keys(length) == pytest.approx(sum(seen) / length)


@pytest.mark.parametrize("layout", ["dp4", "tp2", "cp2", "dp2tp2", "dp2cp2tp2", "dp4ep2", "dp4ep4", "dp2tp2ep4", "hsdp2x2"])
@pytest.mark.parametrize("config", [DENSE, SPARSE, LATENT])
def test_ranks_share_the_products(config: DecoderConfig, layout: str) -> None:
    """FLOPs of one rank times ranks are those of one process; ranks of tp share the tokens of routers and latent projections."""
    place = Layout.parse(layout)
    if place.ep > 1 and config is DENSE:
        return
    _, model = work(config)
    whole = [rank_work(block, 64, Layout(), Execution(4 * place.data, 128)) for block in model.blocks]
    parts = [rank_work(block, 64, place, Execution(4, 128)) for block in model.blocks]
    for one, part in zip(whole, parts, strict=True):
        flops = sum(item.flops for item in part.products)
        assert flops * place.world == pytest.approx(sum(item.flops for item in one.products))
        assert part.attention * place.world == pytest.approx(one.attention)


CASES = [
    ("dp4", DENSE, [FullyShard(reduce="each")], {"reduce": "each"}),
    ("dp4", DENSE, [FullyShard()], {}),
    ("dp4", DENSE, [FullyShard(reshard=False)], {"reshard": False}),
    ("hsdp2x2", DENSE, [FullyShard(reduce="each")], {"reduce": "each"}),
    ("tp2", DENSE, [TensorParallel()], {}),
    ("tp4", DENSE, [TensorParallel()], {}),
    ("dp2tp2", DENSE, [TensorParallel(), FullyShard()], {}),
    ("cp2", DENSE, [ContextParallel(kind="all_gather"), FullyShard()], {}),
    ("cp2", DENSE, [ContextParallel(kind="ring"), FullyShard()], {"context": "ring"}),
    ("cp2", DENSE, [ContextParallel(kind="ulysses"), FullyShard()], {"context": "ulysses"}),
    ("cp4", DENSE, [ContextParallel(kind="ulysses"), FullyShard()], {"context": "ulysses"}),
    ("cp4", DENSE, [ContextParallel(kind="ring"), FullyShard()], {"context": "ring"}),
    ("cp2tp4", DENSE, [TensorParallel(), ContextParallel(kind="all_gather"), FullyShard()], {}),
    ("cp2tp4", DENSE, [TensorParallel(), ContextParallel(kind="ulysses"), FullyShard()], {"context": "ulysses"}),
    ("tp2", DENSE, [TensorParallel(sequence_parallel=False)], {"sequence_parallel": False}),
    ("dp4ep2", SPARSE, [ExpertParallel(dispatcher="all_gather"), FullyShard()], {"dispatcher": "all_gather"}),
    ("dp4ep2", SPARSE, [ExpertParallel(), FullyShard()], {}),
    ("dp4ep4", SPARSE, [ExpertParallel(), FullyShard()], {}),
    ("dp4ep4", LATENT, [ExpertParallel(), FullyShard()], {}),
    ("dp4ep2", LATENT, [ExpertParallel(dispatcher="all_gather"), FullyShard()], {"dispatcher": "all_gather"}),
]
PARTS = {
    "dp_shard": "data",
    "dp_replicate": "data",
    "efsdp": "data",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
}


@pytest.mark.parametrize(
    ("layout", "config", "transforms", "keys"),
    fast(CASES[3], CASES[6], CASES[9], CASES[15], of=CASES),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages_are_those_of_a_dry_run(layout: str, config: DecoderConfig, transforms: list[Any], keys: dict[str, Any]) -> None:
    """With endless arithmetic and a byte per second, the time of each part is the bytes that a dry run counts, within 2 %.

    Not modeled are small numbers: of losses and norms, and with each token, of 128 bytes, the weights of its experts.
    """
    place = Layout.parse(layout)
    workload = Workload(config.build, CrossEntropy().build(), AdamWConfig().build, rows=8, length=256, micro_batches=3)
    counted: dict[str, float] = {}
    for flow in dry_run(workload, Plan.of(transforms, place)).flows:
        part = "data" if flow.axis == "cp" and flow.kind == "reduce_scatter" else PARTS.get(flow.axis)
        if part is not None and flow.kind != "receive":  # what one rank sends, another receives
            counted[part] = counted.get(part, 0.0) + flow.wire
    time = step(config, layout, Execution(rows=8, length=256, micro_batches=3, **keys), WIRE)
    modeled: dict[str, float] = {}
    for name, seconds in time.parts.items():
        part = "data" if name.endswith("data ranks") else name
        modeled[part] = modeled.get(part, 0.0) + seconds
    if layout in ("cp2", "cp4", "cp2tp4"):  # parameters and keys are gathered over the same ranks
        counted, modeled = ({"all": sum(found.values())} for found in (counted, modeled))
    known = {name: bytes_ for name, bytes_ in modeled.items() if bytes_ > 1e-9}
    assert known.keys() == counted.keys()
    for part, sent in counted.items():
        assert known[part] == pytest.approx(sent, rel=0.07 if part == "expert parallel" else 0.02), part


def test_communication_hides_behind_computation() -> None:
    """Gathers cost nothing while blocks compute longer; then what is longer; `contention` of what is hidden in any case."""
    execution = Execution(rows=4, length=128)
    alone = step(DENSE, "1", execution, ONE).seconds
    slow = replace(ONE, node=Link(1e-6, 0.0))
    parts = step(DENSE, "dp4", execution, replace(ONE, node=Link(1e9, 0.0))).parts
    assert sum(time for name, time in parts.items() if name.endswith("data ranks")) < 1e-3 * alone
    assert step(DENSE, "dp4", execution, slow).seconds > 2 * alone
    hidden = step(DENSE, "dp4", execution, replace(ONE, node=Link(1.0, 0.0)), replace(PERFECT, contention=0.5))
    none = step(DENSE, "dp4", execution, replace(ONE, node=Link(1.0, 0.0)))
    assert hidden.seconds > none.seconds


def test_the_host_bounds_small_steps() -> None:
    found = step(DENSE, "1", Execution(rows=1, length=16), replace(ONE, flops={"bf16": ENDLESS}), replace(PERFECT, host=1.0))
    assert found.parts["host"] == pytest.approx(4 * (1 + 2))  # a forward, and a backward of twice the kernels
    compiled = step(
        DENSE, "1", Execution(rows=1, length=16, compiled=True), replace(ONE, flops={"bf16": ENDLESS}), replace(PERFECT, host=1.0)
    )
    assert compiled.parts["host"] == pytest.approx(4 * (1 + 2) / 3)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 64)])
def test_bubbles_of_the_literature(ranks: int, micro_batches: int) -> None:
    """Equal stages: (p - 1) / M for GPipe and 1F1B, divided by v with v stages per rank (Narayanan et al., 2021)."""
    block = BlockWork((BlockMatrix(8, 8),))
    model = ModelWork((block,) * 16, dim=8, vocab=0, outside=0)
    for component, stages_per_rank in (
        (GPipe(), 1),
        (OneForwardOneBackward(), 1),
        (Interleaved(), 2),
        (Interleaved(stages_per_rank=4), 4),
    ):
        count = ranks * stages_per_rank
        each = 16 // count
        stages = tuple(StageBlocks(tuple(range(index * each, (index + 1) * each)), index == count - 1) for index in range(count))
        place, execution = Layout(pp=ranks), Execution(rows=1, length=8, micro_batches=micro_batches)
        found = predict(model, stages, place, execution, ONE, PERFECT, Pipeline(component.build()))
        assert found.bubble == pytest.approx((ranks - 1) / (stages_per_rank * micro_batches)), component
        assert found.parts["pipeline waits"] == pytest.approx(found.seconds * found.bubble / (1 + found.bubble))


SCHEDULES = [
    GPipe(),
    OneForwardOneBackward(),
    Interleaved(),
    Interleaved(stages_per_rank=4),
    InterleavedZeroBubble(),
    ZeroBubbleV(),
    DualPipeV(),
]


@pytest.mark.parametrize(
    "component", SCHEDULES, ids=lambda component: f"{type(component).__name__}{getattr(component, 'stages_per_rank', '')}"
)
def test_long_schedules_repeat_their_middle(component: Any) -> None:
    """Extrapolated schedules with uneven stages and transfers equal simulated ones."""
    pipeline, random = Pipeline(component.build()), Random(0)
    for ranks in (2, 4):
        stages = len(pipeline.placement(ranks))
        costs = [random.uniform(0.8, 1.2) for _ in range(stages)]
        costs[-1] += 0.5

        keys = product({"F": 1, "B": 2, "I": 1, "W": 1}.items(), range(stages), (False, True))
        given = {(kind, stage, gathers): (time + 0.3 * gathers) * costs[stage] for (kind, time), stage, gathers in keys}
        for count, frees in product((5 * ranks, 9 * ranks), (False, True)):
            table = pipeline.schedule.actions(ranks, count)
            gathers = {action: frees and gathers for order in table for action, gathers in _gathering(order)}

            def cost(action: Any, given: Any = given, gathers: Any = gathers) -> float:
                return given[action.kind, action.stage, gathers[action]]

            whole = simulate(table, stages, cost, 0.05)
            length, busy, done = _timeline(pipeline, ranks, count, stages, given, frees, 0.05)
            assert sum(done.values()) == sum(map(len, table))
            assert sum(done[key] for key in done if key[2]) == sum(gathers.values())
            assert length == pytest.approx(whole.length, rel=1e-9)
            assert busy == pytest.approx(whole.busy, rel=1e-9)


@pytest.mark.parametrize("component", [OneForwardOneBackward(), Interleaved(), Interleaved(stages_per_rank=4)])
def test_the_bound_of_a_schedule_is_below_it_and_close(component: Any) -> None:
    config, pipeline = replace(DENSE, layers=16), Pipeline(component.build())
    blueprint, model = work(config)
    for ranks, count in product((2, 4), (8, 16, 48)):
        stages = stages_of(blueprint, pipeline, ranks)
        given = (model, stages, Layout(pp=ranks), Execution(rows=2, length=128, micro_batches=count), ONE, PERFECT, pipeline)
        exact, bound = predict(*given).seconds, predict(*given, exact=False).seconds
        assert bound <= exact * (1 + 1e-9)
        assert bound > 0.85 * exact


H100 = Hardware.load("h100")


@pytest.mark.parametrize("layout", ["1", "dp16", "hsdp2x8", "dp4tp4", "dp2cp2tp4", "pp2dp8", "pp4dp2tp2", "dp16ep8"])
def test_better_hardware_is_never_slower(layout: str) -> None:
    config = SPARSE if "ep" in layout else replace(DENSE, layers=8)
    pipeline = Interleaved() if "pp" in layout else None
    execution = Execution(rows=4, length=256, micro_batches=8, recompute="full")
    before = step(config, layout, execution, H100, Efficiency(), pipeline).seconds
    better = (
        replace(H100, flops={name: 2 * rate for name, rate in H100.flops.items()}),
        replace(H100, bandwidth=2 * H100.bandwidth),
        replace(H100, node=replace(H100.node, bandwidth=2 * H100.node.bandwidth)),
        replace(H100, node=replace(H100.node, latency=H100.node.latency / 2)),
        replace(H100, network=replace(H100.network, bandwidth=2 * H100.network.bandwidth)),
        replace(H100, network=replace(H100.network, latency=H100.network.latency / 2)),
    )
    for hardware in better:
        assert step(config, layout, execution, hardware, Efficiency(), pipeline).seconds <= before * (1 + 1e-9)
    for name, worse in (("imbalance", 2.0), ("micro_batches", 16), ("rows", 8)):
        assert step(config, layout, replace(execution, **{name: worse}), H100, Efficiency(), pipeline).seconds >= before * (
            1 - 1e-9
        )


def test_imbalance_slows_experts_only() -> None:
    even, uneven = (
        step(SPARSE, "dp8ep8", Execution(rows=4, length=256, imbalance=factor), H100, Efficiency()) for factor in (1.0, 1.5)
    )
    assert uneven.parts["expert products"] > even.parts["expert products"]
    assert uneven.parts["matrix products"] == even.parts["matrix products"]


def test_a_token_goes_once_to_each_node_with_the_hierarchical_dispatcher() -> None:
    """Two nodes of four, 8 experts on 8 ranks: a token with 2 of them is on the other node with probability 1 - C(4,2)/C(8,2)."""
    wire = replace(WIRE, per_node=4, node=Link(ENDLESS, 0.0))
    time = step(SPARSE, "dp8ep8", Execution(rows=4, length=128, dispatcher="hierarchical"), wire)
    tokens = 4 * 128 * 64 * 2  # bytes
    assert time.parts["expert parallel"] == pytest.approx(4 * 4 * tokens * (1 - 6 / 28))  # blocks; there and back, twice
    flat = step(SPARSE, "dp8ep8", Execution(rows=4, length=128), wire)
    assert flat.parts["expert parallel"] == pytest.approx(4 * 4 * tokens * 4 * 2 / 8)  # four ranks of the other node


def test_latent_experts_exchange_fewer_bytes() -> None:
    plain = replace(LATENT, moe=replace(LATENT.moe, latent_dim=None))
    found = [step(config, "dp8ep8", Execution(rows=1, length=128), WIRE).parts for config in (LATENT, plain)]
    assert found[0]["expert parallel"] == found[1]["expert parallel"] / 2  # 64 of 128 values of a token


def test_muon_multiplies() -> None:
    from forge_parallel.optim.muon import flops

    _, model = work(DENSE)
    expected = sum(flops(*sorted((m.outputs, m.inputs)), 5) for block in model.blocks for m in block.matrices)
    assert 5 * sum(block.iteration for block in model.blocks) == expected
    times = [
        step(DENSE, layout, Execution(rows=4, length=128, orthogonalizes=5), ONE).parts["optimizer"] for layout in ("1", "dp4")
    ]
    assert times == pytest.approx([expected, expected / 4])


def test_products_need_a_peak() -> None:
    with pytest.raises(PlanError, match="no fp8_tflops"):
        step(DENSE, "1", Execution(rows=1, length=16, float8=True), Hardware.load("a100"))
    with pytest.raises(PlanError, match="have no time"):
        step(DENSE, "1", Execution(rows=1, length=16, compute="fp64"), H100)


BYTES = replace(ONE, flops=dict.fromkeys(("bf16", "fp8", "fp32"), ENDLESS), bandwidth=1.0)
"""A GPU that computes in no time and moves a byte of its memory per second: seconds are bytes."""


def single(
    block: BlockWork, layout: Layout, execution: Execution, hardware: Hardware, efficiency: Efficiency = PERFECT
) -> StepTime:
    """The modeled step of a model of one block, without embedding and head."""
    return predict(ModelWork((block,), dim=6, vocab=0, outside=0), (StageBlocks((0,)),), layout, execution, hardware, efficiency)


def test_bytes_of_a_block() -> None:
    """Ten tokens times a matrix of 4 x 6: operands and result three times, what enters and leaves three times, eight passes of
    the optimizer over weights in fp32."""
    block, execution = BlockWork((BlockMatrix(4, 6),)), Execution(rows=5, length=2, compiled=True)
    operands, values = 2 * (10 * 6 + 6 * 4 + 10 * 4), 2 * 10 * (4 + 6)
    whole = {"matrix products": 3 * operands, "element-wise": 3 * values, "optimizer": 8 * 24 * 4}
    assert single(block, Layout(), execution, BYTES).parts == whole
    eager = replace(PERFECT, eager=3.0)
    assert single(block, Layout(), replace(execution, compiled=False), BYTES, eager).parts == whole | {"element-wise": 9 * values}
    again = single(block, Layout(), replace(execution, recompute="full"), BYTES).parts
    assert again == whole | {"recomputation": operands + values}
    some = single(block, Layout(), replace(execution, recompute="selective"), BYTES).parts
    assert some == whole | {"recomputation": values}
    narrow = single(block, Layout(), replace(execution, float8=True), BYTES).parts  # casts read and write once more
    assert narrow == whole | {"matrix products": 3 * operands / 2, "element-wise": 4.5 * values}
    half = single(block, Layout(), replace(execution, state="bf16", moments=1), BYTES).parts
    assert half["optimizer"] == 6 * 24 * 2


def test_bytes_of_a_block_without_sequence_parallelism() -> None:
    """Each of two tp ranks has half of the features between split matrices, and half of the stream or all of it."""
    block = BlockWork((BlockMatrix(4, 6, "outputs"), BlockMatrix(6, 4, "inputs")))
    execution = Execution(rows=5, length=2, compiled=True)
    split, whole = (single(block, Layout(tp=2), replace(execution, sequence_parallel=on), BYTES).parts for on in (True, False))
    assert split["element-wise"] == 3 * 2 * 10 * 2 * (4 + 6) / 2
    assert whole["element-wise"] == 3 * 2 * 10 * 2 * (4 / 2 + 6)


def test_bytes_of_experts() -> None:
    """Ten tokens with 2 of 4 experts: 20 rows, 5 for each expert, and tokens that are sorted and put back."""
    block, execution = BlockWork((BlockMatrix(4, 6, "outputs", experts=4),), top_k=2), Execution(rows=5, length=2, compiled=True)
    parts = single(block, Layout(), execution, BYTES).parts
    assert parts["expert products"] == 3 * 2 * 4 * (5 * 6 + 6 * 4 + 5 * 4)
    assert parts["element-wise"] == 3 * 2 * (20 * (4 + 6) + 4 * 20 * 6)
    slow = single(block, Layout(), execution, ONE, replace(PERFECT, experts=0.5)).parts
    assert slow["expert products"] == 3 * 2 * 20 * 4 * 6 / 0.5


def test_bytes_of_the_loss() -> None:
    """Logits of ten tokens over 7 words: three products, and 16 bytes for each logit."""
    model = ModelWork((BlockWork(()),), dim=6, vocab=7, outside=42)
    time = predict(model, (StageBlocks((0,), head=True),), Layout(), Execution(rows=5, length=2), BYTES, PERFECT)
    assert time.parts["head and loss"] == 3 * 2 * (10 * 6 + 6 * 7 + 10 * 7) + 16 * 70


def test_neighbors_of_a_node_share_the_network() -> None:
    """Eight ranks gather 7/8 of a block: each of two nodes of four has four links to the other; links of a node may be slower."""
    block, execution = BlockWork((BlockMatrix(8, 8),)), Execution(rows=1, length=1)
    received = 2 * 64 * 7 / 8 * 2  # bf16, forward and backward
    for per_node, node, expected in ((1, ENDLESS, 1.0), (4, ENDLESS, 4.0), (4, 3.0, 3.0), (8, 5.0, 5.0)):
        wire = replace(WIRE, per_node=per_node, node=Link(node, 0.0))
        time = single(block, Layout(dp_shard=8), execution, wire).parts["parameters of data ranks"]
        assert time == pytest.approx(received / expected)
    late = replace(WIRE, per_node=4, node=Link(ENDLESS, 1.0), network=Link(ENDLESS, 100.0))
    time = single(block, Layout(dp_shard=8), execution, late).parts["parameters of data ranks"]
    assert time == pytest.approx(2 * (2 * 100 + 3))  # a hop to each node, and the hops within one


def test_two_communications_hide_behind_one_computation() -> None:
    """A backward of 2 x 2 x 10 x 24 seconds hides a gather and a reduction together, not each of them."""
    block, window = BlockWork((BlockMatrix(4, 6),)), 2 * 2 * 10 * 24
    gathered, reduced = 2 * 24 / 2, 4 * 24 / 2
    for rate in (0.01, 0.05, 0.08, 1.0):
        wire = replace(ONE, node=Link(rate, 0.0))
        parts = single(block, Layout(dp_shard=2), Execution(rows=5, length=2), wire).parts
        shown = parts.get("parameters of data ranks", 0.0) + parts.get("gradients of data ranks", 0.0)
        forward = max(gathered / rate - window / 2, 0.0)
        assert shown == pytest.approx(forward + max((gathered + reduced) / rate - window, 0.0))


def test_asynchronous_exchanges_hide_behind_products() -> None:
    """At most eight tenths of the products hide them, and a fifth of an exchange is always seen."""
    block = BlockWork((BlockMatrix(4, 6, "outputs"), BlockMatrix(6, 4, "inputs")))
    exchange, products = 2 * 10 * 6 * 2 / 2, 2 * 2 * 10 * 24 / 2
    for rate in (0.01, 0.2, 1.0):
        time = single(block, Layout(tp=2), Execution(rows=5, length=2, asynchronous=True), replace(ONE, node=Link(rate, 0.0)))
        seen = max(exchange / rate - 0.8 * products, 0.2 * exchange / rate)
        outside = 2 * exchange / 2 / rate  # embedded tokens are scattered, their gradients gathered
        assert time.parts["tensor parallel"] == pytest.approx(2 * seen + outside)


SCHEDULES = [GPipe(), OneForwardOneBackward(), Interleaved(), ZeroBubbleV()]


def test_stages_send_over_the_network() -> None:
    """Two stages that compute in no time: an activation goes there and its gradient comes back."""
    block = BlockWork((BlockMatrix(6, 6),))
    model, stages = ModelWork((block, block), dim=6, vocab=0, outside=0), (StageBlocks((0,)), StageBlocks((1,), head=True))
    given = Layout(pp=2), Execution(rows=5, length=2, micro_batches=2)
    for per_node, expected in ((1, 2 * 10 * 6 * 2.0), (2, 0.0)):
        wire = replace(WIRE, per_node=per_node, node=Link(ENDLESS, 0.0))
        time = predict(model, stages, *given, wire, PERFECT, Pipeline(OneForwardOneBackward().build()))
        assert time.seconds == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("component", fast(ZeroBubbleV(), of=SCHEDULES))
@pytest.mark.parametrize("reshard", fast(None, of=[None, True]))
def test_messages_of_a_pipeline_are_those_of_a_dry_run(component: Any, reshard: bool | None) -> None:
    """The rank with the first stage: blocks are gathered once in a step, or before each action that finds them freed; gradients
    are reduced once."""
    place, pipeline = Layout.parse("pp2dp2"), Pipeline(component.build())
    if why := pipeline.schedule.refusal(place.pp, 4):  # this torch is too old for halves of a backward
        pytest.skip(why)
    workload = Workload(DENSE.build, CrossEntropy().build(), AdamWConfig().build, rows=8, length=256, micro_batches=4)
    flows = dry_run(workload, Plan.of([FullyShard(reshard=reshard)], place, pipeline)).flows
    counted = {flow.kind: flow.wire for flow in flows if flow.axis == "dp_shard"}
    blueprint, model = work(DENSE)
    execution = Execution(rows=8, length=256, micro_batches=4, reshard=reshard)
    parts = predict(model, stages_of(blueprint, pipeline, 2), place, execution, WIRE, PERFECT, pipeline).parts
    assert parts["gradients of data ranks"] == pytest.approx(counted["reduce_scatter"], rel=0.02)
    assert parts["parameters of data ranks"] == pytest.approx(counted["all_gather"], rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_block_is_on_one_stage(ranks: int) -> None:
    config, pipeline = replace(DENSE, layers=7, mtp=MTPConfig(depth=1)), Pipeline(OneForwardOneBackward().build())
    blueprint, model = work(config)
    stages = stages_of(blueprint, pipeline, ranks)
    assert [index for stage in stages for index in stage.blocks] == list(range(len(model.blocks))) == list(range(8))
    assert [stage.head for stage in stages] == [False] * (ranks - 1) + [True]
    assert model.heads == 2
