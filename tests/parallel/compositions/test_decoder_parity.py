"""The real decoder in every layout against one process: packed documents, grouped-query attention, tied or not."""

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from forge_core.layout import Layout
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig, LayerInputsConfig
from forge_models.components.experts import NormedTopKConfig, SoftmaxTopKConfig
from forge_models.components.layers import GELU, ClampedSwiGLU, GeGLU, LayerNormConfig, RMSNormConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import Losses, Rope, Streams, ValueEmbeddings
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, Measurement, compare, measure
from harness.pool import World
from harness.siblings import fast
from parallel.compositions.rows import COMPRESSED, DECODER, EXPERTS, INDEXED, case_of, measured
from parallel.one_process import alone

VOCAB = 61


def _case(tied: bool, mode: Literal["fp64", "fp32"] = "fp64") -> Case:
    decoder = DecoderConfig(
        dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=VOCAB, max_length=32, tied_embeddings=tied
    )
    optimizer = AdamWConfig(lr=1e-2).build
    steps = 3 if mode == "fp64" else 1
    objective = CrossEntropy().build()
    return Case(decoder.build, objective, optimizer, VOCAB, steps=steps, compute=mode, state=mode)


def _measure(case: Case, layout: str) -> Measurement:
    return measure(case, Plan.of([FullyShard()], Layout.parse(layout)), torch.device("cpu"))


LAYOUTS = ["1", "dp2", "dp4", "hsdp2x2"]
CASES = [(layout, count, (row + column) % 2 == 0) for row, layout in enumerate(LAYOUTS) for column, count in enumerate([1, 2, 4])]


FAST = (("1", 2, False), ("dp2", 1, False), ("dp4", 4, True), ("hsdp2x2", 2, True))


@pytest.mark.parametrize(("layout", "accumulate", "tied"), fast(*FAST, of=CASES))
def test_a_layout_equals_one_process(world: World, layout: str, accumulate: int, tied: bool) -> None:
    """One process takes all 16 rows at once; the layout cuts them, and its first micro-batch has not one label."""
    at = Layout.parse(layout)
    micro_batch = 16 // at.data // accumulate
    case = replace(_case(tied), rows=16, micro_batch=micro_batch, silent=micro_batch if accumulate > 1 else 1)
    whole = alone(_measure, replace(case, micro_batch=16), "1")
    for found in world.run(_measure, at.world, case, layout):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


@pytest.mark.parametrize("layout", ["dp2", "hsdp2x2"])
def test_fp32(world: World, layout: str) -> None:
    case = _case(True, "fp32")
    reference = _measure(case, "1")
    for found in world.run(_measure, 4 if layout != "dp2" else 2, case, layout):
        difference = compare(reference, found)
        assert difference.accepted("fp32"), difference


@pytest.mark.parametrize("tied", [True, False])
def test_the_initial_loss_is_near_ln_v_and_not_equal_to_it(tied: bool) -> None:
    loss = _measure(replace(_case(tied), steps=1), "1").loss[0]
    assert abs(loss - math.log(VOCAB)) < 0.5
    assert loss != pytest.approx(math.log(VOCAB), abs=1e-6)


LAYERED: dict[str, Any] = {"window": 5, "global_every": 2, "global_head_dim": 6, "global_kv_heads": 4}
DECODERS = {
    "layers without rope": replace(DECODER, attention=GQA(nope_every=2)),
    "learned positions": replace(DECODER, learned_positions=True, attention=GQA(nope_every=1)),
    "norms without parameters": replace(DECODER, norm=LayerNormConfig(weight=False, bias=False)),
    "gated output": replace(DECODER, attention=GQA(output_gate=True, qk_norm="head"), norm=RMSNormConfig(offset=1)),
    "parallel residual": replace(DECODER, parallel_residual=True, norm=LayerNormConfig(), mlp=GELU(exact=True, bias=True)),
    "one norm": replace(DECODER, parallel_residual=True, shared_norm=True, norm=LayerNormConfig(bias=False)),
    "temperature": replace(DECODER, attention=GQA(temperature=0.7, temperature_length=2)),
    "sinks": replace(DECODER, attention=GQA(sinks=True, window=5, global_every=2)),
    "indexer": replace(DECODER, attention=INDEXED, kv_heads=None, moe=EXPERTS),
    "compressed keys": replace(
        DECODER,
        attention=replace(COMPRESSED, kinds=("sparse", "heavy", "window", "sparse")),
        kv_heads=None,
        head_dim=6,
        rope=Rope(theta=500.0, local_theta=50.0, partial=0.7),
        streams=Streams(count=2),
        moe=EXPERTS,
    ),
    "indexer in warm-up": replace(DECODER, attention=replace(INDEXED, keys="all"), kv_heads=None),
    "experts with biases": replace(
        DECODER,
        mlp=ClampedSwiGLU(limit=0.1, bias=True),
        moe=replace(EXPERTS, losses=Losses(), router=SoftmaxTopKConfig(bias=True)),
    ),
    "norms of branches": replace(
        DECODER,
        moe=replace(EXPERTS, shared=2, branch_norms=True, losses=Losses(global_batch=0.1), router=NormedTopKConfig()),
        norm_placement="sandwich",
    ),
    "latent experts": replace(DECODER, moe=replace(EXPERTS, latent_dim=12), mlp=GELU(bias=True)),
    "gated shared expert": replace(DECODER, moe=replace(EXPERTS, shared_gate=True)),
    "heads of global layers": replace(
        DECODER,
        attention=GQA(**LAYERED, v_norm=True, keys_as_values="global", qk_norm="head", scale=1.0),
        rope=Rope(theta=500.0, local_theta=50.0, proportion=0.5),
        layer_scalar=True,
    ),
    "streams": replace(DECODER, streams=Streams(count=3, sinkhorn=5)),
    "streams of experts": replace(DECODER, streams=Streams(count=2), moe=EXPERTS, attention_only=(2,)),
    "shared keys and values": replace(
        DECODER, layers=4, attention=GQA(window=5, global_every=2, shared_kv_layers=2, shared_kv_ffn_factor=2, qk_norm="head")
    ),
    "inputs of layers": replace(DECODER, layer_inputs=LayerInputsConfig(dim=6), mlp=GeGLU()),
    "factors": replace(DECODER, attention=GQA(scale=0.3), embed_multiplier=3.0, residual_multiplier=0.4, logit_multiplier=0.6),
}
VALUES = ValueEmbeddings(layers=(0, 3), gate_channels=5)
"""Tables on the first and on the last stage."""
DECODERS |= {
    "value embeddings": replace(DECODER, attention=GQA(value_embeddings=VALUES, qkv_bias=True)),
    "value embeddings of one head": replace(DECODER, attention=GQA(value_embeddings=VALUES, qkv_bias=True), kv_heads=1),
    "value embeddings and experts": replace(DECODER, attention=GQA(value_embeddings=VALUES), moe=EXPERTS),
}
ROWS = {"dp2": frozenset({"dp_shard"}), "tp2": frozenset({"tp"}), "pp2": frozenset({"pp_1f1b", "accumulate"})}


