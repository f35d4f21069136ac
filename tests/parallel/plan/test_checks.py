"""Rules across sections, refused before torch is imported; and what ranks would refuse when they lay out the model."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.features import Use, interact
from forge_core.layout import Layout
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.shape import Losses, Rope
from forge_parallel.checks import (
    batch_fits,
    compiled_recompute_fits,
    compositions_are_proven,
    float8_can_multiply,
    float8_fits,
    left_to_the_start,
    nodes_fit,
    pipeline_fits,
    rows_can_be_cut,
    rows_can_be_shared,
    sequence_can_be_cut,
    tensors_can_be_cut,
)
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import OneForwardOneBackward
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.proofs import unproven
from forge_vlm.components.model import VLM
from parallel.compositions.rows import decoder_of, names


def job(global_batch: int = 8, micro_batch: int = 2, compute: str = "fp32", **transforms: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model=SimpleNamespace(),
        train=SimpleNamespace(global_batch=global_batch, micro_batch=micro_batch),
        precision=SimpleNamespace(compute=compute, state="fp32"),
        parallel=SimpleNamespace(proofs=[]),
        transforms=transforms,
    )


def test_a_batch_that_fits_has_no_fault() -> None:
    assert list(batch_fits(job(), Layout(dp_shard=4))) == []


@pytest.mark.parametrize(
    ("rows", "micro", "layout", "key", "legal"),
    [(8, 2, "dp3", "train.global_batch", "1, 2, 4, 8"), (12, 4, "dp2", "train.micro_batch", "1, 2, 3, 6")],
)
def test_fault_42_a_batch_that_does_not_fit_names_what_would(rows: int, micro: int, layout: str, key: str, legal: str) -> None:
    (fault,) = batch_fits(job(rows, micro), Layout.parse(layout))
    assert fault.key == key
    assert fault.hint.endswith(legal)


@pytest.mark.parametrize(
    ("length", "layout", "kind", "hint"),
    [
        (24, "cp4", "ring", ""),
        (20, "cp4", "ring", "16 or 24"),
        (6, "cp4", "all_gather", "8 can"),
        (20, "cp4", "ulysses", ""),
        (7, "1", "ring", ""),
    ],
)
def test_rows_are_cut_into_equal_pieces(length: int, layout: str, kind: Any, hint: str) -> None:
    given = job(context=ContextParallel(kind=kind))
    given.data = SimpleNamespace(sequence_length=length)
    faults = list(rows_can_be_cut(given, Layout.parse(layout)))
    assert [fault.key for fault in faults] == ["data.sequence_length"] * bool(hint)
    assert all(hint in fault.hint for fault in faults)


@pytest.mark.parametrize(
    ("length", "layout", "sequence", "hint"),
    [
        (16, "tp2", None, ""),
        (15, "tp2", None, "multiple of 2"),
        (15, "tp2", False, ""),
        (24, "cp2tp4", True, ""),
        (20, "cp2tp4", True, "8"),
    ],
)
def test_tp_cuts_what_cp_leaves_into_equal_parts(length: int, layout: str, sequence: bool | None, hint: str) -> None:
    given = job() if sequence is None else job(tensor=TensorParallel(sequence_parallel=sequence))
    given.data = SimpleNamespace(sequence_length=length)
    faults = list(sequence_can_be_cut(given, Layout.parse(layout)))
    assert [fault.key for fault in faults] == ["data.sequence_length"] * bool(hint)
    assert all(hint in fault.hint for fault in faults)
    assert names(given, Layout.parse(layout)) >= {"tp"}
    assert "tensor" not in names(given, Layout.parse(layout))


@pytest.mark.parametrize(
    ("micro", "length", "layout", "compute", "emulate", "keys"),
    [
        (2, 24, "1", "bf16", "auto", []),
        (1, 24, "1", "bf16", "auto", ["train.micro_batch"]),
        (2, 24, "cp2", "bf16", False, ["train.micro_batch"]),
        (1, 24, "1", "fp32", True, []),
        (2, 24, "1", "fp64", "auto", ["precision.compute"]),
    ],
)
def test_float8_needs_tokens_in_steps_of_16(
    micro: int, length: int, layout: str, compute: str, emulate: Any, keys: list[str]
) -> None:
    given = job(8, micro, compute, float8=Float8(emulate=emulate))
    given.data = SimpleNamespace(sequence_length=length)
    assert [fault.key for fault in float8_fits(given, Layout.parse(layout))] == keys


def test_sizes_of_phases_are_checked_like_those_of_the_run() -> None:
    """With the phase's own key."""

    pipeline = SimpleNamespace(build=lambda: Pipeline(OneForwardOneBackward().build()), schedule=OneForwardOneBackward())
    piped = SimpleNamespace(proofs=[], pipeline=pipeline)

    def growing(length: int | None = None, batch: int | None = None, **transforms: Any) -> SimpleNamespace:
        given = job(8, 2, **transforms)
        phases = [
            SimpleNamespace(sequence_length=None, global_batch=8),
            SimpleNamespace(sequence_length=length, global_batch=batch),
        ]
        given.data, given.parallel = SimpleNamespace(sequence_length=32, phases=phases), piped
        return given

    key, fits = "data.phases.1.sequence_length", growing(64)
    assert [fault.key for fault in rows_can_be_cut(growing(40), Layout.parse("cp8"))] == [key]
    assert [fault.key for fault in sequence_can_be_cut(growing(36), Layout.parse("tp8"))] == [key]
    assert [fault.key for fault in float8_fits(growing(36, float8=Float8(emulate=False)), Layout())] == [key]
    assert not [*rows_can_be_cut(fits, Layout.parse("cp8")), *sequence_can_be_cut(fits, Layout.parse("tp8"))]
    assert not list(pipeline_fits(growing(batch=16), Layout.parse("pp4")))
    (fault,) = pipeline_fits(growing(batch=4), Layout.parse("pp4"))
    assert "data.phases.1.global_batch" in fault.hint and fault.key == "parallel.pipeline.schedule"
    assert "accumulate" not in names(growing(), Layout.parse("dp4"))
    assert "accumulate" in names(growing(batch=16), Layout.parse("dp4"))


