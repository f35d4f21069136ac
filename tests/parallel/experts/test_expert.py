"""The gate of experts: three steps in every layout against one process.

Other rows on each data rank, uneven valid tokens, padding at the ends of rows, one row of padding alone, one micro-batch without
any label. Compared are loss, norm, every gradient of the first step, weights after the last one, the statistics of every layer
and the biases that follow from them after each step, and the loss of an evaluation. Replicas have to be equal bit by bit.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.utils import counters

from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import Observer
from forge_core.registry import Registry
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import HashConfig, MoEConfig, SigmoidTopKConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import Losses
from forge_parallel.model.parallel_model import gathered
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.placement.topology import Topology
from forge_parallel.step.reduce import begin_statistics, clip_grad_norm
from forge_parallel.step.step import Step, local_batch
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel, Kind
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.parity import Case, Measurement, compare, share, synthetic
from forge_parallel.verify.state import Drift, drifted
from harness.pool import World

VOCAB, ROWS, STEPS = 61, 8, 3
BALANCED = MoEConfig(
    experts=8,
    top_k=3,
    shared=1,
    ffn_dim=8,
    first_dense=1,
    router=SigmoidTopKConfig(bias_rate=0.01),
    losses=Losses(global_batch=0.1, z=0.01),
)
BY_TOKEN = replace(BALANCED, router=HashConfig(), losses=Losses())
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")


class Lived(NamedTuple):
    """What one rank has seen: `layers` holds, by path, bias and statistics after each step."""

    measured: Measurement
    evaluated: float
    layers: dict[str, list[torch.Tensor]]
    drift: Drift | None


def case_of(moe: MoEConfig) -> Case:
    decoder = DecoderConfig(dim=16, ffn_dim=24, heads=4, kv_heads=2, layers=4, vocab_size=VOCAB, max_length=32, moe=moe)
    return Case(decoder.build, CrossEntropy(z_loss=1e-2).build(), AdamWConfig(lr=1e-2).build, VOCAB, rows=ROWS, steps=STEPS)


def padded(batch: Batch, token: int) -> Batch:
    """Row r ends with r tokens of padding, and the last but one is nothing else."""
    assert batch.documents is not None
    length = batch.tokens.shape[1]
    begins = length - torch.arange(ROWS)
    begins[ROWS - 2] = 0
    padding = torch.arange(length) >= begins[:, None]
    return replace(
        batch,
        tokens=batch.tokens.masked_fill(padding, token),
        labels=batch.labels.masked_fill(padding, IGNORE),
        documents=batch.documents.masked_fill(padding, PADDING),
    )


def lived(
    layout: str, kind: Kind = "all_to_all", schedule: str = "1f1b", again: bool = False, moe: MoEConfig = BALANCED, pad: int = 0
) -> tuple[Any, ...]:
    """One rank's `Lived`, as a plain tuple."""
    case, at, cpu = case_of(moe), Layout.parse(layout), torch.device("cpu")
    topology = Topology.of(at, cpu)
    transforms: list[Any] = [
        FullyShard(),
        TensorParallel(),
        ContextParallel(),
        ExpertParallel(dispatcher=kind, ranks_per_node=2 if kind == "hierarchical" else None),
    ]
    transforms += [Recompute()] if again else []
    pipeline = Pipeline(Registry().load("forge.pipeline_schedules", schedule)().build()) if at.pp > 1 else None
    model = realize(Blueprint.of(case.build), Plan.of(transforms, at, pipeline), topology, 0, "fp64", "fp64")
    optimizer, step = case.optimizer(model), Step(model, case.objective)
    named = [(path, module) for part in model.parts for path, module in part.named_modules() if isinstance(module, Observer)]
    layers: dict[str, list[torch.Tensor]] = {path: [] for path, _ in named}
    rows, gradients, numbers = topology.data_rank, {}, []

    def mine(number: int) -> list[Batch]:
        return share(padded(synthetic(case, number), pad), rows, topology.data_size, 1)

    evaluated = step.evaluate(mine(0)).loss
    for number in range(STEPS):
        result = step(mine(number))
        if number == 0:
            gradients = gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()})
        clip_grad_norm(model, result.norm, 0.5)
        optimizer.step(result.skip)
        optimizer.zero_grad()
        numbers.append(result.numbers())
        for path, module in named:
            bias = getattr(module.router, "bias", None)
            bias = torch.zeros(0).double() if bias is None else bias.double()
            layers[path].append(torch.cat([bias, *(total.flatten() for total in module.totals)]))
    weights = gathered(model, {name: tensor for name, tensor, _ in model.trainable()})
    column = [[row[key] for row in numbers] for key in ("loss", "grad_norm", "tokens")]
    return Measurement(*column, {}, gradients, weights), evaluated, layers, drifted(model)