FIRST_STAGE = ("shared keys and values", "inputs of layers")
"""Decoders whose blocks take more than the residual stream, which a pipeline does not send."""


RUNS = [(model, layout) for model in DECODERS for layout in ROWS if layout != "pp2" or model not in FIRST_STAGE]


@pytest.mark.parametrize(("model", "layout"), fast(*(run for run in RUNS if run[1] == "tp2"), of=RUNS))
def test_options_of_published_families_equal_one_process(world: World, model: str, layout: str) -> None:
    row = ROWS[layout]
    case = replace(case_of(row), build=DECODERS[model].build)
    whole = alone(measured, case, "1", row)
    assert whole.loss != alone(measured, replace(case, build=DECODER.build), "1", row).loss
    for found in world.run(measured, 2, case, layout, row):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("heads of global layers", kind) for kind in ("cp_all_gather", "cp_ring", "cp_ulysses")),
        ("shared keys and values", "cp_all_gather"),
        ("shared keys and values", "cp_ring"),
        ("inputs of layers", "cp_all_gather"),
    ],
)
def test_options_over_shared_rows_equal_one_process(world: World, model: str, kind: str) -> None:
    row = frozenset({kind})
    case = replace(case_of(row), build=DECODERS[model].build)
    whole = alone(measured, case, "1", row)
    for found in world.run(measured, 2, case, "cp2", row):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


@pytest.mark.parametrize("model", FIRST_STAGE)
@pytest.mark.parametrize("words", ["dp_shard recompute recompute_full", "dp_shard recompute", "dp_shard keep_gathered"])
def test_what_blocks_give_each_other_is_computed_again(world: World, model: str, words: str) -> None:
    row = frozenset(words.split())
    case = replace(case_of(row), build=DECODERS[model].build)
    whole = alone(measured, case, "1", row)
    for found in world.run(measured, 2, case, "dp2", row):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


@pytest.mark.parametrize(("model", "key"), [(FIRST_STAGE[0], "shared_kv_layers"), (FIRST_STAGE[1], "layer_inputs")])
def test_what_a_pipeline_does_not_send_is_refused(world: World, model: str, key: str) -> None:
    row = frozenset({"pp_1f1b", "accumulate"})
    case = replace(case_of(row), build=DECODERS[model].build)
    with pytest.raises(Exception, match=rf"{key}.* set parallel\.pp = 1"):
        world.run(measured, 2, case, "pp2", row)


def test_more_ranks_than_key_heads_that_all_layers_have_are_refused(world: World) -> None:
    """Layers with 2 and 4 of them: a rank would need a whole head of one layer and half of another's."""
    row = frozenset({"tp"})
    case = replace(case_of(row), build=DECODERS["heads of global layers"].build)
    with pytest.raises(Exception, match=r"different numbers of key-value heads, .* choose a tp that divides 2"):
        world.run(measured, 4, case, "tp4", row)


@pytest.mark.parametrize(
    "model", ["experts with biases", "norms of branches", "streams of experts", "value embeddings and experts"]
)
def test_experts_on_other_ranks_equal_one_process(world: World, model: str) -> None:
    row = frozenset({"dp_shard", "ep_all_to_all"})
    case = replace(case_of(row), build=DECODERS[model].build)
    whole = alone(measured, case, "1", row)
    for found in world.run(measured, 2, case, "dp2ep2", row):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


def test_parts_of_experts_with_biases_are_refused(world: World) -> None:
    """Every part would add the bias of the output."""
    row = frozenset({"tp", "etp"})
    case = replace(case_of(row), build=DECODERS["experts with biases"].build)
    with pytest.raises(Exception, match=r"down_bias would be added once for each part of an expert; set parallel\.etp = 1"):
        world.run(measured, 2, case, "tp2etp2", row)
