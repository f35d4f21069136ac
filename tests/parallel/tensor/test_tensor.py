"""Tensor parallelism against one process: every block of the zoo, heads shared by ranks, uneven cuts, and what is refused."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch.distributed.tensor import DTensor

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.specs import Specs
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.generation import Sampling, generate
from forge_models.objectives import CrossEntropy
from forge_parallel.model.parallel_model import gathered
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.rules import Role, tensor_parallel_rules
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.parity import Case, Measurement, compare, measure, synthetic
from harness.closeness import below
from harness.pool import World
from harness.siblings import fast
from models.variants import SIZES, VARIANTS
from parallel.one_process import alone
from parallel.tiny import Tiny

CPU = torch.device("cpu")
VOCAB = 61
"""Not divisible by any number of ranks."""
DECODER = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=23, vocab_size=VOCAB, max_length=32)
CHOSEN = {
    "gqa": {},
    "tied": {"tied_embeddings": True},
    "one key head, norms across all heads": {"kv_heads": 1, "attention": GQA(qkv_bias=True, output_bias=True, qk_norm="full")},
}


def _decoder(variant: str) -> DecoderConfig:
    """One of the above, or one of the zoo's, which lists every registered block, with heads that two ranks can share."""
    if variant in CHOSEN:
        return replace(DECODER, **CHOSEN[variant])
    sizes = {**SIZES, "heads": 4, "layers": 2, **VARIANTS[variant]}
    return DecoderConfig(**{**sizes, "vocab_size": VOCAB, "kv_heads": {3: 2}.get(sizes.get("kv_heads"), sizes.get("kv_heads"))})


def _case(variant: str, **changes: Any) -> Case:
    case = Case(
        _decoder(variant).build,
        CrossEntropy(z_loss=1e-2).build(),
        AdamWConfig(lr=1e-2).build,
        VOCAB,
        rows=8,
        micro_batch=2,
        steps=2,
    )
    return replace(case, **changes)


def _measure(case: Case, layout: str, sequence: bool = True, *more: Any) -> Measurement:
    return measure(case, Plan.of([FullyShard(), TensorParallel(sequence_parallel=sequence), *more], Layout.parse(layout)), CPU)


def _equal(world: World, case: Case, layout: str, *arguments: Any) -> None:
    reference = alone(_measure, case, "1")
    for found in world.run(_measure, Layout.parse(layout).world, case, layout, *arguments, timeout=300):
        difference = compare(reference, found)
        assert difference.accepted(case.state), difference


DENSE = [variant for variant, fields in VARIANTS.items() if "moe" not in fields]


@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - DENSE))
def test_experts_are_left_to_ranks_of_their_own_and_refused_where_those_see_the_same_tokens(variant: str) -> None:
    specs = Blueprint.of(_decoder(variant).build).specs
    stacked = {name for name, spec in specs.tensors.items() if "expert" in spec.dims}
    if specs.whole_stream:
        with pytest.raises(PlanError, match="the model needs them whole"):
            tensor_parallel_rules(specs, 2, True)
        specs = replace(specs, whole_stream=())
    found = tensor_parallel_rules(specs, 2, True)
    assert found.apart == stacked
    assert found.cut.keys() == specs.tensors.keys() - stacked
    with pytest.raises(PlanError, match="contains stacked experts"):
        tensor_parallel_rules(specs, 2, False)


@pytest.mark.slow
@pytest.mark.parametrize("variant", DENSE)
def test_every_block_equals_one_process(world: World, variant: str) -> None:
    _equal(world, _case(variant), "tp2")


@pytest.mark.parametrize("variant", [*CHOSEN, "query_latent", "biases_and_full_qk_norm", "sandwich"])
def test_without_sequence_parallelism(world: World, variant: str) -> None:
    _equal(world, _case(variant), "tp2", False)