@cache
def alone(by_token: bool = False) -> Lived:
    return Lived(*lived("1", moe=BY_TOKEN if by_token else BALANCED))


def on(world: World, layout: str, **settings: Any) -> list[Lived]:
    return [Lived(*found) for found in world.run(lived, Layout.parse(layout).world, layout, timeout=300, **settings)]


def equals_one_process(expected: Lived, found: list[Lived]) -> None:
    for rank in found:
        difference = compare(expected.measured, rank.measured)
        assert difference.accepted("fp64"), difference
        assert rank.evaluated == pytest.approx(expected.evaluated, rel=1e-12)
        assert rank.drift is None
        for path, steps in rank.layers.items():
            for one, other in zip(expected.layers[path], steps, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-13)
                assert torch.equal(other[:-2], one[:-2]), "biases, loads and numbers of tokens are exact"
    assert {path for rank in found for path in rank.layers} == expected.layers.keys()


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "layout",
    [
        slow("dp2ep2"),
        slow("dp4ep2"),
        slow("dp4ep4"),
        "tp2ep2",
        slow("dp2tp2ep2"),
        slow("dp2cp2ep2"),
        slow("hsdp2x2ep2"),
        slow("dp2tp2ep2etp2"),
        slow("tp2"),
        slow("tp2etp2"),
        slow("cp2tp2ep4"),
        slow("dp2"),
    ],
)
def test_a_layout_equals_one_process(world: World, layout: str) -> None:
    equals_one_process(alone(), on(world, layout))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_equals_one_process(world: World, schedule: str) -> None:
    equals_one_process(alone(), on(world, "dp2pp2ep2", schedule=schedule))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kind"),
    [("dp4ep4", "all_gather"), ("dp4ep4", "hierarchical"), ("dp2tp2ep4", "hierarchical"), ("dp2pp2ep2", "all_gather")],
)
def test_every_dispatcher(world: World, layout: str, kind: Kind) -> None:
    equals_one_process(alone(), on(world, layout, kind=kind))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2ep2", "dp2pp2ep2", "dp2tp2ep2etp2"])
def test_recomputation_changes_no_statistic(world: World, layout: str) -> None:
    equals_one_process(alone(), on(world, layout, again=True))


@pytest.mark.slow
def test_a_stage_without_experts(world: World) -> None:
    """Its ranks have nothing to count, and open no group of their own accord."""
    later = replace(BALANCED, first_dense=2)
    equals_one_process(Lived(*lived("1", moe=later)), on(world, "dp2pp2ep2", moe=later))


def refused(layout: str, transforms: list[Any]) -> str:
    topology = Topology.of(Layout.parse(layout), torch.device("cpu"))
    try:
        realize(Blueprint.of(case_of(BALANCED).build), Plan.of(transforms, topology.layout), topology, 0)
    except PlanError as refusal:
        return str(refusal)
    return ""


def test_what_would_be_wrong_is_refused(world: World) -> None:
    """Nobody would sum the gradients of experts over ranks that see different tokens, or they would see the same ones."""
    for message in world.run(refused, 2, "tp2", [TensorParallel()]):
        assert "no transform sums the gradients of blocks.1.mlp.experts" in message
        assert "[transforms.shard]" in message
    for message in world.run(refused, 2, "tp2", [TensorParallel(sequence_parallel=False), FullyShard()]):
        assert "sequence_parallel = true" in message
    for message in world.run(refused, 2, "dp2ep2", [FullyShard(), ExpertParallel(dispatcher="hierarchical", ranks_per_node=2)]):
        assert "two nodes" in message


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2pp2ep2", "cp2tp2ep2"])
def test_routers_that_look_at_tokens(world: World, layout: str) -> None:
    equals_one_process(alone(True), on(world, layout, moe=BY_TOKEN))


def test_padding_changes_nothing(world: World) -> None:
    """Other tokens in its place give the same numbers: also of the rows of the table that it looks up."""
    equals_one_process(alone(), on(world, "dp2ep2", pad=7))


def test_the_gate_has_what_it_says() -> None:
    expected = alone()
    assert expected.evaluated == pytest.approx(expected.measured.loss[0], rel=1e-12), "outputs do not depend on the mode"
    batch = padded(synthetic(case_of(BALANCED), 0), 0)
    assert batch.documents is not None
    real = (batch.documents != PADDING).sum(1).tolist()
    assert real == [16, 15, 14, 13, 12, 11, 0, 9]
    for steps in expected.layers.values():
        bias, load, dropped, rest = steps[0].split([8, 8, 8, 3])
        assert float(load.sum()) == 3 * sum(real)
        assert float(rest[0]) == sum(real)
        assert float(dropped.sum()) == 0
        assert torch.equal(bias, 0.01 * (load.mean() - load).sign())
        assert len({tuple(step[:8].tolist()) for step in steps}) > 2, "biases move"


