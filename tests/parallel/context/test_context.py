"""Context parallelism: decoders whose rows are cut over ranks against one process, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core.batch import IGNORE, Batch
from forge_core.errors import ForgeError, PlanError
from forge_core.layout import Layout
from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import Rope, Streams, ValueEmbeddings
from forge_parallel.dryrun.traffic import Traffic
from forge_parallel.model.parallel_model import gathered
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import OneForwardOneBackward
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step, local_batch
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel as TensorParallel
from forge_parallel.verify.parity import Case, Measurement, compare, measure
from harness.pool import World
from harness.siblings import fast
from parallel.one_process import alone
from parallel.tiny import Tiny

CPU = torch.device("cpu")
KINDS = ["all_gather", "ring", "ulysses"]
VOCAB = 61

kinds = pytest.mark.parametrize("kind", KINDS)


def decoder(**changes: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_length": 32}
    return DecoderConfig(**sizes | {"vocab_size": VOCAB} | changes)


def case(component: DecoderConfig, **changes: Any) -> Case:
    return Case(component.build, CrossEntropy().build(), AdamWConfig(lr=1e-2).build, VOCAB, **changes)


def _transforms(kind: Any, *further: Any) -> list[Any]:
    return [ContextParallel(kind=kind).build(), FullyShard(), *further]


def _measure(case: Case, layout: str, kind: str) -> Measurement:
    return measure(case, Plan.of(_transforms(kind), Layout.parse(layout)), CPU)


def _same(world: World, case: Case, layout: str, kind: str) -> None:
    at = Layout.parse(layout)
    whole = alone(measure, replace(case, micro_batch=case.rows), Plan.of([], Layout()), CPU)
    for found in world.run(_measure, at.world, case, layout, kind):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


LAYOUTS = [("cp2", True), ("cp4", False), ("dp2cp2", True), ("hsdp2x1cp2", False)]
FAST = (("cp2", True, "ring"), ("cp4", False, "all_gather"), ("dp2cp2", True, "ulysses"), ("hsdp2x1cp2", False, "ring"))


@pytest.mark.parametrize(("layout", "tied", "kind"), fast(*FAST, of=[(*at, kind) for at in LAYOUTS for kind in KINDS]))
def test_a_layout_equals_one_process(world: World, layout: str, tied: bool, kind: str) -> None:
    """One process takes all rows at once; the layout cuts them, and its first micro-batch has not one label."""
    _same(world, case(decoder(tied_embeddings=tied), micro_batch=2, silent=2), layout, kind)


LATENT = MLA(q_lora_rank=6, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)


ATTENTIONS = {
    "windows": decoder(attention=GQA(window=6, global_every=2)),
    "mla": decoder(kv_heads=4, attention=LATENT),
    "learned positions": decoder(learned_positions=True, attention=GQA(nope_every=1)),
    "temperature": decoder(attention=GQA(temperature=0.7, temperature_length=2)),
    "sinks": decoder(attention=GQA(sinks=True, window=6, global_every=2)),
    "value embeddings": decoder(attention=GQA(value_embeddings=ValueEmbeddings(layers=(1,), gate_channels=5))),
    "streams": decoder(streams=Streams(count=3, sinkhorn=5)),
}
FAST_ATTENTIONS = (
    ("windows", "ring"),
    ("mla", "ulysses"),
    ("mla", "all_gather"),
    ("sinks", "ring"),
    ("streams", "ring"),
    ("value embeddings", "ring"),
)


@pytest.mark.parametrize(("name", "kind"), fast(*FAST_ATTENTIONS, of=[(name, kind) for name in ATTENTIONS for kind in KINDS]))
def test_attentions(world: World, name: str, kind: str) -> None:
    _same(world, case(ATTENTIONS[name]), "cp4" if name == "windows" else "cp2", kind)


def _measure_cut_twice(case: Case, layout: str, kind: str) -> Measurement:
    return measure(case, Plan.of(_transforms(kind, TensorParallel()), Layout.parse(layout)), CPU)


@pytest.mark.parametrize("kind", fast("ulysses", of=KINDS))
def test_heads_that_are_cut_as_well(world: World, kind: str) -> None:
    """Cores take the number of heads from what they are given: under tensor parallelism that is a share of the model's."""
    component = decoder(kv_heads=1, heads=8) if kind == "ulysses" else decoder()
    whole = measure(replace(case(component), micro_batch=8), Plan.of([], Layout()), CPU)
    for found in world.run(_measure_cut_twice, 4, case(component), "cp2tp2", kind):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


