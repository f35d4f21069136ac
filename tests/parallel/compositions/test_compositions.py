"""The table of proven pairs, run by run: every strategy, in any composition that is offered, against one process.

A tiny decoder with grouped-query attention, packed documents, rows with very different numbers of labels, and one micro-batch
without any. In fp64 a layout has to give one process's loss, norm, gradients and weights to 1e-10; in float8 with fp32 sums those
of one process in float8 to 2e-6. In bf16 sums are rounded at other places, in fp32 by some strategies, after which a number may
become the neighboring float8: there a layout may be twice as far from the exact numbers as one process in that precision is, and
no farther. A sum that is missing, or made twice, is ten to a hundred times farther.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_models.components.decoder import Decoder
from forge_models.components.moe import MoE
from forge_models.components.mtp import MTP
from forge_models.components.objectives import CrossEntropy
from forge_models.components.routers import SigmoidTopK
from forge_models.shape import Losses
from forge_parallel.components.optimizers import AdamW
from forge_parallel.context.transform import ContextParallel, Kind
from forge_parallel.experts.transform import Expert
from forge_parallel.experts.transform import Kind as Dispatcher
from forge_parallel.float8.transform import Float8
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.tensor.transform import Tensor
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import Shard
from forge_parallel.verify.parity import Case, Measurement, compare, measure
from forge_parallel.verify.proven import FEATURES, GPU_RUNS, LARGE_RUNS, RUNS, SLOW_RUNS, SLOW_TEST, TEST, is_proven
from harness.closeness import below
from harness.pool import World
from parallel.one_process import alone as once

CPU = torch.device("cpu")
VOCAB = 61
SIZES = {"heads": 4, "kv_heads": 2, "layers": 4, "vocab_size": VOCAB, "max_length": 32}
DECODER = Decoder(dim=16, ffn_dim=24, **SIZES)
WIDE = Decoder(dim=64, ffn_dim=64, **SIZES)
"""Float8 takes dimensions in sixteens, on every rank. Where a compiler rounds, more numbers make a steadier sum."""

EXPERTS = MoE(
    experts=8,
    top_k=2,
    shared=1,
    ffn_dim=16,
    first_dense=1,
    router=SigmoidTopK(bias_rate=0.01),
    losses=Losses(global_batch=0.1, z=0.01),
)

ALL_CHOSEN = replace(EXPERTS, experts=4, top_k=4, ffn_dim=32)
"""For low precision: a score that is rounded otherwise may choose another expert, and what is chosen is no matter of degree."""

LOW = frozenset({"bf16", "bf16_state", "float8", "float8_rowwise", "float8_experts"})
WITH_FEW = frozenset(
    {"float8_rowwise", "float8_experts", "float8_wide_gather", "compile_budget", "more_stages", "ep_in_turn", "reshard"}
    | {"keep_gathered", "recompute_full"}
)
"""Options that are proven with what is in their table."""

AXES = frozenset({"dp_shard", "dp_replicate", "tp", "cp", "pp"})


def layout_of(run: frozenset[str]) -> Layout:
    """Two ranks on every axis that a run names, four of ep where they are in nodes; `cp_ring` is of the axis cp."""
    named = {feature if feature in AXES else feature.partition("_")[0] for feature in run}
    ep = 4 if "ep_hierarchical" in run else 2 if "ep" in named else 1
    return Layout(**dict.fromkeys(named & AXES, 2), ep=ep, etp=2 if "etp" in run else 1)


def case_of(run: frozenset[str], tied: bool) -> Case:
    depth = 1 if run & {"pp_interleaved_zero_bubble", "pp_zbv", "pp_dualpipev"} else 2
    mtp = MTP(depth=depth) if "mtp" in run else None
    experts = None if "experts" not in run else EXPERTS if run.isdisjoint(LOW) else ALL_CHOSEN
    wide = "float8" in run or run >= {"compile", "experts"}
    layers = 6 if "more_stages" in run else 4
    decoder = replace(WIDE if wide else DECODER, tied_embeddings=tied, mtp=mtp, moe=experts, layers=layers)
    rows = 4 * layout_of(run).data
    micro_batch = 1 if "accumulate" in run else 4
    objective = CrossEntropy(z_loss=1e-2).build()
    return Case(decoder.build, objective, AdamW(lr=1e-2).build, VOCAB, rows=rows, micro_batch=micro_batch)


def measured(case: Case, layout: str, run: frozenset[str], device: torch.device = CPU) -> Measurement:
    """One rank of a run; in a world of one, strategies that need more have nothing to do."""
    reshard = True if "reshard" in run else False if "keep_gathered" in run else None
    shard = Shard(reshard=reshard, reduce="each" if "reduce_each" in run else "last", offload="offload" in run)
    transforms: list[Any] = [shard, Tensor(sequence_parallel="tp_whole" not in run)]
    transforms += [
        Expert(dispatcher=kind, ranks_per_node=2 if kind == "hierarchical" else None, overlap="ep_in_turn" not in run)
        for kind in get_args(Dispatcher)
        if f"ep_{kind}" in run
    ]
    if "etp" in run and "ep" not in {feature.partition("_")[0] for feature in run}:
        transforms.append(Expert())
    transforms += [ContextParallel(kind=kind) for kind in get_args(Kind) if f"cp_{kind}" in run]
    if "recompute" in run:
        # With experts on ranks of their own, compiled blocks are recomputed as a whole.
        transforms.append(Recompute(policy="full" if run >= {"compile", "experts"} or "recompute_full" in run else "selective"))
    if "compile" in run:
        transforms.append(Compile(budget=0.5 if "compile_budget" in run else 1.0))
    if "float8" in run:
        recipe = "rowwise" if "float8_rowwise" in run else "tensorwise"
        transforms.append(
            Float8(
                recipe=recipe,
                all_gather=run.isdisjoint({"float8_rowwise", "float8_wide_gather"}),
                experts="float8_experts" in run,
            )
        )
    at = Layout.parse(layout)
    pipeline = None
    if at.pp > 1:
        (schedule,) = (feature.removeprefix("pp_") for feature in run if feature.startswith("pp_"))
        more = {"stages_per_rank": 3} if "more_stages" in run else {}
        pipeline = Pipeline(Registry().load("forge.pipeline_schedules", schedule)(**more).build())
    with warnings.catch_warnings():
        if {"compile", "float8"} & run:  # imports of compiler and torchao warn
            warnings.simplefilter("ignore")
        return measure(case, at, transforms, device, pipeline)


def equals_one_process(
    world: World, run: frozenset[str], tied: bool, measured: Callable[..., Measurement] = measured, group: bool = True
) -> None:
    case, layout = case_of(run, tied), layout_of(run)
    exact = once(measured, case, "1", frozenset())
    if run.isdisjoint(LOW):
        for found in world.run(measured, layout.world, case, str(layout), run, timeout=400, group=group):
            difference = compare(exact, found)
            assert difference.accepted("fp64"), difference
        return
    compute = "bf16" if "bf16" in run else "fp32"
    case = replace(case, compute=compute, state="bf16" if "bf16_state" in run else "fp32", steps=1)
    alone = once(measured, case, "1", run & {"float8", "float8_rowwise", "float8_experts"})
    for found in world.run(measured, layout.world, case, str(layout), run, timeout=400, group=group):
        difference = compare(alone, found)
        # Whether the same numbers are rounded to float8: experts on several ranks add theirs in another order.
        if compute == "fp32" and run.isdisjoint({"compile", "tp_whole", "float8_rowwise", "experts"}):
            assert difference.accepted("fp32"), difference
        else:
            assert difference.initial
            _is_as_near_as(exact, alone, found)


def _is_as_near_as(exact: Measurement, alone: Measurement, found: Measurement) -> None:
    assert found.tokens == alone.tokens
    for name, gradient in exact.gradients.items():
        allowed = 2 * _distance(gradient, alone.gradients[name])
        assert below(_distance(gradient, found.gradients[name]), max(allowed, 1e-3)), name
    assert found.loss == pytest.approx(alone.loss, rel=2e-3)
    assert found.norm == pytest.approx(alone.norm, rel=2e-2)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm())


def _name(run: frozenset[str]) -> str:
    return "+".join(feature for feature in FEATURES if feature in run)


@pytest.mark.parametrize("run", RUNS, ids=_name)
def test_a_run_equals_one_process(world: World, run: frozenset[str]) -> None:
    equals_one_process(world, run, tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("run", SLOW_RUNS, ids=_name)
def test_the_remaining_pairs_equal_one_process(world: World, run: frozenset[str]) -> None:
    equals_one_process(world, run, tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("run", [*RUNS, *SLOW_RUNS], ids=_name)
def test_all_pairs_with_an_untied_head(world: World, run: frozenset[str]) -> None:
    equals_one_process(world, run, tied=False)


@pytest.mark.slow
@pytest.mark.parametrize("run", LARGE_RUNS, ids=_name)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_triples_of_axes_on_eight_ranks(world: World, run: frozenset[str], tied: bool) -> None:
    equals_one_process(world, run, tied)


def test_the_table_is_what_it_says() -> None:
    assert len(RUNS) <= 30
    for run in (*RUNS, *SLOW_RUNS, *LARGE_RUNS, *GPU_RUNS):
        assert run <= FEATURES.keys()
        assert layout_of(run).world <= (8 if run in LARGE_RUNS else 4)
        assert "accumulate" in run or layout_of(run).pp == 1, "a pipeline always has several micro-batches"
    for test in (TEST, SLOW_TEST):
        file, _, name = test.partition("::")
        assert Path(__file__).match(file)
        assert name in globals()
    exclusive = [{f for f in FEATURES if f.startswith(axis)} for axis in ("cp_", "pp_")]
    whole_backward = {"pp_gpipe", "pp_1f1b", "pp_interleaved"}
    missing = {
        pair
        for pair in combinations(FEATURES, 2)
        if not is_proven(pair)
        and not set(pair) & {"tp_asynchronous", "offload", *WITH_FEW}
        and not any(set(pair) <= choices for choices in exclusive)
        and not any(name in ("experts", "etp") or name.startswith("ep_") for name in pair)  # see test_expert_compositions
        and not (set(pair) & exclusive[1] - whole_backward and set(pair) & {"recompute", "compile"})
    }
    assert not missing, "every pair of what works on one machine is proven"