def test_features_of_a_job() -> None:
    assert names(job(8, 2, float8=Float8()), Layout.parse("dp4")) == {"dp_shard", "float8"}
    assert names(job(8, 8, float8=Float8(experts=True)), Layout()) == {"float8", "float8_experts"}
    assert names(job(8, 2), Layout.parse("hsdp2x2")) == {"dp_shard", "dp_replicate"}
    assert names(job(8, 2, "bf16", shard=FullyShard(reduce="each")), Layout()) == {"accumulate", "bf16", "reduce_each"}
    assert names(job(8, 4), Layout.parse("dp2cp2")) == {"dp_shard", "cp_all_gather"}
    assert names(job(8, 4, context=ContextParallel(kind="ring")), Layout.parse("dp2cp2")) == {"dp_shard", "cp_ring"}
    assert names(job(8, 4, context=ContextParallel(kind="ring")), Layout.parse("dp2")) == {"dp_shard"}
    sparse = job(8, 4)
    sparse.model = decoder_of(frozenset({"experts"}))
    assert names(sparse, Layout.parse("dp2")) == {"dp_shard", "experts"}
    assert names(sparse, Layout.parse("dp2tp2ep2etp2")) == {"dp_shard", "tp", "experts", "ep_all_to_all", "etp"}
    sparse.transforms["expert"] = ExpertParallel(dispatcher="hierarchical", ranks_per_node=2)
    assert names(sparse, Layout.parse("dp2")) == {"dp_shard", "experts"}
    assert names(sparse, Layout.parse("dp2tp2ep4")) == {"dp_shard", "tp", "experts", "ep_hierarchical"}
    assert names(job(compute="bf16", mine=object()), Layout.parse("dp4")) == {"dp_shard", "bf16", "builtins:mine"}