def _measure_in_stages(case: Case, layout: str, kind: str) -> Measurement:
    return measure(case, Plan.of(_transforms(kind), Layout.parse(layout), Pipeline(OneForwardOneBackward().build())), CPU)


@pytest.mark.parametrize("kind", fast("ring", of=KINDS))
def test_stages(world: World, kind: str) -> None:
    """Every stage of a pipeline gathers documents for itself."""
    staged = case(decoder(tied_embeddings=True), micro_batch=2, silent=2)
    whole = measure(replace(staged, micro_batch=8), Plan.of([], Layout()), CPU)
    for found in world.run(_measure_in_stages, 4, staged, "pp2cp2", kind):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_a_capped_decoder(world: World, kind: str) -> None:
    _same(world, case(decoder(attention=GQA(soft_cap=1.5, qk_norm="head"))), "cp2", kind)


def _odd(which: str) -> Batch:
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(VOCAB, (2, 4, 16), generator=generator)
    positions = documents = None
    if which == "one document over all ranks":
        documents = torch.zeros(4, 16, dtype=torch.int32)
        documents[:, 15] = 1
        positions = torch.arange(16, dtype=torch.int32).repeat(4, 1)
        positions[:, 15] = 0
    if which == "documents without positions":
        documents = (torch.arange(16, dtype=torch.int32) // 3).repeat(4, 1)
    if which == "labels on one rank":  # places 0 and 1, of the four that rank 0 of 4 holds
        labels[:, 2:] = IGNORE
    if which == "no label":
        labels[:] = IGNORE
    return Batch(tokens, labels, positions, documents)


def _odd_numbers(which: str, layout: str, kind: str) -> tuple[dict[str, float], dict[str, Tensor], float, dict[str, Tensor]]:
    """Numbers and gradients of a training step, the loss of an evaluation, and gradients of a step after that."""
    at = Layout.parse(layout)
    topology = Topology.of(at, CPU)
    model = realize(Blueprint.of(decoder().build), Plan.of(_transforms(kind), at), topology, 0, "fp64", "fp64")
    step = Step(model, CrossEntropy().build())
    results = []
    evaluation = None
    for _ in range(2):
        numbers = step([_odd(which)]).numbers()
        results.append(gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()}))
        for _, tensor, _ in model.trainable():
            tensor.grad = None
        evaluation = evaluation or step.evaluate([_odd(which)])
    assert evaluation is not None
    assert evaluation.tokens == numbers["tokens"]
    return numbers, results[0], evaluation.loss, results[1]


