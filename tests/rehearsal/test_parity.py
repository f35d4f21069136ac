"""The gate on CUDA devices: a run there gives the numbers of one process on a CPU, in fp64, from the same initial weights.

Ring attention refuses fp64 on CUDA, and is compared in fp32.
"""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from forge_core.layout import Layout
from forge_parallel.verify.parity import Case, Measurement, compare
from forge_parallel.verify.proofs import proven_rows
from harness.pool import World
from parallel.compositions.rows import LOW, case_of, layout_of, measured
from parallel.compositions.test_compositions import equals_one_process
from parallel.one_process import alone
from rehearsal.ranks import draws_of_a_cpu, own_device

pytestmark = pytest.mark.rehearsal
FAST = [row for row in (*proven_rows()["fast"], *proven_rows()["fusions"]) if row.isdisjoint(LOW | {"compile", "cp_ring"})]
AXES = (
    *({"dp_shard"}, {"dp_shard", "dp_replicate"}, {"tp"}, {"cp_all_gather"}, {"cp_ulysses"}),
    *({"dp_shard", "experts", "ep_all_to_all"}, {"dp_shard", "experts", "ep_all_gather"}, {"pp_1f1b"}),
)


def measured_where_it_runs(case: Case, layout: str, row: frozenset[str]) -> Measurement:
    """On a device where the process has one: in the pool of `devices`. Weights are drawn as on a CPU in both."""
    with own_device() as device, draws_of_a_cpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without")  # it is compiled where there is a compiler
        return measured(case, layout, row, device)


@pytest.mark.parametrize("row", [frozenset[str](), frozenset({"experts"})], ids=["dense", "experts"])
def test_one_process_gives_the_bits_of_a_cpu(devices: World, row: frozenset[str]) -> None:
    """But for attention, in which the two use different kernels: last bits of fp64 may differ."""
    case = replace(case_of(row | {"accumulate"}), steps=3)
    expected = alone(measured_where_it_runs, case, "1", row)
    (found,) = devices.run(measured_where_it_runs, 1, case, "1", row, group=False)
    difference = compare(expected, found)
    assert difference.initial
    assert max(difference.loss, difference.norm, difference.gradients, difference.weights) <= 1e-12, difference
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("row", AXES, ids=lambda row: "+".join(sorted(row)))
def test_each_axis_equals_one_process(devices: World, row: Any) -> None:
    equals_one_process(devices, frozenset(row) | {"accumulate"}, measured_where_it_runs, group=False)


NARROW = (
    {"dp_shard", "bf16"},
    {"dp_shard", "tp", "bf16", "bf16_state"},
    {"dp_shard", "float8"},
    {"dp_shard", "bf16", "float8", "float8_rowwise"},
)


@pytest.mark.parametrize("row", NARROW, ids=lambda row: "+".join(sorted(row)))
def test_fewer_digits_are_as_near_as_those_of_a_cpu(devices: World, row: Any) -> None:
    """In bf16 attention is flex attention; products in float8 are those that a GPU with them has."""
    equals_one_process(devices, frozenset(row) | {"accumulate"}, measured_where_it_runs, group=False)


RINGS = ({"cp_ring"}, {"cp_ring", "tp", "experts", "ep_all_gather"})


@pytest.mark.parametrize("row", RINGS, ids=lambda row: "+".join(sorted(row)))
def test_a_ring_equals_one_process(devices: World, row: Any) -> None:
    row = frozenset(row) | {"accumulate"}
    case = replace(case_of(row), compute="fp32", state="fp32", steps=1)
    expected = alone(measured_where_it_runs, case, "1", row)
    layout = layout_of(row)
    for found in devices.run(measured_where_it_runs, layout.world, case, str(layout), row, group=False):
        difference = compare(expected, found)
        assert difference.accepted("fp32"), difference


@pytest.mark.parametrize("row", FAST, ids=lambda row: "+".join(sorted(row)))
def test_a_composition_equals_one_process(devices: World, row: frozenset[str]) -> None:
    equals_one_process(devices, row, measured_where_it_runs, group=False)


def _with_the_streams_of_the_device(case: Case, layout: str, row: frozenset[str]) -> Measurement:
    with own_device() as device:
        return measured(case, layout, row, device)


def test_initial_weights_of_the_device_are_the_same_in_every_layout(devices: World) -> None:
    case, row = replace(case_of(frozenset({"dp_shard", "tp"})), steps=0), frozenset({"dp_shard", "tp"})
    (whole,) = devices.run(_with_the_streams_of_the_device, 1, case, "1", row, group=False)
    layout = Layout(dp_shard=2, tp=2)
    for found in devices.run(_with_the_streams_of_the_device, 4, case, str(layout), row, group=False):
        assert all(torch.equal(tensor, found.initial[name]) for name, tensor in whole.initial.items())