@pytest.mark.slow
@pytest.mark.parametrize("variant", CHOSEN)
@pytest.mark.parametrize("layout", ["tp4", "dp2tp2", "hsdp2x1tp2"])
def test_layouts_with_more_axes(world: World, layout: str, variant: str) -> None:
    """On tp4 two ranks share each of the two key-value heads."""
    _equal(world, _case(variant), layout)


def test_a_length_that_does_not_divide_is_right_without_sequence_parallelism_and_refused_with_it(world: World) -> None:
    case = _case("gqa", length=15)
    _equal(world, case, "tp2", False)
    with pytest.raises(Exception, match="15 tokens cannot be split into 2 equal parts"):
        world.run(_measure, 2, case, "tp2", True)


@pytest.mark.parametrize("policy", fast("selective", of=["full", "selective"]))
def test_recomputation(world: World, policy: Literal["full", "selective"]) -> None:
    _equal(world, _case("gqa"), "dp2tp2", True, Recompute(policy=policy))


@pytest.mark.parametrize("layout", ["tp2", "dp2tp2"])
def test_bf16_is_held_to_its_own_run(world: World, layout: str) -> None:
    case = _case("gqa", compute="bf16", state="fp32", steps=1)
    reference = _measure(case, "1")
    for found in world.run(_measure, Layout.parse(layout).world, case, layout):
        difference = compare(reference, found)
        assert below(difference.loss, 2e-3), difference  # sums of two bf16 halves are rounded once more than a whole sum
        assert below(difference.norm, 2e-2), difference
        assert below(difference.gradients, 2**-5), difference


def _built(layout: str, variant: str) -> tuple[dict[str, torch.Tensor], dict[str, int], int]:
    at = Layout.parse(layout)
    topology = Topology.of(at, CPU)
    model = realize(Blueprint.of(_decoder(variant).build), Plan.of([FullyShard(), TensorParallel()], at), topology, 3)
    assert all(isinstance(tensor, DTensor) for _, tensor, _ in model.trainable())
    held = {name: local_box(tensor).local.numel() for name, tensor in model.tensors()}
    whole = gathered(model, {name: tensor for name, tensor, _ in model.trainable()})
    return whole, held, model.parameter_count()


def test_nothing_is_left_unfilled_and_every_rank_holds_its_share(world: World) -> None:
    """Norms are 1, biases 0, everything is what one process draws, and matrices take 1 / tp of the memory."""
    model = realize(Blueprint.of(replace(DECODER, ffn_dim=24).build), Plan.of([], Layout()), Topology(Layout(), CPU), 3)
    alone = {name: tensor for name, tensor in model.tensors() if "mlp" not in name}
    for whole, held, count in world.run(_built, 2, "tp2", "gqa"):
        assert count == sum(p.numel() for p in DECODER.build().parameters())
        for name, tensor in whole.items():
            if name in alone:
                assert torch.equal(tensor, alone[name].detach().double()), name
            if "norm" in name:
                assert torch.equal(tensor, torch.ones_like(tensor))
            if "proj" in name and "mlp" not in name:
                assert held[name] == tensor.numel() / 2, name