def test_what_no_test_proves_is_refused_by_name() -> None:
    (fault,) = compositions_are_proven(job(tensor=TensorParallel(asynchronous=True)), Layout.parse("tp2"))
    assert "transforms.tensor.asynchronous = true" in str(fault)
    assert list(compositions_are_proven(job(tensor=TensorParallel(sequence_parallel=False)), Layout.parse("dp2tp2"))) == []
    (fault,) = compositions_are_proven(job(mine=object()), Layout.parse("dp4"))
    assert "transforms.mine" in str(fault)
    assert list(compositions_are_proven(job(compute="bf16"), Layout.parse("hsdp2x2"))) == []


def test_pairs_are_of_planes_that_interact() -> None:
    """By hand: what one row has, what none can have, and what is proven apart because nothing connects it."""
    apart = [Use(name, plane, name) for name, plane in (("cp_ring", "layout"), ("cp_ulysses", "layout"))]
    assert unproven(apart) == [tuple(apart)], "a run has one kind only"
    split = [Use("compile", "graph", ""), Use("pp_zbv", "layout", "")]
    assert unproven(split) == [tuple(split)], "it computes a backward in two parts"
    unknown = Use("mine", "layout", "")
    assert unproven([Use("dp_shard", "layout", ""), unknown]) == [(unknown,)]
    moved = [use._replace(plane="storage") for use in apart]
    assert unproven(moved) == []
    assert interact("optimizer", "layout") and not interact("optimizer", "numerics") and not interact("data", "layout")


@pytest.mark.parametrize(
    ("ep", "node", "hint"),
    [(8, 2, ""), (8, 4, ""), (8, 8, "2, 4"), (8, 3, "2, 4"), (6, 4, "2, 3"), (2, 2, "all_to_all"), (1, 2, "")],
)
def test_nodes_share_the_ranks_of_ep_evenly(ep: int, node: int, hint: str) -> None:
    given = job(expert=ExpertParallel(dispatcher="hierarchical", ranks_per_node=node))
    faults = list(nodes_fit(given, Layout(dp_shard=ep, ep=ep)))
    assert [fault.key for fault in faults] == ["transforms.expert.ranks_per_node"] * bool(hint)
    assert all(hint in fault.hint for fault in faults)
    assert list(nodes_fit(job(expert=ExpertParallel()), Layout(dp_shard=ep, ep=ep))) == []


@pytest.mark.parametrize(
    ("layout", "experts", "policy", "hint"),
    [
        ("dp2ep2", True, "selective", "'full'"),
        ("dp2tp2", True, "selective", "remove transforms.compile"),
        ("dp2tp2", True, "full", "remove transforms.compile"),
        ("dp2tp2", False, "full", "'selective'"),
        ("dp2ep2", True, "full", ""),
        ("dp2", True, "selective", ""),
        ("dp2tp2", False, "selective", ""),
        ("dp2cp2", False, "full", ""),
    ],
)
def test_what_is_compiled_cannot_be_recomputed_in_every_way(layout: str, experts: bool, policy: Any, hint: str) -> None:
    both = {"recompute": Recompute(policy=policy), "compile": Compile()}
    given = job(**both)
    if experts:
        given.model.moe = object()
    faults = list(compiled_recompute_fits(given, Layout.parse(layout)))
    assert [fault.key for fault in faults] == ["transforms.recompute.policy"] * bool(hint)
    assert all(hint in fault.hint for fault in faults)
    for alone in ("recompute", "compile"):
        given.transforms = {alone: both[alone]}
        assert list(compiled_recompute_fits(given, Layout.parse(layout))) == []


def test_checks_import_no_torch() -> None:
    modules = "forge_parallel.checks, forge_parallel.model.plan, forge_parallel.launch.environment"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


DECODER = DecoderConfig(dim=32, heads=4, kv_heads=2, layers=2, ffn_dim=32, vocab_size=64)
DYNAMIC = Rope(scaling="dynamic", factor=2.0, original_max_length=16)


def keys(model: Any, layout: str, **transforms: Any) -> list[str]:
    job = SimpleNamespace(model=model, transforms=transforms)
    checks = (tensors_can_be_cut, rows_can_be_shared, float8_can_multiply)
    return [fault.key for check in checks for fault in check(job, Layout.parse(layout))]