@pytest.mark.parametrize("kind", ["all_gather", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
@pytest.mark.parametrize(
    "which",
    [
        "neither positions nor documents",
        "one document over all ranks",
        "documents without positions",
        "labels on one rank",
        "no label",
    ],
)
def test_odd_rows(world: World, kind: str, which: str) -> None:
    numbers, gradients, loss, _ = _odd_numbers(which, "1", kind)
    for found in world.run(_odd_numbers, 4, which, "cp4", kind):
        assert found[0] == pytest.approx(numbers, rel=1e-10, abs=1e-12)
        assert found[2] == pytest.approx(loss, rel=1e-10, abs=1e-12)
        for name, expected in gradients.items():
            torch.testing.assert_close(found[1][name], expected, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(found[3][name], found[1][name], rtol=0, atol=0)


def _traffic_of_a_step(kind: str, recompute: bool) -> list[Any]:
    at = Layout(cp=2)
    transforms = _transforms(kind, *([Recompute()] if recompute else []))
    model = realize(Blueprint.of(decoder().build), Plan.of(transforms, at), Topology.of(at, CPU), 0, "fp64", "fp64")
    with Traffic(at) as traffic:
        Step(model, CrossEntropy().build())([_odd("documents without positions")])
    return [flow for flow in traffic.flows() if flow.kind in ("send", "receive", "all_to_all")]


@kinds
def test_selective_recomputation_exchanges_nothing_twice(world: World, kind: str) -> None:
    plain, recomputed = (world.run(_traffic_of_a_step, 2, kind, recompute)[0] for recompute in (False, True))
    assert plain
    assert plain == recomputed


def _measure_recomputed(case: Case, kind: str) -> Measurement:
    return measure(case, Plan.of(_transforms(kind, Recompute(policy="full")), Layout(cp=2)), CPU)


@kinds
def test_blocks_that_are_computed_again(world: World, kind: str) -> None:
    """With nothing kept, whatever is exchanged in a forward is exchanged again in the backward, by all ranks alike."""
    whole = measure(case(decoder(), micro_batch=8), Plan.of([], Layout()), CPU)
    for found in world.run(_measure_recomputed, 2, case(decoder(), micro_batch=8), kind):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


def _logits(layout: str, kind: str) -> Tensor:
    """Of the last two of six tokens, the first of them at the end of a prompt."""
    at = Layout.parse(layout)
    model = realize(Blueprint.of(decoder().build), Plan.of(_transforms(kind), at), Topology.of(at, CPU), 0, "fp64", "fp64")
    tokens = torch.arange(12).view(2, 6)
    with model.inference():
        cache = model.part.new_cache(2, 8)
        first = model.part(tokens[:, :5], cache=cache)[:, -1]
        return torch.stack([first, model.part(tokens[:, 5:], cache=cache)[:, -1]])


@kinds
def test_a_cache_is_not_split(world: World, kind: str) -> None:
    expected = _logits("1", kind)
    for found in world.run(_logits, 2, "cp2", kind):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


# What is refused.


def _refused(build: Any, layout: str, kind: Any, length: int = 0, extras: bool = False) -> str:
    at = Layout.parse(layout)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    try:
        plan = Plan.of(_transforms(kind), at)
        model = realize(Blueprint.of(build), plan, Topology.of(at, CPU), 0, "fp64", "fp64")
        local_batch(model, Batch(tokens, tokens, extras={"images": tokens} if extras else {}))
    except ForgeError as refusal:
        return str(refusal)
    return "accepted"


@pytest.mark.parametrize(
    ("build", "kind", "named"),
    [
        (decoder(attention=GQA(soft_cap=2.0)).build, "ring", ("blocks.0.attention.core", "'ring'", "cap")),
        (decoder(heads=3, kv_heads=3, head_dim=4).build, "ulysses", ("'ulysses'", "parallel.cp = 2", "3 heads")),
        (
            decoder(rope=Rope(scaling="dynamic", factor=2.0, original_max_length=8)).build,
            "all_gather",
            ("dynamic", "parallel.cp"),
        ),
        (Tiny, "all_gather", ("blocks.0", "no attention core")),
    ],
    ids=["soft cap", "heads", "dynamic", "no core"],
)
def test_a_model_that_cannot_be_cut_is_refused(world: World, build: Any, kind: str, named: tuple[str, ...]) -> None:
    for refusal in world.run(_refused, 2, build, "cp2", kind):
        assert all(name in refusal for name in named), refusal


def test_a_batch_that_cannot_be_cut_is_refused(world: World) -> None:
    (refusal, _) = world.run(_refused, 2, decoder().build, "cp2", "ring", 10)
    assert "data.sequence_length" in refusal
    assert "multiple of 4" in refusal
    assert world.run(_refused, 2, decoder().build, "cp2", "ulysses", 10) == ["accepted"] * 2
    (refusal, _) = world.run(_refused, 2, decoder().build, "cp2", "ulysses", 10, extras=True)
    assert "images" in refusal


def test_a_plan_without_shard_is_refused() -> None:
    """It alone sums gradients over the ranks that split a row."""
    with pytest.raises(PlanError, match=r"parallel.cp > 1.*'context' needs shard"):
        Plan.of([ContextParallel().build()], Layout(cp=2))
    Plan.of([ContextParallel().build()], Layout())