def test_a_model_whose_specs_do_not_say_how_to_cut_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no rule covers embed\.weight: its module has no entry"):
        tensor_parallel_rules(replace(Tiny().specs(), units={}), 2, True)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"heads": 3, "kv_heads": 3, "head_dim": 4}, 2, "3 heads cannot be divided among parallel.tp = 2"),
        ({"heads": 12, "kv_heads": 3, "head_dim": 4}, 2, "3 key-value heads do not fit parallel.tp = 2"),
    ],
)
def test_what_cannot_be_cut_is_named(changes: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        tensor_parallel_rules(Blueprint.of(replace(DECODER, **changes).build).specs, tp, True)


def test_specs_without_any_dimension_to_cut_are_refused() -> None:
    with pytest.raises(PlanError, match="no parameter has a dimension to split"):
        tensor_parallel_rules(Specs({}, {}, ("blocks.0",), {}), 2, True)


def test_the_rules_of_a_block() -> None:
    table = tensor_parallel_rules(Blueprint.of(DECODER.build).specs, 4, True)
    assert table.roles["blocks.0.attention"] is Role.REGION
    assert table.roles["blocks.0.attention.k_proj"] is Role.KV_COPY, "four ranks share two key-value heads"
    assert table.cut["blocks.0.mlp.down_proj.weight"] == 1
    assert table.cut["embed.weight"] == table.cut["head.weight"] == 0
    assert table.partial == {name for name, dim in table.cut.items() if dim is None}
    complete = tensor_parallel_rules(Blueprint.of(DECODER.build).specs, 4, False).partial
    assert "blocks.0.attention_norm.weight" not in complete
    assert "blocks.0.attention.k_proj.weight" in complete


def _without_the_last_sum(case: Case) -> Measurement:
    TensorParallel.after_backward = lambda *_: None  # type: ignore[method-assign]
    return _measure(case, "tp2")


def test_the_gate_sees_a_missing_sum(world: World) -> None:
    case = _case("gqa")
    difference = compare(_measure(case, "1"), world.run(_without_the_last_sum, 2, case, fresh=True)[0])
    assert not difference.accepted("fp64")
    assert "norm" in difference.worst


def _logits(layout: str, variant: str) -> torch.Tensor:
    at = Layout.parse(layout)
    case = _case(variant)
    model = realize(
        Blueprint.of(case.build), Plan.of([FullyShard(), TensorParallel()], at), Topology.of(at, CPU), 3, "fp64", "fp64"
    )
    batch = synthetic(case, 0)
    with model.inference():
        return model.part(batch.tokens, positions=batch.positions, documents=batch.documents)


@pytest.mark.parametrize("variant", ["gqa", "capped_scores"])
def test_whole_logits_come_out_on_every_rank(world: World, variant: str) -> None:
    expected = _logits("1", variant)
    for found in world.run(_logits, 2, "tp2", variant):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def _generated(layout: str, variant: str) -> tuple[list[list[int]], float]:
    """Greedy tokens after prompts of unequal length, then the loss of a step: sequences are cut again."""
    at = Layout.parse(layout)
    case = _case(variant)
    model = realize(
        Blueprint.of(case.build), Plan.of([FullyShard(), TensorParallel()], at), Topology.of(at, CPU), 3, "fp64", "fp64"
    )
    with model.inference(whole_sequences=True):
        tokens = generate(model.part, [[5, 7, 11], [1], [2, 3, 4, 5, 6]], Sampling(), max_tokens=6)  # type: ignore[arg-type]
    result = Step(model, case.objective)([synthetic(case, 0)])
    return [[int(token) for token in row] for row in tokens], result.numbers()["loss"]


@pytest.mark.parametrize("variant", [*CHOSEN, "capped_scores"])
def test_generation_works_on_cut_matrices(world: World, variant: str) -> None:
    expected, loss = _generated("1", variant)
    for tokens, found in world.run(_generated, 2, "tp2", variant):
        assert tokens == expected
        assert found == pytest.approx(loss, rel=1e-12)


def test_a_number_of_each_head_is_cut_with_the_projections_that_make_heads() -> None:
    specs = Blueprint.of(replace(DECODER, attention=GQA(sinks=True)).build).specs
    rules = tensor_parallel_rules(specs, 2, True)
    assert rules.cut["blocks.0.attention.sinks"] == 0
    assert rules.roles["blocks.0.attention"] is Role.REGION
    assert "blocks.0.attention.sinks" not in rules.partial
    alone = {name: spec for name, spec in specs.tensors.items() if "_proj" not in name}
    with pytest.raises(PlanError, match=r"blocks\.0\.attention has a parameter of each head, but no projection"):
        tensor_parallel_rules(replace(specs, tensors=alone), 2, True)