@pytest.mark.parametrize(
    ("changes", "layout", "transforms", "found"),
    [
        ({}, "tp4", {}, []),
        ({}, "tp8", {}, ["model.heads"]),
        ({"heads": 6, "kv_heads": 3, "head_dim": 8}, "tp2", {}, ["model.kv_heads"]),
        ({"heads": 6, "kv_heads": 2, "head_dim": 8}, "tp3", {}, ["model.kv_heads"]),
        ({"ffn_dim": 3, "vocab_size": 5}, "tp4", {}, ["model.vocab_size", "model.ffn_dim"]),
        ({"heads": 2, "ffn_dim": 3}, "tp4", {}, ["model.heads", "model.ffn_dim"]),
        ({"moe": MoEConfig(experts=4, losses=Losses(sequence=0.1))}, "tp2", {}, ["model.moe.losses.sequence"]),
        (
            {"moe": MoEConfig(experts=4, losses=Losses(sequence=0.1))},
            "tp2",
            {"tensor": TensorParallel(sequence_parallel=False)},
            [],
        ),
        ({"rope": DYNAMIC}, "cp2", {}, ["model.rope.scaling"]),
        ({}, "cp4", {"context": ContextParallel(kind="ulysses")}, []),
        ({}, "cp4tp2", {"context": ContextParallel(kind="ulysses")}, ["transforms.context.kind"]),
        ({}, "cp8", {"context": ContextParallel(kind="ulysses")}, ["transforms.context.kind"]),
        ({"attention": GQA(soft_cap=5.0)}, "cp2", {"context": ContextParallel(kind="ring")}, ["transforms.context.kind"]),
        ({"attention": GQA(soft_cap=5.0)}, "cp2", {}, []),
        ({}, "1", {"float8": Float8()}, []),
        ({}, "tp4", {"float8": Float8()}, ["transforms.float8"]),
        ({"kv_heads": 4}, "tp2", {"float8": Float8()}, []),
        ({"ffn_dim": 40}, "1", {"float8": Float8()}, ["transforms.float8"]),
        ({"ffn_dim": 40}, "1", {"float8": Float8(exclude=["*.mlp.*"])}, []),
        ({}, "1", {"float8": Float8(include=["*.nothing"])}, ["transforms.float8"]),
        ({}, "1", {"float8": Float8(exclude=["*"])}, ["transforms.float8"]),
        ({}, "1", {"float8": Float8(experts=True)}, ["transforms.float8.experts"]),
        ({"moe": MoEConfig(experts=4), "head_dim": 16}, "dp2tp2etp2", {"float8": Float8(experts=True)}, []),
        (
            {"moe": MoEConfig(experts=4, ffn_dim=16), "head_dim": 16},
            "dp2tp2etp2",
            {"float8": Float8(experts=True)},
            ["transforms.float8.experts"],
        ),
    ],
)
def test_e7_what_ranks_would_refuse(changes: dict[str, Any], layout: str, transforms: dict[str, Any], found: list[str]) -> None:
    assert keys(replace(DECODER, **changes), layout, **transforms) == found


def test_e7_a_model_without_a_shape_is_judged_when_it_is_built() -> None:
    assert keys(SimpleNamespace(), "dp2tp2cp2", float8=Float8(include=["nothing"])) == []
    assert keys(SimpleNamespace(shape=(3, 4)), "dp2tp2cp2") == [], "a shape of another kind"


def test_what_is_left_to_the_start_is_named() -> None:
    def left(model: Any, layout: str, **transforms: Any) -> tuple[str, ...]:
        return left_to_the_start(SimpleNamespace(model=model, transforms=transforms), Layout.parse(layout))

    unknown = SimpleNamespace()
    assert left(unknown, "dp2") == ()
    assert left(unknown, "dp2tp2cp2", float8=Float8()) == ("parallel.tp", "parallel.cp", "transforms.float8")
    assert left(DECODER, "dp2tp2cp2", float8=Float8()) == ()
    images = VLM(dim=32, heads=4, layers=2, vocab_size=64)
    assert left(images, "tp2", float8=Float8()) == ("transforms.float8",), "a fusion may add layers"