class Told:
    """An observer that remembers what it is told before a step."""

    def before_step(self, scale: torch.Tensor) -> None:
        self.scale = float(scale)

    def statistics(self) -> torch.Tensor:
        return torch.zeros(0)

    def after_step(self, totals: torch.Tensor, skip: torch.Tensor) -> None:
        """Changes nothing."""

    def report(self) -> dict[str, torch.Tensor]:
        return {}


def told(layout: str) -> float:
    case, at = case_of(BALANCED), Layout.parse(layout)
    topology = Topology.of(at, torch.device("cpu"))
    pipeline = Pipeline(Registry().load("forge.pipeline_schedules", "1f1b")().build()) if at.pp > 1 else None
    plan = Plan.of([FullyShard(), TensorParallel(), ContextParallel(), ExpertParallel()], at, pipeline)
    model = realize(Blueprint.of(case.build), plan, topology, 0)
    batches = share(padded(synthetic(case, 0), 0), topology.data_rank, topology.data_size, 1)
    layer = Told()
    begin_statistics([layer], model, [local_batch(model, batch) for batch in batches])
    return layer.scale


@pytest.mark.parametrize("layout", ["1", "dp2", "tp2", "cp2", "pp2"])
def test_a_layer_is_told_one_over_the_tokens_that_are_no_padding(world: World, layout: str) -> None:
    ranks = Layout.parse(layout).world
    found = [told(layout)] if ranks == 1 else world.run(told, ranks, layout)
    assert found == [1 / (16 + 15 + 14 + 13 + 12 + 11 + 0 + 9)] * ranks


EXPERTS = MoEConfig(
    experts=4, shared=1, ffn_dim=24, router=SigmoidTopKConfig(bias_rate=0.1), losses=Losses(global_batch=0.1, z=0.01)
)


def _graphs(layout: str, layers: Sequence[int], recompute: bool) -> list[int]:
    """Graphs after two steps of models with so many layers; making one more later, for whatever loads, is an error."""
    found = []
    for count in layers:
        torch._dynamo.reset()
        counters.clear()
        decoder = DecoderConfig(dim=32, layers=count, heads=4, kv_heads=2, ffn_dim=48, vocab_size=61, max_length=16, moe=EXPERTS)
        at = Layout.parse(layout)
        topology = Topology.of(at, torch.device("cpu"))
        transforms = [
            Compile().build(),
            FullyShard().build(),
            ExpertParallel().build(),
            *([Recompute(policy="full").build()] if recompute else []),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own imports warn
            model = realize(Blueprint.of(decoder.build), Plan.of(transforms, at), topology, 0, "bf16", "fp32")
            step, optimizer = Step(model, CrossEntropy().build()), AdamWConfig(lr=1e-2).build(model)
            case = Case(decoder.build, step.objective, AdamWConfig().build, 61)
            for number in range(5):
                with torch.compiler.set_stance("fail_on_recompile" if number > 1 else "default"):
                    result = step(share(synthetic(case, number), topology.data_rank, topology.data_size, 2))
                optimizer.step(result.skip)
                optimizer.zero_grad()
        found.append(counters["stats"]["unique_graphs"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_no_graph_is_made_after_warm_up(world: World, recompute: bool) -> None:
    for few, more in world.run(_graphs, 2, "dp2ep2", (2, 3), recompute, timeout=400):
        assert 1 < few == more, "all blocks share their graphs"


def _refused() -> str:
    decoder = DecoderConfig(dim=32, layers=1, heads=4, kv_heads=2, ffn_dim=48, vocab_size=61, max_length=16, moe=EXPERTS)
    at = Layout.parse("dp2ep2")
    transforms = [Compile().build(), FullyShard().build(), ExpertParallel().build(), Recompute().build()]
    try:
        realize(Blueprint.of(decoder.build), Plan.of(transforms, at), Topology.of(at, torch.device("cpu")), 0)
    except PlanError as error:
        return str(error)
    return ""


def test_what_selective_recomputation_keeps_is_not_lost_in_silence(world: World) -> None:
    """The compiler would give up on the whole block, and nothing would be compiled."""
    for found in world.run(_refused, 2):
        assert "transforms.recompute.policy = 'full'" in found
